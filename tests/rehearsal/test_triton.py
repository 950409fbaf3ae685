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
from torch.nn.utils.rnn import pad_sequence

from neobert_hf import NeoBERTForMaskedLM

# interpreted kernels: two minutes, if nothing else runs
pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(3600)]
FOLDER = Path(__file__).parent
CONFIG_64 = CONFIG | {"hidden_size": 128, "num_attention_heads": 2, "dim_head": 64, "num_hidden_layers": 2}
# Lengths of documents in each batch. The second batch of a compiled model has other numbers of rows and columns.
CASES = {
    "flex_attention": dict(attention="flex_attention", dtype=torch.float32, batches=[(90, 50)]),
    "flex_decoding": dict(attention="flex_attention", dtype=torch.float32, batches=[(9, 14)]),
    "compiled": dict(attention="sdpa", dtype=torch.float32, batches=[(7, 12), (15, 4, 21)]),
    "compiled_bf16": dict(attention="sdpa", dtype=torch.bfloat16, batches=[(7, 12)]),
    # of an inference copy, around attention that is not compiled
    "regions": dict(attention="sdpa", dtype=torch.float32, batches=[(7, 12), (15, 4, 21), (3,)]),
    "regions_bf16": dict(attention="sdpa", dtype=torch.bfloat16, batches=[(7, 12)]),
}
TRAINED = [name for name, case in CASES.items() if case["dtype"] == torch.float32 and name != "regions"]
FP32 = 1e-5  # rounding errors of two blocks


def make_documents(lengths):
    rng = np.random.default_rng(sum(lengths))
    ids = [rng.integers(1, CONFIG["vocab_size"], length) for length in lengths]
    return ids, [np.where(rng.random(len(x)) < 0.35, x, -100) for x in ids]


def make_inputs(lengths, attention):
    """A packed row for flex attention, else padded rows."""
    ids, labels = ([torch.tensor(x) for x in arrays] for arrays in make_documents(lengths))
    if attention == "flex_attention":
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        return dict(input_ids=torch.cat(ids)[None], labels=torch.cat(labels)[None], cu_seq_lens_q=starts)
    padded = dict(input_ids=(ids, 0), labels=(labels, -100), attention_mask=([torch.ones_like(x) for x in ids], 0))
    return {name: pad_sequence(rows, True, padding) for name, (rows, padding) in padded.items()}


def run_program(name, *arguments, **variables):
    path = os.pathsep.join([str(FOLDER.parents[1] / "src"), str(FOLDER.parent)])
    command = [sys.executable, str(FOLDER / name), *map(str, arguments)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path, **variables})


@pytest.fixture(scope="module")
def weights():
    return random_weights(config=CONFIG_64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, weights):
    """The model, the inputs, and the results of all cases: loss, logits, gradients, and the kernels."""
    folder = tmp_path_factory.mktemp("triton")
    write_checkpoint(folder / "model", weights, config=CONFIG_64)
    cases = {
        name: case | {"batches": [make_inputs(lengths, case["attention"]) for lengths in case["batches"]]}
        for name, case in CASES.items()
    }
    torch.save(cases, folder / "cases.pt")
    caches = dict(TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"), TRITON_CACHE_DIR=str(folder / "triton"))
    run_program("run_generated_kernels.py", folder, TRITON_INTERPRET="1", **caches)
    return folder


def read(folder, name):
    return torch.load(folder / f"{name}.result", weights_only=False)


def largest_error(logits, expected):
    lengths, logits = [len(x) for x in expected], logits.detach().float().numpy()
    rows = logits if len(logits) == len(lengths) else np.split(logits[0], np.cumsum(lengths)[:-1])
    return max(np.abs(row[: len(x)] - x).max() for row, x in zip(rows, expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_generated_kernels_give_the_numbers_of_the_oracle(folder, weights, name):
    """In bf16 with at most three times the error of the model that is not compiled."""
    oracle, case = Oracle(weights, CONFIG_64), CASES[name]
    for lengths, result in zip(case["batches"], read(folder, name)["results"], strict=True):
        documents = make_documents(lengths)
        expected = [oracle.mlm_logits(oracle.encode(ids)[2]) for ids in documents[0]]
        if case["dtype"] == torch.float32:
            tolerance = FP32 * max(np.abs(x).max() for x in expected)
        else:
            plain = NeoBERTForMaskedLM.from_pretrained(folder / "model", dtype=case["dtype"])
            tolerance = 3 * largest_error(plain(**make_inputs(lengths, case["attention"])).logits, expected)
        assert largest_error(result["logits"], expected) < tolerance
        # errors e of all logits change the cross-entropy by at most 2e
        assert result["loss"].item() == pytest.approx(oracle.mlm_loss(*documents), abs=2 * tolerance)


@pytest.mark.parametrize("name", TRAINED)
def test_generated_kernels_give_the_gradients_of_the_oracle(folder, weights, name):
    """In a random direction of each parameter: the derivative of the oracle's loss is a difference quotient in fp64."""
    rng, step = np.random.default_rng(0), 1e-6
    for lengths, result in zip(CASES[name]["batches"], read(folder, name)["results"], strict=True):
        documents = make_documents(lengths)
        for parameter, grad in result["grads"].items():
            direction = rng.standard_normal(grad.shape)
            losses = [
                Oracle(weights | {parameter: weights[parameter] + x * direction}, CONFIG_64).mlm_loss(*documents)
                for x in (step, -step)
            ]
            # an error e of the gradient changes the sum by about |e|
            found, tolerance = (grad.double().numpy() * direction).sum(), FP32 * grad.norm().item()
            assert found == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=tolerance), parameter


@pytest.mark.parametrize("name", CASES)
def test_every_generated_kernel_ran_in_the_interpreter(folder, name):
    case = read(folder, name)
    assert case["launches"] and set(case["launches"]) == {kernel for kernel, _ in case["sources"]}


def test_the_templates_of_flex_attention_are_among_the_kernels(folder):
    packed, short = (read(folder, name)["launches"] for name in ("flex_attention", "flex_decoding"))
    num_layers = CONFIG_64["num_hidden_layers"]
    assert packed["triton_tem_fused_flex_attention_0"] == num_layers
    assert packed["triton_tem_fused_flex_attention_backward_1"] == num_layers
    # shorter than a block of 128 tokens: the kernel that splits the keys, and kernels that join the parts
    assert short["triton_tem_fused_flex_attention_0"] == num_layers
    assert len([kernel for kernel in short if "fused_flex_attention_" in kernel]) > 2


def test_a_compiled_model_is_one_graph_for_all_lengths(folder):
    """fullgraph=True refuses a graph break; here the second batch compiles nothing."""
    assert [result["num_graphs"] for result in read(folder, "compiled")["results"]] == [1, 1]


def test_regions_are_two_graphs_for_all_blocks_and_batches_and_five_kernels_a_block(folder):
    """Beside four products, the last of which adds a sum, and attention: two norms, rotation, a copy of the values, SwiGLU."""
    result = read(folder, "regions")
    assert [batch["num_graphs"] for batch in result["results"]] == [2, 2, 2]
    num_calls = CONFIG_64["num_hidden_layers"] * len(CASES["regions"]["batches"])
    assert sum(result["launches"].values()) == 5 * num_calls


def test_the_templates_of_flex_attention_compile_for_a_t4_and_an_h100(folder):
    """To machine code, by the compiler of Triton and ptxas, within the shared memory of a block."""
    run_program("compile_generated_kernels.py", folder, TRITON_CACHE_DIR=str(folder / "compiled"))
    limits = {75: 64, 90: 227}  # KiB (CUDA C++ Programming Guide, compute capabilities)
    needs = json.loads((folder / "compiled.json").read_text())
    assert len(needs) >= 3 * len(limits)  # forward, backward, and the forward that splits the keys
    for name, capability, num_bytes in needs:
        assert num_bytes <= limits[capability] * 1024, (name, capability)
