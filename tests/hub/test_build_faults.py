"""Building and verifying a folder for the Hub: what is refused, and what a failed build leaves."""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from conftest import largest_file
from transformers import AutoModel, AutoModelForSequenceClassification

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.hub.build import BuildArguments, build, move_files
from neobert_hf.hub.verify import summarize, verify


@pytest.fixture
def saved(model, tokenizer, tmp_path):
    """The tiny masked language model as save_pretrained writes it, with a tokenizer."""
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def hub_folder(saved, tmp_path):
    return build(BuildArguments(model=str(saved), out=str(tmp_path / "hub")))


def assert_same_output(summary, expected):
    """Equal up to the order of summation, which depends on the number of threads (about 1e-7)."""
    assert summary["shape"] == expected["shape"]
    assert summary["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert summary["first_values"] == pytest.approx(expected["first_values"], abs=1e-5)


def test_verify_accepts_a_classifier_and_an_encoder_and_names_missing_heads(
    classifier_checkpoint, checkpoint, tokenizer, tmp_path
):
    for auto_class, source in ((AutoModelForSequenceClassification, classifier_checkpoint), (AutoModel, checkpoint)):
        folder = tmp_path / auto_class.__name__
        auto_class.from_pretrained(source).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        report = verify(folder)
        with torch.no_grad():
            output = auto_class.from_pretrained(source)(
                **tokenizer(["one two three", "four"], padding=True, return_tensors="pt")
            )[0]
        assert report["ok"], report
        assert_same_output(report["output"], summarize(output))
        assert "AutoModelForMaskedLM" in report["new_heads"] and auto_class.__name__ not in report["new_heads"]


def test_verify_reports_a_folder_whose_code_is_broken(saved):
    (saved / "losses_neobert.py").unlink()
    report = verify(saved)
    assert not report["ok"] and "losses_neobert" in report["error"]


def test_the_hub_folder_verifies_and_its_code_sees_no_token(hub_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret too")
    seen = tmp_path / "seen.json"
    with (hub_folder / "modeling_neobert.py").open("a") as code:
        code.write(f"\nimport json, os\nopen({str(seen)!r}, 'w').write(json.dumps(dict(os.environ)))\n")
    report = verify(hub_folder)
    assert report["ok"], report
    environment = json.loads(seen.read_text())
    assert "PATH" in environment and not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} & set(environment)
    assert environment["HF_HOME"] == environment["HOME"] != str(Path.home())


def test_the_error_names_a_model_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match="nothing does not exist; give an existing folder, or an id on the Hub"):
        build(BuildArguments(model=str(tmp_path / "nothing"), out=str(tmp_path / "hub")))


def test_a_model_without_its_tokenizer_is_refused_before_anything_is_written(saved, tmp_path):
    (saved / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"saved holds no tokenizer .*; copy that of its model there"):
        build(BuildArguments(model=str(saved), out=str(tmp_path / "hub")))
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize("name", ['x"), exec("', "org/na me", "../up", "a/b/c", "line\nbreak", ""])
def test_an_invalid_model_id_is_refused(saved, tmp_path, name):
    with pytest.raises(ValueError, match="Repo id"):
        build(BuildArguments(model=str(saved), out=str(tmp_path / "hub"), model_id=name))
    assert not (tmp_path / "hub").exists()


def test_a_first_build_that_fails_leaves_no_files(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "neobert_hf.hub.build.write_card",
        lambda *arguments: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(OSError, match="the disk is full: hub could not be written"):
        build(BuildArguments(model=str(saved), out=str(tmp_path / "hub")))
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_full_disk_is_reported_whichever_library_writes(saved, tmp_path, name, monkeypatch):
    if name == "tokenizer.json":
        monkeypatch.setattr(NeoBERTForMaskedLM, "save_pretrained", lambda self, folder: Path(folder).mkdir())
    num_bytes = (saved / name).stat().st_size - 1
    with pytest.raises(OSError, match="hub could not be written; the previous content"), largest_file(num_bytes):
        build(BuildArguments(model=str(saved), out=str(tmp_path / "hub")))
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


def test_weights_of_an_earlier_build_are_removed(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, names in (
        (old, ("config.json", "model.safetensors", "notes.txt")),
        (new, ("config.json", "model-1.safetensors")),
    ):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(folder.name)
    move_files(new, old, last="config.json")
    assert {file.name: file.read_text() for file in old.iterdir()} == {
        "config.json": "new",
        "model-1.safetensors": "new",
        "notes.txt": "old",
    }


def test_an_interrupted_build_leaves_nothing_that_loads(saved, tmp_path, monkeypatch):
    out, move = tmp_path / "hub", os.replace
    build(BuildArguments(model=str(saved), out=str(out)))
    whole = {file.name: file.read_bytes() for file in out.iterdir()}
    for number in range(len(whole)):
        moves = itertools.count()

        def fail(source, target, number=number, moves=moves):
            if Path(target).is_relative_to(out) and next(moves) == number:
                raise OSError(28, "No space left on device")
            move(source, target)

        with monkeypatch.context() as patched:
            patched.setattr("neobert_hf.hub.build.os.replace", fail)
            with pytest.raises(OSError, match="No space"):
                build(BuildArguments(model=str(saved), out=str(out)))
        assert not (out / "config.json").exists() and {file.name for file in tmp_path.iterdir()} == {"saved", "hub"}
        build(BuildArguments(model=str(saved), out=str(out)))  # retry, with space
        assert {file.name: file.read_bytes() for file in out.iterdir()} == whole


def test_a_hub_folder_can_be_built_again(hub_folder, saved):
    assert build(BuildArguments(model=str(saved), out=str(hub_folder))) == hub_folder
