"""A card of each kind is complete, valid and short, and its example runs without the package."""

import ast
import copy
import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import reranker_of_modules
from huggingface_hub import EvalResult, InferenceClient, ModelCard
from huggingface_hub.utils import validate_repo_id
from markdown_it import MarkdownIt
from peft import get_peft_model
from sentence_transformers import CrossEncoder
from transformers.pipelines import SUPPORTED_TASKS

import neobert_hf
from neobert_hf import sentence_transformer
from neobert_hf.checkpoints import write_card, write_record
from neobert_hf.checkpoints.embedding_models import multi_vector_encoder, sparse_encoder
from neobert_hf.checkpoints.record import GENERATED

HOSTILE = 'a"); __import__("os").system("id") # `|<script>![x](y)\n```\n# title\x1b[2J'
HEADS = {
    "masked": ("NeoBERTForMaskedLM", {}),
    "encoder": ("NeoBERTModel", {}),
    "classifier": ("NeoBERTForSequenceClassification", {"id2label": {0: "good", 1: "bad", 2: HOSTILE}}),
    "several": ("NeoBERTForSequenceClassification", {"num_labels": 60, "problem_type": "multi_label_classification"}),
    "number": ("NeoBERTForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
    "pairs": ("NeoBERTForSequenceClassification", {"id2label": {0: "yes", 1: "no"}}),
    "tagger": ("NeoBERTForTokenClassification", {"id2label": {0: "O", 1: "B-PER", 2: "I-PER"}}),
    "answers": ("NeoBERTForQuestionAnswering", {}),
    "choice": ("NeoBERTForMultipleChoice", {}),
}
EMBEDDERS = ("embedding", "sparse", "multi_vector", "reranker", "modules", "modules of 3 classes")
KINDS = (*HEADS, "adapter", *EMBEDDERS)
MINI = Path(neobert_hf.MINI_MODEL_PATH)
TRAINING = {"hub_model_id": None, "license": "cc-by-4.0", "language": ["de"], "max_steps": -1}


def record(folder, training=(), **facts):
    """Write the record of a training, with a file of another machine and a dataset of the Hub."""
    score = {"dataset": "train.csv", "split": "validation", "metrics": {"eval_f1": 0.5, "eval_runtime": 3.0}}
    known = {"source": "org/ancestor", "rows": {"train.csv": 1234, "org/set": None}, "datasets": ["org/set"]}
    known |= {"scores": [score], "settings": {"learning_rate": 3e-4, "seed": 1}}
    write_record(folder, SimpleNamespace(**TRAINING | dict(training)), **known | facts)


def embedder(kind, checkpoint):
    if kind == "sparse":
        return sparse_encoder(checkpoint)
    if kind == "multi_vector":
        return multi_vector_encoder(checkpoint)
    if kind.startswith("modules"):
        return reranker_of_modules(checkpoint, num_labels=3 if "3" in kind else 1)
    if kind == "reranker":
        return CrossEncoder(checkpoint, num_labels=1, model_kwargs={"ignore_mismatched_sizes": True})
    return sentence_transformer(checkpoint)


@pytest.fixture(scope="module")
def folder(checkpoint, tokenizer, tmp_path_factory):
    root = tmp_path_factory.mktemp("cards")
    start = root / "base"  # with its tokenizer
    neobert_hf.NeoBERTForMaskedLM.from_pretrained(checkpoint).save_pretrained(start)
    tokenizer.save_pretrained(start)
    for kind in KINDS:
        torch.manual_seed(0)
        out = root / kind
        if kind in HEADS:
            name, options = HEADS[kind]
            getattr(neobert_hf, name).from_pretrained(start, **options).save_pretrained(out)
            tokenizer.save_pretrained(out)
        elif kind == "adapter":
            classifier = neobert_hf.NeoBERTForSequenceClassification.from_pretrained(start, num_labels=2)
            neobert_hf.save_adapter(get_peft_model(classifier, neobert_hf.lora_config("SEQ_CLS", r=2)), out)
            tokenizer.save_pretrained(out)
        else:
            embedder(kind, str(start)).save_pretrained(str(out), create_model_card=False)
        record(out, is_pair=kind == "pairs")
        write_card(out)
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_a_card_is_valid_and_short_and_says_how_the_model_was_trained(folder, kind):
    text = (folder / kind / "README.md").read_text("utf-8")
    card = ModelCard(text)
    data = card.data.to_dict()
    tasks = {name.replace("_", "-") for name in dir(InferenceClient)} | set(SUPPORTED_TASKS)
    assert data["pipeline_tag"] in tasks | {"sentence-similarity", "text-ranking", "multiple-choice"}
    assert data["library_name"] in ("transformers", "peft", "sentence-transformers")
    assert (card.data.license, card.data.language) == ("cc-by-4.0", ["de"])
    for name in data["datasets"]:
        validate_repo_id(name)
    assert len(text.encode()) < 20_000 and max(map(len, text.splitlines())) < 2000
    assert "- train.csv: 1,234 rows\n" in text and "- [org/set](https://huggingface.co/datasets/org/set)\n" in text
    assert "| train.csv, validation | F1 | 0.5 |" in text and "runtime" not in text
    assert "| learning\\_rate | 0.0003 |" in text and "Languages of its texts: de." in text
    assert all(isinstance(result, EvalResult) and result.task_type for result in card.data.eval_results)
    what = {"modules": "says how well a text answers", "modules of 3 classes": "puts a text into one of 3 classes"}
    assert what.get(kind, "") in text and ("class" in text) <= (kind != "modules")
    if kind != "adapter":  # whose base is a folder
        assert card.data.base_model == "org/ancestor" and "It was trained from org/ancestor." in text


@pytest.mark.slow
def test_the_example_of_each_card_runs_without_the_package(folder, tmp_path):
    script = """
import contextlib, io, json, sys
sys.modules["neobert_hf"] = None
results = {}
for kind, code in json.load(sys.stdin).items():
    before, printed = set(sys.modules), io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    code_of = [name for name in set(sys.modules) - before if name.startswith("transformers_modules.")]
    results[kind] = [printed.getvalue(), any("modeling_neobert" in name for name in code_of)]
print(json.dumps(results))
"""
    cards = {kind: (folder / kind / "README.md").read_text("utf-8") for kind in KINDS}
    cards["mini"] = (MINI / "README.md").read_text("utf-8")
    (folder / "mini").symlink_to(MINI)
    codes = {kind: re.search(r"^```python\n(.*?)^```$", card, re.S | re.M)[1] for kind, card in cards.items()}
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    run = subprocess.run([sys.executable, "-B", "-c", script], input=json.dumps(codes), **options)
    assert not run.returncode, run.stderr
    results = json.loads(run.stdout.splitlines()[-1])
    assert results.keys() == codes.keys() and all(text.strip() and is_remote for text, is_remote in results.values())
    shown = re.search(r"^```text\n(.*?)^```$", cards["mini"], re.DOTALL | re.MULTILINE)[1]
    words = [[line.split()[1:] for line in text.splitlines()] for text in (results["mini"][0], shown)]
    assert words[0] == words[1]  # the scores depend on the processor, their order does not


def test_hostile_labels_masks_and_file_names_stay_text(folder, model, tokenizer, tmp_path):
    """They come from files of data; one of them tries to end the code, the cell and the fence."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.mask_token = HOSTILE
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    record(tmp_path, rows={HOSTILE: 3}, scores=[{"dataset": HOSTILE, "metrics": {"f1": 0.5}}], remark=HOSTILE)
    write_card(tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    code = re.search(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)}
    assert calls == {"pipeline", "fill_mask", "print"}
    labels = (folder / "classifier" / "README.md").read_text("utf-8")
    for card in (text, labels):
        rendered = MarkdownIt().enable("table").render(ModelCard(card).text)
        assert "<script>" not in rendered and "<img" not in rendered and rendered.count("<h1>") == 1
        assert "\x1b" not in card and 'system("id") # `|' in html.unescape(rendered)


ODD = "a\u202eb\u2028c\u200fd\x85e\x00f"
SCORE = {"dataset": ODD, "dataset_id": ODD, "config": ODD, "split": ODD, "metrics": {"f1": 0.5}}


@pytest.mark.parametrize(
    ("facts", "given"),
    [
        ({"source": ODD, "datasets": [ODD], "rows": {ODD: 3}, "scores": [SCORE]}, {}),
        ({"settings": {ODD: ODD}, "remark": ODD}, {}),
        ({"training": {"license": ODD, "language": [ODD], "hub_model_id": ODD}}, {}),
        ({}, {"model_id": ODD, "license": ODD, "language": [ODD], "example": [ODD]}),
    ],
)
@pytest.mark.parametrize("kind", ["masked", "classifier", "adapter"])
def test_no_character_of_a_card_or_its_head_controls_a_terminal_or_reorders(folder, tmp_path, kind, facts, given):
    copied = shutil.copytree(folder / kind, tmp_path / "copied")
    record(copied, **facts)
    write_card(copied, **given, overwrite=True)
    text = (copied / "README.md").read_text("utf-8")
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "ab c" in text and ModelCard(text).data.to_dict()["pipeline_tag"]


def test_a_card_is_replaced_if_it_is_the_same_or_a_library_made_it_or_this_is_asked_for(folder, tmp_path):
    ignore = shutil.ignore_patterns("README.md")
    saved = shutil.copytree(folder / next(iter(HEADS)), tmp_path / "saved", ignore=ignore)
    (saved / "README.md").write_text(f"text\n{GENERATED[1]}\n")
    for license in ("mit", "mit", "apache-2.0"):
        write_card(saved, license=license, overwrite=license == "apache-2.0")
        assert ModelCard.load(saved / "README.md").data.license == license
    changed = (saved / "README.md").read_text() + "my words"
    (saved / "README.md").write_text(changed)
    with pytest.raises(FileExistsError, match="exists; name another file, or give overwrite"):
        write_card(saved)
    assert (saved / "README.md").read_text() == changed


def test_a_single_language_is_one_and_the_example_of_a_mask_suits_any_text(folder, tmp_path):
    copied = shutil.copytree(folder / "masked", tmp_path / "copied")
    record(copied, {"language": "en"})
    write_card(copied, overwrite=True)
    assert ModelCard.load(copied / "README.md").data.language == ["en"]
    write_card(copied, language="fr", overwrite=True)
    card = ModelCard.load(copied / "README.md")
    assert card.data.language == ["fr"] and "This is an example of a [MASK]." in card.text


@pytest.mark.parametrize("kind", ["classifier", "tagger", "answers", "adapter"])
def test_a_card_shows_the_given_row_as_text_and_scores_beside_trivial_ones(folder, tmp_path, capsys, kind):
    shutil.copytree(folder / kind, tmp_path / kind)
    score = {"dataset": "a.csv", "metrics": {"f1": 0.5}, "trivial": {"f1": 0.25}}
    other = {
        "dataset": "b.csv",
        "metrics": {"f1": 0.6, "mse": 2.0},
        "trivial": {"f1": 0.5},
        "tfidf": {"f1": 0.55},
        "frozen": {"f1": 0.7},
    }
    record(tmp_path / kind, scores=[score, other])
    row = [HOSTILE + " 🎉", "When does it end?"][: 1 + (kind == "answers")]
    write_card(tmp_path / kind, example=row, overwrite=True)
    card = (tmp_path / kind / "README.md").read_text("utf-8")
    code = re.search(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)[1]
    literals = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
    assert literals >= {*row} and "\x1b" not in card and "parcel" not in card
    table = """| trivial answer | TF-IDF | frozen vectors |\n|---|---|---|---|---|---|
| a.csv | F1 | 0.5 | 0.25 |  |  |\n| b.csv | F1 | 0.6 | 0.5 | 0.55 | 0.7 |\n| b.csv | mean squared error | 2 |  |  |  |"""
    assert f"{table}\n\nThe trivial answer does not look" in card
    printed = capsys.readouterr().out
    assert "shows a row of your data" in printed and "\x1b" not in printed


def test_an_embedding_model_of_the_folder_of_a_classifier_is_no_classifier(folder, tmp_path):
    sentence_transformer(str(folder / "classifier")).save_pretrained(str(tmp_path), create_model_card=False)
    write_card(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.pipeline_tag == "sentence-similarity"


@pytest.mark.parametrize("start, words", [(str(MINI), "the mini model of neobert\\_hf"), ("a/b", "a/b"), (None, "")])
def test_the_start_of_a_chain_of_trainings_is_named(start, words, model, tokenizer, tmp_path):
    for folder, source in ((tmp_path / "first", start), (tmp_path / "second", str(tmp_path / "first"))):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        record(folder, source=source)
        write_card(folder, model_id="org/second", license="mit", language=["fr"])
    card = ModelCard.load(folder / "README.md")
    assert (f"It was trained from {words}." in card.text) == bool(words) and str(tmp_path) not in card.text
    assert card.data.base_model == ("a/b" if start == "a/b" else None)
    assert (card.data.license, card.data.language) == ("mit", ["fr"]) and '"org/second"' in card.text


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("adapter_config.json", "{}", "names no base_model_name_or_path"),
        ("adapter_config.json", "[]", "is no JSON object"),
        ("config_sentence_transformers.json", "[]", "is no JSON object"),
        ("config_sentence_transformers.json", '{"model_type": ["x"]}', "holds a .*x.*, which is not one of"),
        ("README.md", None, "is a pipe"),
    ],
)
def test_a_damaged_folder_gets_no_card(folder, tmp_path, name, content, message):
    copied = shutil.copytree(folder / "masked", tmp_path / "copied")
    (copied / "README.md").unlink()
    (copied / name).write_text(content) if content else os.mkfifo(copied / name)
    with pytest.raises(ValueError, match=message):
        write_card(copied)
