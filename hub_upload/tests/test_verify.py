"""Verify is right for folders of other people: without architectures, with a tokenizer of their own, with more modules."""

import json
import os
import shutil
from pathlib import Path

import pytest
import verify as script
from conftest import run_main
from verifying import verify

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification, sentence_transformer


@pytest.fixture(scope="module")
def saved(checkpoint, classifier_checkpoint, tokenizer, tmp_path_factory):
    place = tmp_path_factory.mktemp("saved")
    NeoBERTForMaskedLM.from_pretrained(checkpoint).save_pretrained(place / "masked_lm")
    NeoBERTForSequenceClassification.from_pretrained(classifier_checkpoint).save_pretrained(place / "classifier")
    for kind in ("masked_lm", "classifier"):
        tokenizer.save_pretrained(place / kind)
    return place


def changed(folder, **values):
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.slow
def test_a_classifier_is_its_own_class_a_masked_lm_a_new_head_and_its_code_sees_no_token(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret too")
    folder, seen = shutil.copytree(saved / "classifier", tmp_path / "model"), tmp_path / "seen.json"
    with (folder / "modeling_neobert.py").open("a") as code:
        code.write(f"\nimport json, os\nopen({str(seen)!r}, 'w').write(json.dumps(dict(os.environ)))\n")
    report = verify(folder)
    assert report["ok"], report
    assert report["own"] == "AutoModelForSequenceClassification" and report["output"]["shape"] == [2, 3]
    assert "AutoModelForMaskedLM" in report["new_heads"] and report["folder"] == str(folder)
    environment = json.loads(seen.read_text())
    assert "PATH" in environment and not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} & set(environment)
    assert environment["HF_HOME"] == environment["HOME"] != str(Path.home())


@pytest.mark.slow
def test_a_folder_without_architectures_and_without_a_base_class_is_verified_by_the_class_that_it_has(saved, tmp_path):
    folder = shutil.copytree(saved / "classifier", tmp_path / "my.model-1.0 (copy)")
    names = {
        "AutoConfig": "configuration_neobert.NeoBERTConfig",
        "AutoModelForSequenceClassification": "modeling_neobert.NeoBERTForSequenceClassification",
        "AutoTokenizer": ["words.Words", None],
    }
    (folder / "words.py").write_text("from transformers import BertTokenizer\nclass Words(BertTokenizer):\n    pass\n")
    report = verify(changed(folder, architectures=None, auto_map=names))
    assert report["ok"], report
    assert report["own"] == "AutoModelForSequenceClassification" and report["output"]["shape"] == [2, 3]


@pytest.mark.slow
def test_an_embedding_model_is_opened_by_sentence_transformers_too(saved, tmp_path):
    import sentence_transformers

    sentence_transformer(str(saved / "masked_lm")).save_pretrained(str(tmp_path / "model"))
    report = verify(tmp_path / "model")
    assert report["ok"], report
    assert report["embedding"]["class"] == "SentenceTransformer" and report["embedding"]["shape"] == [2, 32]
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    vectors = model.encode(["one two three", "four"])
    assert report["embedding"]["first_values"] == pytest.approx(vectors.flatten()[:8].tolist(), abs=1e-5)
    (tmp_path / "model/1_Pooling/config.json").unlink()
    assert not verify(tmp_path / "model")["ok"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"architectures": ["NeoBERTLMHead"]}, "AutoModelForMaskedLM is the folder's own class, but its weights are"),
        ({"auto_map": None}, "config.json names no code (auto_map)"),
    ],
)
def test_what_is_wrong_is_one_line(saved, change, fault, tmp_path):
    folder = changed(shutil.copytree(saved / "classifier", tmp_path / "folder"), **change)
    report = verify(folder)
    assert not report["ok"] and fault in report["error"] and "\n" not in report["error"]


REFUSED = {
    "a call": (lambda folder: changed(folder, sentence_transformers={"activation_fn": "os.getcwd"}), "foreign code"),
    "a pipe": (lambda folder: (folder / "sub").mkdir() or os.mkfifo(folder / "sub/x.json"), "is a pipe"),
    "no model": (lambda folder: (folder / "config.json").unlink(), "has no config.json; give the folder of a model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nothing_is_loaded_from_a_folder_that_names_code_of_another_place(saved, tmp_path, case, monkeypatch):
    change, fault = REFUSED[case]
    folder = shutil.copytree(saved / "masked_lm", tmp_path / "model")
    change(folder)
    monkeypatch.setattr("subprocess.run", None)  # no process is started
    assert fault in verify(folder)["error"]
    with pytest.raises(SystemExit):
        run_main(script, folder)
