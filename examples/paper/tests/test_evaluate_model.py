"""The evaluation of a model in one go: its figures are those of its parts, and the card of a model keeps the rest."""

import json
import shutil

import evaluate_model
import glue_runs
import numpy as np
import pytest
from conftest import SENTENCE, json_lines, run_main
from evaluation_report import evaluation_report, write_card_section
from glue import TASKS
from test_glue import write_task


@pytest.fixture
def command(start, tmp_path):
    """Tasks at random, and texts of many lengths."""
    shutil.copytree(start, tmp_path / "model")
    rng = np.random.default_rng(0)
    words = SENTENCE.split()

    def sentence():
        return " ".join(rng.choice(words, 5))

    rows = {
        "sst2": lambda i: f"{sentence()}\t{i % 2}",
        "cola": lambda i: f"a\t{i % 2}\t\t{sentence()}",
        "stsb": lambda i: "\t".join([*"012345678", sentence(), sentence(), f"{i % 6}.0"][2:]),
    }
    for name, row in rows.items():
        write_task(tmp_path / "glue" / TASKS[name].folder, name, [row(i) for i in range(20)])
    texts = [" ".join(rng.choice(words, length)) for length in range(2, 30, 2)]
    json_lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    (tmp_path / "model/README.md").write_text("---\nlicense: mit\n---\n\n# Model\n")
    return [
        *("--model_name_or_path", tmp_path / "model", "--data_dir", tmp_path / "glue", "--seeds", "2"),
        *("--files", tmp_path / "texts.jsonl", "--output_dir", tmp_path / "out"),
        *("--max_steps", "2", "--positions", "3"),
    ]


@pytest.mark.slow
def test_results_and_card_have_the_figures_of_the_parts_and_nothing_is_computed_twice(command, tmp_path, monkeypatch):
    card = tmp_path / "model/README.md"
    printed = run_main(evaluate_model, *command, "--card", card)
    result = json.loads((tmp_path / "out/evaluation.json").read_text())
    perplexity = json.loads((tmp_path / "out/texts/summary.json").read_text())
    assert result["pseudo_perplexity"].items() >= {"median": perplexity["median"], "texts": 14}.items()
    assert [task["task"] for task in result["glue"]] == ["sst2", "cola", "stsb"]
    for task in result["glue"]:
        files = (tmp_path / "out/glue" / task["task"]).glob("*/result.json")
        scores = sorted(json.loads(file.read_text())["metrics"]["score"] for file in files)
        assert sorted(task["scores"]) == scores and len(scores) == 2
        for text in (printed, card.read_text(), (tmp_path / "out/evaluation.md").read_text()):
            assert f"{np.mean(scores):.1f} ± {np.std(scores, ddof=1):.1f}" in text
    assert str(tmp_path) not in json.dumps(result) + card.read_text()

    (file,) = (tmp_path / "out/texts").glob("texts-*.jsonl")
    lines = file.read_text()
    monkeypatch.setattr(glue_runs, "fine_tune", lambda *_: pytest.fail("a finished run runs again"))
    run_main(evaluate_model, *command)
    assert file.read_text() == lines


@pytest.mark.parametrize("gpu, machine", [(None, "float32, 2 cores of A, AVX2 only"), ("H200", "bfloat16, H200")])
def test_the_report_names_the_dtype_and_the_device_that_computed(gpu, machine):
    result = dict(glue=[], learning_rate=1e-3, max_steps=2, dtype="bfloat16" if gpu else "float32", gpu=gpu, cores=2)
    result |= dict(processor="A", instructions="AVX2 only", versions={"torch": "2.13.0"})
    result["pseudo_perplexity"] = dict(texts=1, max_seq_length=8, by_length=[], median=1.0)
    assert f" {machine}, torch 2.13.0." in evaluation_report(result)
    card = evaluation_report(result, for_card=True)
    assert not any(word in card for word in (machine, "2.13.0", "batches", "| seeds"))


def test_a_card_keeps_everything_but_its_evaluation(tmp_path):
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\n---\n\n# Model\n\nText.\n", "utf-8")
    for score in ("first", "second"):
        write_card_section(card, f"The {score} table.")
        content = card.read_text("utf-8")
        assert content.startswith("---\nlicense: mit\n---") and "# Model\n\nText.\n" in content
    card.write_text(content + "\n## Licence\n\nMIT.\n", "utf-8")
    write_card_section(card, "The third table.")
    content = card.read_text("utf-8")
    assert content.count("## Evaluation") == content.count("table.") == 1 and "The third table." in content
    assert content.endswith("\n## Licence\n\nMIT.\n")
    card.write_text(content.replace("<!-- end -->", ""), "utf-8")
    with pytest.raises(ValueError, match=r"has <!-- table:evaluation --> without <!-- end -->; write the latter where"):
        write_card_section(card, "The fourth table.")
    assert "MIT." in card.read_text("utf-8")
