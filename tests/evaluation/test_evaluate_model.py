"""The evaluation of a model in one go: its figures are those of its parts, and it goes on after an interruption."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="GLUE needs scikit-learn (pip install -e .[train])")

import evaluate_model
from conftest import SENTENCE, run_main
from test_glue import write_task

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.evaluation import glue_runs
from neobert_hf.evaluation.glue import TASKS
from neobert_hf.evaluation.report import evaluation_sections


@pytest.fixture
def command(tokenizer, tmp_path):
    """Tasks at random, and texts of many lengths."""
    shape = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    NeoBERTForMaskedLM(NeoBERTConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
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
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "model/README.md").write_text("---\nlicense: mit\n---\n\n# Model\n")
    return [
        *("--model_name_or_path", tmp_path / "model", "--data_dir", tmp_path / "glue", "--seeds", "2"),
        *(
            "--files",
            tmp_path / "texts.jsonl",
            "--output_dir",
            tmp_path / "out",
            "--max_steps",
            "2",
            "--positions",
            "3",
        ),
    ]


def test_result_page_and_card_have_the_figures_of_the_parts(command, tmp_path):
    card = tmp_path / "model/README.md"
    printed = run_main(evaluate_model, *command, "--report", tmp_path / "report", "--card", card)
    result = json.loads((tmp_path / "out/evaluation.json").read_text())
    perplexity = json.loads((tmp_path / "out/pseudo-perplexity/summary.json").read_text())
    assert result["pseudo_perplexity"].items() >= {"median": perplexity["median"], "texts": 14}.items()
    assert [task["task"] for task in result["glue"]] == ["sst2", "cola", "stsb"]
    for task in result["glue"]:
        files = (tmp_path / "out/glue" / task["task"]).glob("*/result.json")
        scores = sorted(json.loads(file.read_text())["metrics"]["score"] for file in files)
        assert sorted(task["scores"]) == scores and len(scores) == 2
        for text in (printed, card.read_text(), (tmp_path / "report/index.html").read_text()):
            assert f"{np.mean(scores):.1f} ± {np.std(scores, ddof=1):.1f}" in text
    assert str(tmp_path) not in json.dumps(result) + card.read_text()
    assert (tmp_path / "report/index.html").read_text().count("data:image/png;base64,") == 2


@pytest.mark.parametrize(
    "gpu, machine", [(None, "float32, 2 cores of A, AVX2 only"), ("NVIDIA H200", "bfloat16, NVIDIA H200")]
)
def test_the_report_names_the_dtype_and_the_device_that_computed(gpu, machine, tmp_path):
    result = dict(glue=[], learning_rate=1e-3, max_steps=2, dtype="bfloat16" if gpu else "float32", gpu=gpu, cores=2)
    result |= dict(processor="A", instructions="AVX2 only", versions={"torch": "2.13.0"})
    result["pseudo_perplexity"] = dict(texts=1, max_seq_length=8, by_length=[], median=1.0)
    assert f" {machine}, torch 2.13.0." in evaluation_sections(result, tmp_path)[0].text


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_evaluate_reads_the_hub_without_a_folder_of_glue_and_is_offline_with_one():
    for given, offline in ([], "0"), (["GLUE=glue"], "1"):
        made = subprocess.run(
            ["make", "-s", "-f", "-", "-o", ".venv/dev", "evaluate", *given],
            input="include Makefile\nevaluate:\n\t@echo offline $$HF_HUB_OFFLINE, GPU [$$CUDA_VISIBLE_DEVICES]\n",
            cwd=Path(__file__).parents[2],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        assert made.stdout == f"offline {offline}, GPU []\n", made.stderr


def test_the_same_command_again_computes_nothing_twice(command, tmp_path, monkeypatch):
    run_main(evaluate_model, *command)
    lines = (tmp_path / "out/pseudo-perplexity/texts.jsonl").read_text()
    monkeypatch.setattr(glue_runs, "fine_tune", lambda *_: pytest.fail("a finished run runs again"))
    run_main(evaluate_model, *command)
    assert (tmp_path / "out/pseudo-perplexity/texts.jsonl").read_text() == lines


def test_a_card_that_does_not_exist_or_is_damaged_is_an_error_before_any_computation(command, tmp_path):
    with pytest.raises(SystemExit, match=r"none\.md is not a file; name the README\.md of the model"):
        run_main(evaluate_model, *command, "--card", tmp_path / "none.md")
    (tmp_path / "bad.md").write_text("---\nlicense: [mit\n---\n# Model\n")
    with pytest.raises(SystemExit, match=r"the YAML at the beginning of .*bad\.md is damaged"):
        run_main(evaluate_model, *command, "--card", tmp_path / "bad.md")
    assert not (tmp_path / "out/glue").exists()
