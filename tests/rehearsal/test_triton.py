"""The Triton kernels that inductor generates for an H100, run in Triton's interpreter on the CPU and compared with the oracle.

No GPU and no driver is needed: see interpreted_gpu.py. What this cannot show: races between the threads of a kernel, the rounding
of a GPU's matrix units (the interpreter multiplies in fp32), and attention that is no Triton kernel (SDPA, FlashAttention).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import CONFIG, Oracle, random_weights, write_checkpoint

pytestmark = pytest.mark.rehearsal
FOLDER = Path(__file__).parent
CONFIG_64 = CONFIG | {"hidden_size": 128, "num_attention_heads": 2, "dim_head": 64, "num_hidden_layers": 2}
# Two batches for one compiled model: the second has other numbers of rows and columns.
CASES = {
    "flex_attention": dict(attention="flex_attention", is_compiled=False, dtype=torch.float32, batches=[(90, 50)]),
    "flex_decoding": dict(attention="flex_attention", is_compiled=False, dtype=torch.float32, batches=[(9, 14)]),
    "compiled": dict(attention="sdpa", is_compiled=True, dtype=torch.float32, batches=[(7, 12), (15, 4, 21)]),
    "compiled_bf16": dict(attention="sdpa", is_compiled=True, dtype=torch.bfloat16, batches=[(7, 12)]),
}
FP32, BF16 = 1e-5, 3e-2


def make_documents(lengths):
    """Ids and labels of documents; about a third of the tokens have a label."""
    rng = np.random.default_rng(sum(lengths))
    ids = [rng.integers(1, CONFIG["vocab_size"], length) for length in lengths]
    return ids, [np.where(rng.random(len(x)) < 0.35, x, -100) for x in ids]


def make_inputs(lengths, is_packed):
    """One packed row, or padded rows: a compiled model knows packed rows only where attention reads boundaries on the device."""
    ids, labels = make_documents(lengths)
    if is_packed:
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        row = dict(input_ids=torch.tensor(np.concatenate(ids))[None], labels=torch.tensor(np.concatenate(labels))[None])
        return row | dict(
            cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=max(lengths), max_length_k=max(lengths)
        )
    rows = {"input_ids": (ids, 0), "labels": (labels, -100), "attention_mask": ([np.ones_like(x) for x in ids], 0)}
    return {
        name: torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in values], True, padding)
        for name, (values, padding) in rows.items()
    }


def run_program(name, *arguments, **variables):
    command = [sys.executable, str(FOLDER / name), *map(str, arguments)]
    source = str(FOLDER.parents[1] / "src")
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": source, **variables})


@pytest.fixture(scope="module")
def weights():
    return random_weights(config=CONFIG_64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, weights):
    """The results of all cases: loss, logits, gradients, and the kernels."""
    folder = tmp_path_factory.mktemp("triton")
    write_checkpoint(folder / "checkpoint" / "model", weights, config=CONFIG_64)
    cases = {
        name: case | {"batches": [make_inputs(lengths, not case["is_compiled"]) for lengths in case["batches"]]}
        for name, case in CASES.items()
    }
    torch.save(cases, folder / "checkpoint" / "inputs.pt")
    caches = dict(TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"), TRITON_CACHE_DIR=str(folder / "triton"))
    run_program("run_generated_kernels.py", folder / "checkpoint", folder, TRITON_INTERPRET="1", **caches)
    return folder


def read(folder, name):
    return torch.load(folder / f"{name}.pt", weights_only=False)


def real_logits(result, lengths):
    """The logits of each document, without padding."""
    logits = result["logits"].float().numpy()
    if len(logits) == len(lengths):
        return [row[:length] for row, length in zip(logits, lengths)]
    return np.split(logits[0], np.cumsum(lengths)[:-1])


@pytest.mark.parametrize("name", CASES)
def test_generated_kernels_give_the_numbers_of_the_oracle(folder, weights, name):
    oracle, case = Oracle(weights, CONFIG_64), CASES[name]
    # fp32: rounding errors of two blocks; bf16: 8 bits of each of about ten rounded states
    tolerance = FP32 if case["dtype"] == torch.float32 else BF16
    for lengths, result in zip(case["batches"], read(folder, name)["results"], strict=True):
        ids, labels = make_documents(lengths)
        assert result["loss"].item() == pytest.approx(oracle.mlm_loss(ids, labels), rel=tolerance)
        for x, logits in zip(ids, real_logits(result, lengths), strict=True):
            expected = oracle.mlm_logits(oracle.encode(x)[2])
            assert np.abs(logits - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["dtype"] == torch.float32])
def test_generated_kernels_give_the_gradients_of_the_oracle(folder, weights, name):
    """In a random direction of each parameter: the derivative of the oracle's loss is a difference quotient in fp64."""
    rng = np.random.default_rng(0)
    for lengths, result in zip(CASES[name]["batches"], read(folder, name)["results"], strict=True):
        documents = make_documents(lengths)
        for parameter, grad in result["grads"].items():
            direction, step = rng.standard_normal(grad.shape), 1e-6
            ahead, behind = (
                Oracle(weights | {parameter: weights[parameter] + sign * step * direction}, CONFIG_64)
                for sign in (1, -1)
            )
            expected = (ahead.mlm_loss(*documents) - behind.mlm_loss(*documents)) / (2 * step)
            # an error e of the gradient changes the sum by about |e|
            assert (grad.double().numpy() * direction).sum() == pytest.approx(
                expected, abs=FP32 * grad.norm().item()
            ), parameter


@pytest.mark.parametrize("name", CASES)
def test_every_generated_kernel_ran_in_the_interpreter(folder, name):
    case = read(folder, name)
    assert set(case["launches"]) == {kernel for kernel, _ in case["sources"]}
    assert case["launches"]


def test_the_templates_of_flex_attention_are_among_the_kernels(folder):
    packed, short = (read(folder, name)["launches"] for name in ("flex_attention", "flex_decoding"))
    num_layers = CONFIG_64["num_hidden_layers"]
    assert packed["triton_tem_fused_flex_attention_0"] == num_layers
    assert packed["triton_tem_fused_flex_attention_backward_1"] == num_layers
    # shorter than a block of 128 tokens: the kernel that splits the keys, and kernels that join the parts
    assert short["triton_tem_fused_flex_attention_0"] == num_layers
    assert len([kernel for kernel in short if "fused_flex_attention_" in kernel]) > 2


def test_a_compiled_model_is_one_graph_for_all_lengths(folder):
    first, second = read(folder, "compiled")["results"]  # fullgraph=True refuses a graph break
    assert first["num_graphs"] == second["num_graphs"]


def test_the_generated_kernels_compile_for_all_gpus(folder):
    """To machine code, by the compiler of Triton and ptxas, within the shared memory of a block."""
    run_program("compile_generated_kernels.py", folder, TRITON_CACHE_DIR=str(folder / "compiled"))
    limits = {75: 64, 80: 163, 90: 227, 100: 227}  # KiB (CUDA C++ Programming Guide, compute capabilities)
    needs = json.loads((folder / "compiled.json").read_text())
    assert {capability for _, capability, _ in needs} == set(limits)
    for name, capability, num_bytes in needs:
        assert num_bytes <= limits[capability] * 1024, (name, capability)
