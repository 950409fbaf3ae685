"""Saving and loading: published names, no silently missing tensor, no unpickling, code included."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import Trap
from oracle import split_gate_and_up, write_checkpoint
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer
from verifying import summarize, verify

import neobert_hf
from neobert_hf import AUTO_CLASSES, NeoBERTForMaskedLM, NeoBERTModel
from neobert_hf.model.weight_files_neobert import canonical_name

PACKAGE = Path(neobert_hf.__file__).parent / "model"
CODE_FILES = {file.name for file in PACKAGE.glob("*_neobert.py")}


def tensor_names(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.compat
@pytest.mark.parametrize("auto_class", AUTO_CLASSES)
def test_auto_classes_are_registered_by_importing_the_package(checkpoint, auto_class):
    loaded = getattr(transformers, auto_class).from_pretrained(checkpoint)
    assert type(loaded) is AUTO_CLASSES[auto_class]
    assert neobert_hf.NeoBERT is NeoBERTModel and neobert_hf.NeoBERTLMHead is NeoBERTForMaskedLM


@pytest.mark.compat
def test_a_saved_model_has_the_published_names_the_code_and_the_auto_map(checkpoint, saved):
    assert tensor_names(saved) == tensor_names(checkpoint)
    assert {file.name for file in saved.glob("*.py")} == CODE_FILES
    for name in CODE_FILES:
        assert (saved / name).read_bytes() == (PACKAGE / name).read_bytes()
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["NeoBERTLMHead"]
    assert set(config["auto_map"]) == set(AUTO_CLASSES)
    assert config["auto_map"]["AutoModelForMaskedLM"] == "modeling_neobert.NeoBERTForMaskedLM"
    assert config["auto_map"]["AutoConfig"] == "configuration_neobert.NeoBERTConfig"
    (saved / "tokenizer_config.json").write_text("{}")  # only the model type identifies the tokenizer
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.is_fast
    assert tokenizer("the fox")["input_ids"][0] == tokenizer.convert_tokens_to_ids("[CLS]")


@pytest.mark.slow
@pytest.mark.compat
def test_a_saved_model_loads_in_a_clean_process_with_the_same_output(model, tokenizer, saved):
    """Equal up to the order of summation, which depends on the number of threads (about 1e-7)."""
    report = verify(saved)
    assert report["ok"], report
    assert {name: report["classes"][name] for name in AUTO_CLASSES} == {k: v.__name__ for k, v in AUTO_CLASSES.items()}
    with torch.no_grad():
        logits = model(**tokenizer(["one two three", "four"], padding=True, return_tensors="pt")).logits
    found, expected = report["output"], summarize(logits)
    assert found["shape"] == expected["shape"]
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert found["first_values"] == pytest.approx(expected["first_values"], abs=1e-5)


@pytest.mark.slow
def test_a_model_saved_by_remote_code_is_complete(saved, tmp_path):
    """Load with remote code in a clean process, save there, and verify that folder."""
    again = tmp_path / "again"
    script = (
        "import sys; sys.modules['neobert_hf'] = None\n"
        "from transformers import AutoModelForMaskedLM, AutoTokenizer\n"
        f"AutoModelForMaskedLM.from_pretrained({str(saved)!r}, trust_remote_code=True).save_pretrained({str(again)!r})\n"
        f"AutoTokenizer.from_pretrained({str(saved)!r}).save_pretrained({str(again)!r})\n"
    )
    subprocess.run([sys.executable, "-I", "-c", script], check=True, capture_output=True)
    assert {file.name for file in again.glob("*.py")} == CODE_FILES
    assert verify(again)["ok"]


class Mine(neobert_hf.NeoBERTForSequenceClassification):
    """A subclass that a user defines outside the package."""


def test_a_subclass_saves_the_code_that_its_auto_map_names(classifier_checkpoint, tmp_path):
    Mine.from_pretrained(classifier_checkpoint).save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.glob("*_neobert.py")} == CODE_FILES


@pytest.mark.compat
def test_saving_and_loading_changes_no_bit(model, tmp_path):
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20kB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    for folder in ("whole", "shards"):
        again = AutoModelForMaskedLM.from_pretrained(tmp_path / folder)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, again.get_parameter(name)), name


def test_the_encoder_alone_saves_and_loads(checkpoint, tmp_path):
    encoder = AutoModel.from_pretrained(checkpoint)
    encoder.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["NeoBERT"]
    again = NeoBERTForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(again.model.encoder.weight, encoder.encoder.weight)


def test_loading_a_new_head_keeps_the_encoder_and_initialises_the_head(checkpoint):
    model, info = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=5, output_loading_info=True)
    assert set(info["missing_keys"]) == {"dense.weight", "dense.bias", "classifier.weight", "classifier.bias"}
    weights = load_file(checkpoint / "model.safetensors")
    for name, parameter in model.model.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), weights[f"model.{name}"]), name
    assert 0.01 < model.dense.weight.std() < 0.03 and not model.classifier.bias.any()


def test_blocks_with_offloading_give_the_same_logits(model, checkpoint, tmp_path):
    """accelerate's hooks move all arguments of a block, the layout included; here blocks are offloaded to the disk.

    float64 uses the same operations with hooks and without. In float32, hooks disable the CPU kernels, which round differently.
    """
    devices = {"model.encoder": "cpu", "model.layer_norm": "cpu", "decoder": "cpu"}
    devices |= {f"model.transformer_encoder.{i}": "disk" if i else "cpu" for i in range(3)}
    options = dict(device_map=devices, offload_folder=tmp_path, dtype=torch.float64)
    spread = AutoModelForMaskedLM.from_pretrained(checkpoint, **options)
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    with torch.no_grad():
        assert torch.equal(spread(ids, mask).logits, model.double()(ids, mask).logits)


HALF = "so the head is incomplete; .*"
CONVERT = "by neobert convert .* DST, and load DST"
MASKED_LM, CLASSIFIER = "NeoBERTLMHead", "NeoBERTForSequenceClassification"
INCOMPLETE = {  # the model, what the folder lacks, the message
    "a tensor": (MASKED_LM, "model.transformer_encoder.1.wo", r"lacks 1 encoder tensors \(first: .*\.1\.wo\.weight\)"),
    "fused gate and up": (MASKED_LM, "none", f"ffn.w1 and ffn.w2; write the published layout {CONVERT}"),
    "decoder.bias": (MASKED_LM, "decoder.bias", f"has decoder.weight but no decoder.bias, {HALF}{CONVERT}"),
    "decoder.weight": (MASKED_LM, "decoder.weight", f"no decoder.weight, {HALF}tied to the embedding, set.*{CONVERT}"),
    "a classifier": (CLASSIFIER, "classifier.weight", f"no classifier.weight, {HALF}copy"),
    "a bias": (CLASSIFIER, "dense.bias", f"no dense.bias, {HALF}download or copy the checkpoint again"),
}


@pytest.mark.compat
@pytest.mark.parametrize("lacks", INCOMPLETE)
def test_an_incomplete_checkpoint_is_refused_with_the_way_out(weights, tmp_path, lacks):
    architecture, lost, message = INCOMPLETE[lacks]
    if lacks == "fused gate and up":
        weights = split_gate_and_up(weights)
    write_checkpoint(tmp_path, weights, architecture, drop=(lost,), id2label={i: str(i) for i in range(3)})
    with pytest.raises(ValueError, match=message):
        getattr(neobert_hf, architecture).from_pretrained(tmp_path)
    if lost.startswith(("decoder", "dense", "classifier")):
        AutoModel.from_pretrained(tmp_path)  # needs no head


def test_a_checkpoint_of_another_width_or_a_truncated_one_is_refused(checkpoint, tmp_path):
    with pytest.raises((RuntimeError, ValueError), match="mismatch"):
        AutoModelForMaskedLM.from_pretrained(checkpoint, hidden_size=64, dim_head=None)
    shutil.copy(checkpoint / "config.json", tmp_path)
    whole = (checkpoint / "model.safetensors").read_bytes()
    for length in (len(whole) // 2, 20, 0):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(OSError, match=f"safetensors file of {tmp_path} cannot be read .* truncated or damaged"):
            AutoModelForMaskedLM.from_pretrained(tmp_path)


def test_a_pickle_is_never_unpickled(checkpoint, tmp_path):
    shutil.copy(checkpoint / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    message = f"is a pickle, which can execute any code and is never loaded.* neobert convert {tmp_path} DST"
    with pytest.raises(OSError, match=message):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    for option in ({"use_safetensors": False}, {"use_safetensors": 0}, {"weights_only": False}):
        with pytest.raises(ValueError, match="requests pickled weights, which can execute any code"):
            AutoModelForMaskedLM.from_pretrained(tmp_path, **option)
    save_file({}, tmp_path / "adapter_model.safetensors")  # not the weights
    with pytest.raises(OSError):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert not (tmp_path / "sprung").exists()


ELSEWHERE = (
    *("pytorch_model.bin", "../outside.safetensors", "part/../../outside.safetensors", "/outside.safetensors", 7),
    *("C:\\outside.safetensors", "..\\outside.safetensors", "\\\\server\\outside.safetensors", "a\n/../x.safetensors"),
)
NO_METADATA = '{"weight_map": {"decoder.bias": "other.safetensors"}}'
DAMAGED = ("{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": 1}', '{"weight_map": {"a": []}}', "null")


@pytest.mark.parametrize("content", [*ELSEWHERE, *DAMAGED, NO_METADATA], ids=repr)
def test_an_index_may_name_only_safetensors_inside_its_folder(checkpoint, tmp_path, content):
    folder, message = tmp_path / "folder", "only .safetensors files inside"
    folder.mkdir()
    shutil.copy(checkpoint / "config.json", folder)
    shutil.copy(checkpoint / "model.safetensors", tmp_path / "outside.safetensors")
    save_file({}, folder / "other.safetensors")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    if content in DAMAGED:
        message = "model.safetensors.index.json is not a valid weight index"
    elif content == NO_METADATA:
        message = 'has no "metadata", which transformers requires; add'
    else:
        weight_map = dict.fromkeys(load_file(checkpoint / "model.safetensors"), content)
        content = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(OSError, match=message):
        AutoModelForMaskedLM.from_pretrained(folder)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("where", ["variant", "config"])
def test_neither_a_variant_nor_transformers_weights_may_name_a_pickle(checkpoint, tmp_path, where):
    config = json.loads((checkpoint / "config.json").read_text())
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(checkpoint / "model.safetensors"), "x.bin")}
    (tmp_path / "x.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    name = "model.safetensors.index.fp16.json" if where == "variant" else "w.safetensors.index.json"
    folder = tmp_path if where == "variant" else tmp_path / "sub"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(index))
    if where == "config":
        config["transformers_weights"] = f"sub/{name}"
        shutil.copy(checkpoint / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OSError, match=r"only .safetensors files inside|transformers_weights; remove this key"):
        AutoModelForMaskedLM.from_pretrained(tmp_path, variant="fp16" if where == "variant" else None)


OTHER_NAMES = ("encoder.weight", "layer_norm.weight", "transformer_encoder.1.wo.weight", "model.decoder.bias")
OTHER_NAMES += ("module.model.encoder.weight",)
PLACES = ("one file", "shards", "a shard in a subfolder", "a variant in a subfolder")


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification])
@pytest.mark.parametrize("other, place", [*product(OTHER_NAMES, PLACES[:1]), *product(OTHER_NAMES[:1], PLACES[1:])])
def test_a_tensor_under_two_names_is_refused(checkpoint, tmp_path, auto_class, other, place):
    """transformers loads one of them, without a word."""
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[other] = np.full_like(tensors[canonical_name(other)], 7)
    folder, options, name = tmp_path / "model", {}, "model.safetensors"
    if place == "a variant in a subfolder":
        folder, name, options = folder / "sub", "model.fp16.safetensors", {"subfolder": "sub", "variant": "fp16"}
    (folder / "s").mkdir(parents=True)
    shutil.copy(checkpoint / "config.json", folder)
    if "shard" in place:
        files = {each: f"{'s/' * ('sub' in place)}{i % 2}.safetensors" for i, each in enumerate(tensors)}
        for file in sorted(set(files.values())):
            save_file({each: tensors[each] for each in tensors if files[each] == file}, folder / file, {"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    else:
        save_file(tensors, folder / name, {"format": "pt"})
    with pytest.raises(ValueError, match=r"holds .*, which is the same tensor as .*; remove one of them"):
        auto_class.from_pretrained(tmp_path / "model", **options)


def test_a_tensor_in_two_shards_is_refused(checkpoint, tmp_path):
    tensors = load_file(checkpoint / "model.safetensors")
    shutil.copy(checkpoint / "config.json", tmp_path)
    for name in ("a", "b"):
        save_file(tensors, tmp_path / f"{name}.safetensors", {"format": "pt"})
    weight_map = {each: f"{'ab'[i % 2]}.safetensors" for i, each in enumerate(tensors)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"b.safetensors holds .*, which is the same tensor as .* of .*a.safetensors"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.slow
def test_an_old_transformers_is_refused_with_the_required_version():
    script = (
        "import importlib.metadata as metadata, transformers\n"
        "version = metadata.version\n"
        "metadata.version = lambda name: '4.40.0' if name == 'transformers' else version(name)\n"
        "import neobert_hf\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parents[1])}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert "transformers>=4.57.0 is required" in run.stderr and "pip install -U transformers" in run.stderr


def test_the_shipped_files_import_only_one_another_torch_and_transformers_with_its_requirements():
    for name in CODE_FILES:
        for module in re.findall(r"^\s*(?:from|import)\s+(\.?\w+)", (PACKAGE / name).read_text(), re.MULTILINE):
            is_own = module.startswith(".") and f"{module[1:]}.py" in CODE_FILES
            is_known = module in ("torch", "transformers", "huggingface_hub", "safetensors")
            assert is_own or is_known or module in sys.stdlib_module_names, (name, module)


def test_the_file_of_the_models_imports_every_shipped_file_directly():
    """The loader of transformers 4.57 copies only the files that the file of the model imports directly."""
    code = (PACKAGE / "modeling_neobert.py").read_text()
    direct = {f"{name}.py" for name in re.findall(r"^from \.(\w+) import", code, re.MULTILINE)}
    assert direct == CODE_FILES - {"modeling_neobert.py"}
