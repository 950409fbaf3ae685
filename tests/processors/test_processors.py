"""Other processors, emulated by qemu: x86 without VNNI, and ARM; each answers as this machine does (make test-processors)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import largest_error
from onnxruntime.quantization import QuantType, quantize_dynamic

import neobert_hf
from neobert_hf.export import export_model

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
ARM = ROOT / ".venv-aarch64"  # of aarch64.sh
X86 = ("qemu-x86_64", "-cpu", "Haswell-v4", sys.executable)  # AVX2, and neither AVX-512 nor VNNI
FLOAT32 = 1e-5
pytestmark = pytest.mark.processor


def answers(command, script, *arguments, site=()):
    """What a script writes, run by a Python of some processor."""
    out = arguments[-1]
    path = os.pathsep.join(map(str, (ROOT / "src", *site)))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([*map(str, command), HERE / script, *arguments], check=True, env=environment, stderr=subprocess.PIPE)
    return dict(np.load(out))


@pytest.fixture(scope="session")
def folders(tokenizer, tmp_path_factory):
    """The mini model and a tiny tagger, exported; beside it an int8 file as version 0.1 wrote it."""
    folder = tmp_path_factory.mktemp("folders")
    export_model(neobert_hf.MINI_MODEL_PATH, folder / "embedder", int8=True)
    shutil.copytree(folder / "embedder", folder / "earlier")
    source, target = (folder / "earlier/onnx" / name for name in ("model.onnx", "model_quantized.onnx"))
    columns = {tensor.name for tensor in onnx.load(source).graph.initializer if tensor.dims[-1:] == [1]}
    nodes = onnx.load(source).graph.node
    kept = [node.name for node in nodes if node.op_type == "Gather" and node.input[0] in columns]
    kinds = {"op_types_to_quantize": ["MatMul", "Gather"], "nodes_to_exclude": kept, "per_channel": True}
    quantize_dynamic(source, target, weight_type=QuantType.QInt8, **kinds)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = neobert_hf.NeoBERTConfig(len(tokenizer), embedding_init_range=0.5, classifier_init_range=0.5, **sizes)
    config.id2label = dict(enumerate(["O", "B-A", "I-A", "B-B"]))
    torch.manual_seed(0)
    neobert_hf.NeoBERTForTokenClassification(config).save_pretrained(folder / "source")
    tokenizer.save_pretrained(folder / "source")
    export_model(folder / "source", folder / "tagger")
    return folder


@pytest.fixture(scope="session")
def of_this_machine(folders, tmp_path_factory):
    found = answers([sys.executable], "exported_answers.py", folders, tmp_path_factory.mktemp("out") / "here.npz")
    assert json.loads(str(found["entities"])), "there is something to compare"
    return found


needs_x86 = pytest.mark.skipif(not shutil.which(X86[0]), reason="needs qemu-user (apt-get install qemu-user)")
needs_arm = pytest.mark.skipif(not (ARM / "installed").exists(), reason="needs Debian, root and qemu-user (aarch64.sh)")
PYTHON = ("qemu-aarch64", "-L", ARM / "root", ARM / "root/usr/bin/python3.11")
OTHERS = [
    pytest.param(X86, (), marks=needs_x86, id="x86 without VNNI"),
    pytest.param(PYTHON, (ARM / "site",), marks=needs_arm, id="ARM"),
]


@pytest.mark.parametrize("command, site", OTHERS)
def test_exported_files_answer_alike(command, site, folders, of_this_machine, tmp_path):
    found, wanted = answers(command, "exported_answers.py", folders, tmp_path / "out.npz", site=site), of_this_machine
    assert largest_error(found["float32"], wanted["float32"]) < FLOAT32
    for name in ("embedder", "earlier"):
        cosines = (found[name] * wanted[name]).sum(1)
        assert cosines.min() > 0.998, f"{name}: {cosines}"
    assert str(found["entities"]) == str(wanted["entities"])
    assert largest_error(found["scores"], wanted["scores"]) < FLOAT32


@needs_arm
def test_the_model_answers_alike_on_arm(tmp_path):
    """Errors of bf16 and int8 are those that this machine has too, at most three times."""
    wanted = answers([sys.executable], "model_answers.py", tmp_path / "here.npz")
    found = answers(PYTHON, "model_answers.py", tmp_path / "arm.npz", site=[ARM / "site"])
    for name in ("float32", "copy"):
        assert largest_error(found[name], wanted["float32"]) < FLOAT32
    for name in ("bf16", "int8"):
        here, there = (largest_error(each[name], wanted["float32"]) for each in (wanted, found))
        assert there < 3 * here, (name, here, there)
