"""Saving, loading and publishing: published names, no silently missing tensor, no unpickling, code included."""

import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import largest_file
from oracle import write_checkpoint
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

import neobert_hf
from neobert_hf import AUTO_CLASSES, NeoBERTForMaskedLM, NeoBERTModel
from neobert_hf.hub.build import BuildArguments, build, move_files
from neobert_hf.hub.verify import summarize, verify
from neobert_hf.model import weight_files_neobert

CODE_FILES = {
    "attention_neobert.py",
    "backends_neobert.py",
    "blocks_neobert.py",
    "checkpoint_neobert.py",
    "configuration_neobert.py",
    "inference_neobert.py",
    "kernels_neobert.py",
    "layout_neobert.py",
    "losses_neobert.py",
    "machine_neobert.py",
    "modeling_neobert.py",
    "plan_neobert.py",
    "rotary_neobert.py",
    "weight_files_neobert.py",
}


@pytest.fixture
def saved(model, tokenizer, tmp_path):
    """The tiny masked language model as save_pretrained writes it, with a tokenizer."""
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def tensor_names(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def assert_same_output(summary, expected):
    """Equal up to the order of summation, which depends on the number of threads (about 1e-7)."""
    assert summary["shape"] == expected["shape"]
    assert summary["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert summary["first_values"] == pytest.approx(expected["first_values"], abs=1e-5)


# ---------------------------------------------------------------------------------------- both ways of loading


@pytest.mark.compat
@pytest.mark.parametrize("auto_class", AUTO_CLASSES)
def test_auto_classes_are_registered_by_importing_the_package(checkpoint, auto_class):
    loaded = getattr(transformers, auto_class).from_pretrained(checkpoint)
    assert type(loaded) is AUTO_CLASSES[auto_class]


@pytest.mark.compat
def test_the_fast_tokenizer_is_registered(saved, tmp_path):
    (saved / "tokenizer_config.json").write_text("{}")  # only the model type identifies the tokenizer
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.is_fast
    assert tokenizer("the fox")["input_ids"][0] == tokenizer.convert_tokens_to_ids("[CLS]")


@pytest.mark.compat
def test_a_saved_model_has_the_published_names_the_code_and_the_auto_map(checkpoint, saved):
    assert tensor_names(saved) == tensor_names(checkpoint)
    assert {file.name for file in saved.glob("*.py")} == CODE_FILES
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["NeoBERTLMHead"]
    assert set(config["auto_map"]) == set(AUTO_CLASSES)
    assert config["auto_map"]["AutoModelForMaskedLM"] == "modeling_neobert.NeoBERTForMaskedLM"
    assert config["auto_map"]["AutoConfig"] == "configuration_neobert.NeoBERTConfig"


@pytest.mark.compat
def test_the_saved_code_is_the_code_of_the_package(saved):
    package = Path(neobert_hf.__file__).parent / "model"
    for name in CODE_FILES:
        assert (saved / name).read_bytes() == (package / name).read_bytes()


@pytest.mark.compat
def test_a_saved_model_loads_in_a_clean_process_with_the_same_output(model, tokenizer, saved):
    report = verify(saved)
    assert report["ok"], report
    assert {name: report["classes"][name] for name in AUTO_CLASSES} == {k: v.__name__ for k, v in AUTO_CLASSES.items()}
    assert report["classes"]["NeoBERT"] == "NeoBERTModel"
    assert report["classes"]["NeoBERTLMHead"] == "NeoBERTForMaskedLM"
    with torch.no_grad():
        logits = model(**tokenizer(["one two three", "four"], padding=True, return_tensors="pt")).logits
    assert_same_output(report["output"], summarize(logits))


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


class Mine(neobert_hf.NeoBERTForSequenceClassification):
    """A subclass that a user defines outside the package."""


def test_a_subclass_saves_the_code_that_its_auto_map_names(classifier_checkpoint, tokenizer, tmp_path):
    Mine.from_pretrained(classifier_checkpoint).save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.glob("*_neobert.py")} == CODE_FILES


def test_verify_reports_a_folder_whose_code_is_broken(saved):
    (saved / "losses_neobert.py").unlink()
    report = verify(saved)
    assert not report["ok"] and "losses_neobert" in report["error"]


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


def test_a_device_map_places_every_module(checkpoint):
    model = AutoModelForMaskedLM.from_pretrained(checkpoint, device_map="auto")
    assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()


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


# ---------------------------------------------------------------------------------------- refused checkpoints


def test_a_checkpoint_with_a_missing_tensor_is_refused(weights, tmp_path):
    write_checkpoint(tmp_path, weights, drop=("model.transformer_encoder.1.wo",))
    with pytest.raises(
        ValueError, match=r"lacks 1 encoder tensors \(first: model\.transformer_encoder\.1\.wo\.weight\)"
    ):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.compat
def test_a_checkpoint_with_split_gate_and_up_is_refused_with_the_solution(weights, tmp_path):
    split = {}
    for name, value in weights.items():
        if ".ffn.w12." in name:
            split[name.replace("w12", "w1")], split[name.replace("w12", "w2")] = np.split(value, 2)
        else:
            split[name] = value
    write_checkpoint(tmp_path, split)
    with pytest.raises(ValueError, match=f"ffn.w1 and ffn.w2; fuse them: neobert convert {tmp_path} DST"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.compat
@pytest.mark.parametrize("lost", ["decoder.weight", "decoder.bias"])
def test_a_checkpoint_with_a_decoder_that_is_tied_or_has_no_bias_is_refused_with_the_solution(weights, tmp_path, lost):
    write_checkpoint(tmp_path, weights, drop=(lost,))
    fault = {"decoder.weight": "is tied to the embedding", "decoder.bias": "without a bias"}[lost]
    with pytest.raises(ValueError, match=f"{fault}.* by neobert convert {tmp_path} DST"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    AutoModel.from_pretrained(tmp_path)  # needs no decoder


@pytest.mark.compat
def test_a_config_that_ties_the_decoder_is_refused_with_the_solution(weights, tmp_path):
    write_checkpoint(tmp_path, weights, drop=("decoder",), tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"tie_word_embeddings=True.* neobert convert SRC DST"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


def test_a_truncated_file_is_refused(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    whole = (checkpoint / "model.safetensors").read_bytes()
    for length in (len(whole) // 2, 20, 0):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(OSError, match="truncated or damaged"):
            AutoModelForMaskedLM.from_pretrained(tmp_path)


class Trap:
    """Unpickling an object of this class creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_pickle_is_never_unpickled(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(
        OSError, match=f"a pickle can execute any code and is never loaded.* neobert convert {tmp_path} DST"
    ):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="use_safetensors=False requests pickled weights"):
        AutoModelForMaskedLM.from_pretrained(tmp_path, use_safetensors=False)
    save_file({}, tmp_path / "adapter_model.safetensors")  # not the weights
    for asked in (None, False, 0):
        with pytest.raises((OSError, ValueError)):
            AutoModelForMaskedLM.from_pretrained(tmp_path, use_safetensors=asked)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("pytorch_model.bin", "../outside.safetensors", "part/../../outside.safetensors", "/outside.safetensors"),
        *("C:\\outside.safetensors", "..\\outside.safetensors", "\\\\server\\outside.safetensors", 7),
    ],
)
def test_an_index_may_name_only_safetensors_inside_its_folder(checkpoint, tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(checkpoint / "config.json", folder)
    shutil.copy(checkpoint / "model.safetensors", tmp_path / "outside.safetensors")
    save_file({}, folder / "other.safetensors")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    weight_map = dict.fromkeys(load_file(checkpoint / "model.safetensors"), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for weights_only in (True, False):
        with pytest.raises((OSError, ValueError), match=r"only .safetensors files inside|lets a pickle execute"):
            AutoModelForMaskedLM.from_pretrained(folder, weights_only=weights_only)
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


@pytest.mark.parametrize("name", ["classifier.weight", "dense.bias"])
def test_an_incomplete_classifier_is_refused(classifier_checkpoint, tmp_path, name):
    tensors = load_file(classifier_checkpoint / "model.safetensors")
    del tensors[name]
    shutil.copy(classifier_checkpoint / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"no {re.escape(name)}, so the head is incomplete"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": 1}', "null"])
def test_a_damaged_index_is_refused_by_name(checkpoint, tmp_path, content):
    shutil.copy(checkpoint / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(OSError, match=r"model.safetensors.index.json is not a valid weight index"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


def test_a_sharded_checkpoint_loads(checkpoint, tmp_path):
    model = AutoModelForMaskedLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = AutoModelForMaskedLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


def test_an_index_without_metadata_is_refused_with_the_way_out(checkpoint, tmp_path):
    """transformers reads it, and raises a KeyError."""
    AutoModelForMaskedLM.from_pretrained(checkpoint).save_pretrained(tmp_path, max_shard_size="20KB")
    file = tmp_path / "model.safetensors.index.json"
    content = json.loads(file.read_text())
    del content["metadata"]
    file.write_text(json.dumps(content))
    with pytest.raises(OSError, match='has no "metadata", which transformers requires; add'):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification])
@pytest.mark.parametrize(
    "other",
    [
        "encoder.weight",
        "layer_norm.weight",
        "transformer_encoder.1.wo.weight",
        "module.model.encoder.weight",
        "model.decoder.bias",
    ],
)
@pytest.mark.parametrize("place", ["one file", "shards", "a variant in a subfolder", "the cache of the Hub"])
def test_a_tensor_under_two_names_is_refused(checkpoint, tmp_path, auto_class, other, place):
    """transformers loads one of them, without a word."""
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[other] = np.full_like(tensors[weight_files_neobert.canonical_name(other)], 7)
    folder, source, options, name = tmp_path / "model", tmp_path / "model", {}, "model.safetensors"
    if place == "a variant in a subfolder":
        folder, name, options = folder / "sub", "model.fp16.safetensors", {"subfolder": "sub", "variant": "fp16"}
    if place == "the cache of the Hub":
        repository = tmp_path / "models--org--name"
        folder, source, options = repository / "snapshots/0", "org/name", {"cache_dir": tmp_path}
        (repository / "refs").mkdir(parents=True)
        (repository / "refs/main").write_text("0")
    folder.mkdir(parents=True)
    shutil.copy(checkpoint / "config.json", folder)
    if place == "shards":
        files = {each: f"{i % 2}.safetensors" for i, each in enumerate(tensors)}
        for file in sorted(set(files.values())):
            save_file({each: tensors[each] for each in tensors if files[each] == file}, folder / file, {"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    else:
        save_file(tensors, folder / name, {"format": "pt"})
    with pytest.raises(ValueError, match=r"holds .*, which is the same tensor as .*; remove one of them"):
        auto_class.from_pretrained(source, **options)


def test_a_tensor_in_two_shards_is_refused(checkpoint, tmp_path):
    tensors = load_file(checkpoint / "model.safetensors")
    shutil.copy(checkpoint / "config.json", tmp_path)
    for name in ("a", "b"):
        save_file(tensors, tmp_path / f"{name}.safetensors", {"format": "pt"})
    weight_map = {each: f"{'ab'[i % 2]}.safetensors" for i, each in enumerate(tensors)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"b.safetensors holds .*, which is the same tensor as .* of .*a.safetensors"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


def test_a_checkpoint_of_another_width_is_refused(checkpoint):
    with pytest.raises((RuntimeError, ValueError), match="mismatch"):
        AutoModelForMaskedLM.from_pretrained(checkpoint, hidden_size=64, dim_head=None)


def test_a_neodictabert_checkpoint_is_refused(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "encoder_init_range": 0.02}))
    with pytest.raises(ValueError, match=r"NeoDictaBERT checkpoint: .* rotates halves instead of pairs"):
        AutoConfig.from_pretrained(tmp_path)


def test_an_old_transformers_is_refused_with_the_required_version(tmp_path):
    script = (
        "import importlib.metadata as metadata, transformers\n"
        "version = metadata.version\n"
        "metadata.version = lambda name: '4.40.0' if name == 'transformers' else version(name)\n"
        "import neobert_hf\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=with_package())
    assert "transformers>=4.57.0 is required" in run.stderr and "pip install -U transformers" in run.stderr


def with_package():
    return {**os.environ, "PYTHONPATH": str(Path(neobert_hf.__file__).parents[1])}


# ---------------------------------------------------------------------------------------- the Hub folder


@pytest.fixture
def hub_folder(saved, tmp_path):
    return build(BuildArguments(model=str(saved), out=str(tmp_path / "hub")))


def test_the_hub_folder_verifies_and_its_code_sees_no_token(hub_folder, tmp_path, monkeypatch):
    assert {file.name for file in hub_folder.glob("*.py")} == CODE_FILES
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


def test_the_shipped_files_import_only_one_another_torch_and_transformers_with_its_requirements():
    package = Path(neobert_hf.__file__).parent / "model"
    assert {file.name for file in package.glob("*.py")} == {*CODE_FILES, "__init__.py"}
    allowed = ("torch", "transformers", "huggingface_hub", "safetensors", "xformers")
    for name in CODE_FILES:
        imports = re.findall(r"^\s*(?:from|import)\s+(\.?\w+)", (package / name).read_text(), re.MULTILINE)
        for module in imports:
            is_own = module.startswith(".") and f"{module[1:]}.py" in CODE_FILES
            assert is_own or module in allowed or module in sys.stdlib_module_names, (name, module)


def test_the_file_of_a_model_imports_every_shipped_file_directly():
    """The loader of transformers 4.57 copies only the files that the file of the model imports directly."""
    code = (Path(neobert_hf.__file__).parent / "model/modeling_neobert.py").read_text()
    direct = {f"{name}.py" for name in re.findall(r"^from \.(\w+) import", code, re.MULTILINE)}
    assert direct == CODE_FILES - {"modeling_neobert.py"}


def test_published_class_names_are_importable():
    assert neobert_hf.NeoBERT is NeoBERTModel and neobert_hf.NeoBERTLMHead is NeoBERTForMaskedLM
