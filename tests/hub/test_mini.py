"""The model inside the package is small and complete, and its card states the measured results."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline

pytest.importorskip(
    "sentence_transformers", reason="the mini model embeds by sentence-transformers (pip install -e .[embed])"
)

from conftest import largest_file
from sentence_transformers import SentenceTransformer

import neobert_hf
from neobert_hf.hub import mini
from neobert_hf.hub.mini import MiniArguments, check_out, write_model

FOLDER = Path(neobert_hf.MINI_MODEL_PATH)


def test_embedding_model_and_masked_model_load_completely_from_one_folder_of_at_most_24_megabytes():
    for auto_class in (AutoModel, AutoModelForMaskedLM):
        model, loading = auto_class.from_pretrained(FOLDER, output_loading_info=True)
        assert model.dtype == torch.bfloat16
        assert not loading["missing_keys"] and not loading["mismatched_keys"]
        assert not set(loading["unexpected_keys"]) - {"decoder.weight", "decoder.bias"}
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) <= 24e6
    assert len(AutoTokenizer.from_pretrained(FOLDER)) == model.config.vocab_size


def test_the_model_fills_masks_in_documentation():
    fill = pipeline("fill-mask", str(FOLDER), top_k=5)
    sentences = {
        "Return a new [MASK] of the given shape and type, filled with zeros.": "array",
        "If the file does not [MASK], FileNotFoundError is raised.": "exist",
        "Convert a string to a floating point [MASK].": "number",
        "Returns True if the two objects are [MASK], otherwise False.": "equal",
    }
    found = [answer in {each["token_str"] for each in fill(text)} for text, answer in sentences.items()]
    assert sum(found) >= 3


def test_identifiers_are_words_for_the_shipped_tokenizer_in_every_version_of_transformers():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer.tokenize("HTTPServer") == tokenizer.tokenize("http server")
    assert tokenizer.tokenize("IntervalArray.get_file") == tokenizer.tokenize("interval array . get _ file")
    assert json.loads((FOLDER / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_the_model_finds_answers_in_other_words():
    answers = {
        "remove the last element": "list.pop(index=-1)\nIf the list is empty, IndexError is raised.",
        "how many rows and columns are there": "DataFrame.shape\nA tuple with the dimensions of the frame.",
        "open a network connection": "socket.connect(address)\nThe format of address depends on the address family.",
        "wait for some seconds": "time.sleep(secs)\nThe argument may be a floating point number.",
        "write an object to a file": "json.dump(obj, fp)\nSerialize to a stream.",
    }
    model = SentenceTransformer(neobert_hf.MINI_MODEL_PATH)
    found = model.similarity(model.encode(list(answers)), model.encode(list(answers.values()))).argmax(1)
    assert (np.array(found) == np.arange(len(answers))).sum() >= 4


def test_the_card_states_the_measured_results_and_no_local_paths():
    card, summary = (FOLDER / "README.md").read_text("utf-8"), (FOLDER / "training_summary.json").read_text("utf-8")
    measured = json.loads(summary)["measured"]
    accuracy, retrieval = measured["masked_accuracy"], measured["retrieval"]
    assert accuracy["mini NeoBERT"] >= 0.45 > accuracy["bigram model (the more confident neighbour)"]
    assert retrieval["mini NeoBERT"]["recall@10"] >= 0.9 * retrieval["all-MiniLM-L6-v2, its teacher"]["recall@10"]
    assert all(f" {share:.1%} |" in card for share in accuracy.values())
    assert all(f" {value:.3f} |" in card for scores in retrieval.values() for value in scores.values())
    for text in (card, summary, (FOLDER / "config.json").read_text("utf-8")):
        assert "auto_map" not in text and "runs/" not in text and "/home" not in text


def test_an_installed_package_has_every_file_of_the_model(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=FOLDER.parents[2], check=True, capture_output=True)
    built = {file.relative_to(tmp_path / "neobert_hf/mini") for file in (tmp_path / "neobert_hf/mini").rglob("*.*")}
    assert built == {file.relative_to(FOLDER) for file in FOLDER.rglob("*.*")}


def test_a_build_replaces_nothing_but_an_earlier_build(tmp_path):
    """With `--out src/neobert_hf`, one level too high, the build must not touch the model's source."""
    check_out(FOLDER)
    check_out(tmp_path / "new")
    source = tmp_path / "modeling_neobert.py"
    source.write_text("the model's source")
    with pytest.raises(ValueError, match="holds files that this command did not write"):
        check_out(tmp_path)
    with pytest.raises(ValueError, match="holds files that this command did not write"):
        check_out(FOLDER.parent)
    assert source.read_text() == "the model's source"


def test_a_build_may_replace_a_mini_model_of_an_earlier_version(tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "training_summary.json").write_text(json.dumps({"pretraining": {}, "contrastive": {}, "measured": {}}))
    check_out(tmp_path)


def test_a_build_writes_every_file_that_ships(tmp_path):
    write_model(neobert_hf.MINI_MODEL_PATH, tmp_path)
    built = {file.name for file in tmp_path.iterdir()}
    assert built == {file.name for file in FOLDER.iterdir()} - {"README.md", "training_summary.json", "sources.json"}


def test_a_stage_without_decoder_is_refused(tmp_path):
    AutoModel.from_pretrained(FOLDER).save_pretrained(tmp_path / "bare")
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="has no decoder"):
        write_model(str(tmp_path / "bare"), tmp_path / "out")


def test_the_error_for_a_full_disk_names_the_folder_and_leaves_nothing(tmp_path):
    stage = tmp_path / "stage"
    shutil.copytree(FOLDER, stage)
    shutil.copy(FOLDER / "sources.json", tmp_path)
    arguments = MiniArguments(stages=[str(stage)], corpus=str(tmp_path), out=f"{tmp_path}/out")
    with pytest.raises(OSError, match="out could not be written; the previous content"), largest_file(1 << 20):
        mini.build(arguments)
    assert {file.name for file in tmp_path.iterdir()} == {"stage", "sources.json"}
