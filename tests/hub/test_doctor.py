"""`neobert doctor` names each kind of damage, and finds nothing in good checkpoints. It runs nothing and changes nothing."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GOLDEN, run_main
from oracle import CONFIG, random_weights, write_checkpoint
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

import neobert_cli
import neobert_hf
from neobert_hf import AUTO_CLASSES, NeoBERTForMaskedLM, NeoBERTForSequenceClassification
from neobert_hf.hub.doctor import examine, report_lines
from neobert_hf.hub.stored_numbers import odd_values
from neobert_hf.model import modeling_neobert

BLOCK = "model.transformer_encoder.1"
LARGE = "a" * 8


@pytest.fixture(scope="module")
def good(checkpoint, tokenizer, tmp_path_factory):
    """The tiny masked language model as this library saves it: weights, config, code, tokenizer."""
    folder = tmp_path_factory.mktemp("good") / "model"
    NeoBERTForMaskedLM.from_pretrained(checkpoint).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def codes(report, severity="error"):
    return {finding["code"] for finding in report["findings"] if finding["severity"] == severity}


def content(folder):
    """Names, bytes and times of all files."""
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in sorted(folder.rglob("*")) if file.is_file()}


# --- The zoo: each function breaks a copy of the good folder ------------------------------------------------------------


def weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors", metadata={"format": "pt"})


def settings(folder, name="config.json", drop=(), **changes):
    stored = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({key: stored[key] for key in stored if key not in drop} | changes))


def put(name, value):
    """A function that writes a number into a tensor."""

    def change(tensors):
        tensors[name].flat[7] = value

    return lambda folder: weights(folder, change)


def split_gate_and_up(tensors):
    split = {}
    for name, value in tensors.items():
        if ".w12." in name:
            split[name.replace("w12", "w1")], split[name.replace("w12", "w2")] = np.split(value, 2)
        else:
            split[name] = value
    return split


def tie(folder):
    """As the fork pszemraj/NeoBERT exports: separate gate and up, no own decoder."""
    weights(folder, lambda tensors: {k: v for k, v in split_gate_and_up(tensors).items() if "decoder" not in k})
    settings(folder, tie_word_embeddings=True)


def without(*names):
    return lambda folder: weights(folder, lambda tensors: {k: v for k, v in tensors.items() if k not in names})


def pickled(name):
    def change(folder):
        torch.save({"a": torch.zeros(2)}, folder / name)
        (folder / "model.safetensors").unlink()

    return change


def deepspeed(folder):
    (folder / "model.safetensors").unlink()
    (folder / "global_step3").mkdir()
    (folder / "latest").write_text("global_step3")
    torch.save({"module": {}}, folder / "global_step3/mp_rank_00_model_states.pt")


def truncate(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def flip_a_bit_of_an_exponent(folder):
    tensors = load_file(folder / "model.safetensors")
    start = (folder / "model.safetensors").read_bytes().index(tensors[f"{BLOCK}.wo.weight"].tobytes())
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(start + 4 * 9 + 3)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 0x40]))  # the highest bit of the exponent of a number below 2


def index(weight_map_of):
    """Shards whose index a function changes."""

    def change(folder):
        model = NeoBERTForMaskedLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="20kB")
        file = folder / "model.safetensors.index.json"
        stored = json.loads(file.read_text())
        weight_map_of(folder, stored["weight_map"])
        file.write_text(json.dumps(stored))

    return change


def lose_a_shard(folder, weight_map):
    (folder / sorted(set(weight_map.values()))[1]).unlink()


def leave_the_folder(folder, weight_map):
    shutil.copy(folder / weight_map["decoder.bias"], folder.parent / "outside.safetensors")
    weight_map["decoder.bias"] = "../outside.safetensors"


def link_outside(folder):
    (folder.parent / "secret").write_text("token")
    (folder / "chat_template.jinja").symlink_to(folder.parent / "secret")


def write_published_code(folder):
    """The published code in outline: it computes the rotary table in `__init__`, as a buffer that is not saved."""
    for file in folder.glob("*.py"):
        file.unlink()
    (folder / "rotary.py").write_text("def precompute_freqs_cis(width, length):\n    return None\n")
    (folder / "model.py").write_text(
        "from torch import nn\nfrom transformers import PretrainedConfig, PreTrainedModel\n"
        "from .rotary import precompute_freqs_cis\n\n"
        "class NeoBERTConfig(PretrainedConfig):\n    model_type = 'neobert'\n\n"
        "class NeoBERT(PreTrainedModel):\n    def __init__(self, config):\n        super().__init__(config)\n"
        "        freqs_cis = precompute_freqs_cis(config.dim_head, config.max_length)\n"
        "        self.register_buffer('freqs_cis', freqs_cis, persistent=False)\n\n"
        "    def _init_weights(self, module):\n        module.weight.data.uniform_(-0.02, 0.02)\n"
    )
    settings(folder, auto_map={"AutoConfig": "model.NeoBERTConfig", "AutoModel": "model.NeoBERT"})


def replace_tokenizer(num_tokens):
    def change(folder):
        vocabulary = json.loads((folder / "tokenizer.json").read_text())
        words = {f"word{i}": 5 + i for i in range(num_tokens)}
        vocabulary["model"]["vocab"] = dict(list(vocabulary["model"]["vocab"].items())[:5]) | words
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))

    return change


def embed_and(break_it):
    """A folder of sentence-transformers, broken."""

    def change(folder):
        whole = folder.parent / "whole"
        neobert_hf.sentence_transformer(str(folder)).save_pretrained(str(whole))
        shutil.rmtree(folder)
        whole.rename(folder)
        break_it(folder)

    return change


def put_pooling_outside(folder):
    modules = json.loads((folder / "modules.json").read_text())
    shutil.copytree(folder / modules[1]["path"], folder.parent / "pooling")
    modules[1]["path"] = "../pooling"
    (folder / "modules.json").write_text(json.dumps(modules))


def name_foreign_module(folder):
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "somebody.pooling.Pooling"
    (folder / "modules.json").write_text(json.dumps(modules))


WO, W12, W3 = f"{BLOCK}.wo.weight", f"{BLOCK}.ffn.w12.weight", f"{BLOCK}.ffn.w3.weight"
ZOO = {
    # layouts
    "gate and up apart": (lambda folder: weights(folder, split_gate_and_up), {"w1w2"}),
    "an export of the fork": (tie, {"w1w2", "tied-decoder"}),
    "a decoder without bias": (without("decoder.bias"), {"tied-decoder"}),
    "pickled weights": (pickled("pytorch_model.bin"), {"pickle"}),
    "weights of the published training": (pickled("state_dict.pt"), {"pickle"}),
    "states of DeepSpeed": (deepspeed, {"deepspeed"}),
    "NeoDictaBERT": (lambda folder: settings(folder, encoder_init_range=0.02), {"neodictabert"}),
    "tensors of another model": (
        lambda folder: save_file({"bert.embeddings": np.ones((2, 2), np.float32)}, folder / "model.safetensors"),
        {"other-tensors"},
    ),
    # tensors
    "a missing tensor": (without(WO), {"tensors-missing"}),
    "a missing last block": (
        lambda folder: weights(folder, lambda t: {k: v for k, v in t.items() if "encoder.2." not in k}),
        {"config-mismatch"},
    ),
    "no head": (without("decoder.weight", "decoder.bias"), {"tensors-missing"}),
    "a tensor of an odd shape": (lambda f: weights(f, lambda t: t.update({WO: t[WO][:-1].copy()})), {"shape"}),
    "integers": (lambda f: weights(f, lambda t: t.update({WO: t[WO].astype(np.int8)})), {"dtype"}),
    # numbers
    "NaN": (put(WO, np.nan), {"nan"}),
    "infinity": (put(WO, -np.inf), {"infinity"}),
    "a flipped bit": (flip_a_bit_of_an_exponent, {"huge"}),
    "a hole in the file": (lambda f: weights(f, lambda t: t.update({W3: np.zeros_like(t[W3])})), {"zeros"}),
    # files
    "a truncated file": (truncate, {"weights-damaged"}),
    "an empty file": (lambda folder: (folder / "model.safetensors").write_bytes(b""), {"weights-damaged"}),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), {"weights-missing"}),
    "a missing shard": (index(lose_a_shard), {"weights-missing"}),
    "an index that leaves the folder": (index(leave_the_folder), {"weights-missing"}),
    "a link out of the folder": (link_outside, {"link"}),
    # config
    "no config": (lambda folder: (folder / "config.json").unlink(), {"config-missing"}),
    "half a config": (lambda folder: (folder / "config.json").write_text('{"model_type":'), {"json-damaged", "weights-missing"}),
    "another model type": (lambda folder: settings(folder, model_type="bert"), {"other-model"}),
    "a wrong value": (lambda folder: settings(folder, norm_eps=-1), {"config-invalid"}),
    "another vocabulary": (lambda folder: settings(folder, vocab_size=97), {"config-mismatch"}),
    "another width": (lambda folder: settings(folder, hidden_size=64, dim_head=16), {"config-mismatch"}),
    "another SwiGLU width": (lambda folder: settings(folder, intermediate_size=128), {"config-mismatch"}),
    "weights elsewhere": (lambda folder: settings(folder, transformers_weights="x.safetensors"), {"weights-elsewhere"}),
    # code
    "the published code": (write_published_code, {"rotary-buffer"}),
    "code of another repository": (
        lambda folder: settings(folder, auto_map={"AutoModel": "somebody/repository--code.Model"}),
        {"foreign-code"},
    ),
    "a pipeline of a third party": (
        lambda folder: settings(folder, custom_pipelines={"mine": {"impl": "somebody/repository--code.Pipeline"}}),
        {"foreign-code"},
    ),
    "code without one of its files": (lambda f: (f / "losses_neobert.py").unlink(), {"code-incomplete"}),
    "half a file of code": (lambda f: (f / "losses_neobert.py").write_text("def f("), {"code-damaged"}),
    # tokenizer
    "a tokenizer of another model": (replace_tokenizer(400), {"tokenizer-vocabulary"}),
    "half a tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), {"tokenizer-damaged"}),
    "a tokenizer without its vocabulary": (lambda f: (f / "tokenizer.json").unlink(), {"tokenizer-missing"}),
    # embedding models
    "NaN in an embedding model": (embed_and(put(WO.removeprefix("model."), np.nan)), {"nan"}),
    "a module outside": (embed_and(put_pooling_outside), {"module-outside"}),
    "a missing module": (embed_and(lambda folder: shutil.rmtree(folder / "1_Pooling")), {"module-missing"}),
    "a module of a third party": (embed_and(name_foreign_module), {"foreign-code"}),
}


@pytest.mark.parametrize("name", ZOO)
def test_each_damage_is_found_and_nothing_else_and_the_folder_is_unchanged(good, tmp_path, name):
    break_it, expected = ZOO[name]
    shutil.copytree(good, tmp_path / "model")
    break_it(tmp_path / "model")
    before = content(tmp_path)
    report = examine(tmp_path / "model")
    assert codes(report) == expected, report["findings"]
    assert not report["is_clean"] and content(tmp_path) == before
    for finding in report["findings"]:
        assert finding["where"] and len(finding["meaning"]) > 20 and len(finding["mend"]) > 10
        assert "\n" not in finding["meaning"] + finding["mend"]
