"""Every backend, head, dtype and layout on a GPU that is not there: what `make rehearse-gpu` can know without hardware.

The rules of shape, dtype and device are those of torch's own operators for CUDA, MPS and XPU, on fake tensors (fake_devices.py);
the values are computed on the CPU. A kernel that is not part of torch is a stand-in. The counts of host synchronisations and the
numbers of cases are written to benchmarks/results/rehearsal.json.
"""

import functools
import importlib
import importlib.metadata
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from fake_devices import DeviceTensor, FakeDevice, backward, move
from stand_ins.xformers import ops as xformers_ops
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import modeling_flash_attention_utils

import neobert_hf
from neobert_hf.model import attention_neobert, backends_neobert
from neobert_hf.model.attention_neobert import KERNELS
from neobert_hf.model.backends_neobert import BACKENDS

pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs the CUDA build of torch: make rehearse-gpu"),
]

REPORT = Path(__file__).parents[2] / "benchmarks/results/rehearsal.json"
SHAPE = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
SHAPE |= dict(max_position_embeddings=64, classifier_dropout=0.0, num_labels=3)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "autocast": torch.float32}
# of the largest value: three times the spacing of bfloat16, of float16; the order of sums in float32
TOLERANCES = {"float32": 1e-5, "float16": 3 * 2**-10, "bfloat16": 3 * 2**-7, "autocast": 3 * 2**-7}
HOPPER = (9, 0)

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
STAND_INS = (*FLASH, "xformers")
HALF_ONLY = (*FLASH, "torch_varlen")
PACKED_ONLY = (*HALF_ONLY, "xformers")
READS_BOUNDARIES = HALF_ONLY
ON_DEVICE = {"cuda": ("sdpa", "eager", "torch_varlen", *STAND_INS), "mps": ("sdpa", "eager"), "xpu": ("sdpa", "eager")}

HEADS = {
    "encoder": (neobert_hf.NeoBERTModel, {}),
    "masked LM": (neobert_hf.NeoBERTForMaskedLM, {}),
    "sequence classification, first token": (neobert_hf.NeoBERTForSequenceClassification, {}),
    "sequence classification, mean": (neobert_hf.NeoBERTForSequenceClassification, {"classifier_pooling": "mean"}),
    "token classification": (neobert_hf.NeoBERTForTokenClassification, {}),
    "question answering": (neobert_hf.NeoBERTForQuestionAnswering, {}),
    "multiple choice": (neobert_hf.NeoBERTForMultipleChoice, {}),
}

LENGTHS = (7, 3, 7, 1)
MASK = (torch.arange(7) < torch.tensor(LENGTHS)[:, None]).long()
MASK[1] = MASK[1].flip(0)  # padding on the left
ROWS = torch.randint(5, 50, MASK.shape, generator=torch.Generator().manual_seed(0)) * MASK
PACKED = ROWS[MASK.bool()][None]
BOUNDARIES = torch.tensor([0, *LENGTHS]).cumsum(0).int()
NUMBERS = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))[None]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
MASK_4D = MASK[:, None, None].bool()

LAYOUTS = {
    "padded": dict(input_ids=ROWS, attention_mask=MASK),
    "full rows": dict(input_ids=ROWS.clamp(min=5)),
    "cu_seq_lens": dict(input_ids=PACKED, cu_seq_lens_q=BOUNDARIES, max_length_q=7),
    "seq_idx": dict(input_ids=PACKED, seq_idx=NUMBERS),
    "position_ids": dict(input_ids=PACKED, position_ids=POSITIONS),
    "trusted": dict(input_ids=PACKED, cu_seq_lens_q=BOUNDARIES, max_length_q=7, trust_boundaries=True),
    "dense": dict(input_ids=ROWS, attention_mask=MASK),  # unpad_inputs=False
    "4-D mask": dict(input_ids=ROWS, attention_mask=MASK_4D),
}
DENSE = ("dense", "4-D mask")
ROW_LAYOUTS = ("padded", "full rows", *DENSE)


def inputs_of(head, layout, has_spans=True):
    """Inputs and labels; None if the head has no such input."""
    inputs = dict(LAYOUTS[layout])
    rows, tokens = (len(inputs["input_ids"]) if layout in ROW_LAYOUTS else len(LENGTHS)), inputs["input_ids"]
    if head == "multiple choice":
        if layout not in ROW_LAYOUTS:
            return None
        inputs = {name: x.unflatten(0, (2, 2)) for name, x in inputs.items()}
        return inputs | {"labels": torch.tensor([0, 1])}
    if head in ("masked LM", "token classification"):
        labels = tokens % 3 if head == "token classification" else tokens
        return inputs | {"labels": torch.where(tokens % 2 == 0, labels, -100)}
    if head.startswith("sequence"):
        return inputs | {"labels": torch.arange(rows) % 3}
    if head == "question answering" and has_spans and layout in ROW_LAYOUTS:
        return inputs | dict(start_positions=torch.zeros(rows).long(), end_positions=torch.ones(rows).long())
    return inputs


def moved(inputs, device):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


@functools.cache
def model_of(head, dtype, device="cpu"):
    model_class, options = HEADS[head]
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = model_class._from_config(neobert_hf.NeoBERTConfig(**SHAPE, **options), dtype=DTYPES[dtype]).eval()
    return model if device == "cpu" else move(model, device)


def set_backend(model, backend, layout):
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = backend
            module.config.unpad_inputs = layout != "dense"


def tensors_of(output):
    return {name: x for name, x in output.items() if isinstance(x, torch.Tensor)}


@functools.cache
def wanted(head, dtype, layout, has_spans):
    """Outputs on the CPU, and the gradients of the loss, or of the sum of the first output."""
    model = model_of(head, dtype)
    set_backend(model, "sdpa", layout)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, dtype == "autocast"):
        output = model(**inputs_of(head, layout, has_spans))
    loss_of(output).backward()
    return tensors_of(output), {name: x.grad for name, x in model.named_parameters()}


def loss_of(output):
    tensors = tensors_of(output)
    return tensors["loss"] if "loss" in tensors else sum(x.float().cos().sum() for x in tensors.values())


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """What torch asks the driver before it runs an operation."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.xpu, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args: True)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)


@functools.cache
def machine(name):
    """One for all cases: the weights live on it."""
    return FakeDevice(f"{name}:0")


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins of the kernels that are not part of torch; what they read on the host, kernels read on the device."""

    def on_device(function):
        @functools.wraps(function)  # transformers reads the signature
        def run(*args, **kwargs):
            with machine("cuda").kernel():
                return function(*args, **kwargs)

        return run

    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "stand_ins")
    for name in STAND_INS:
        monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(is_installed=lambda: True))
    monkeypatch.setattr(attention_neobert, "find_xformers", lambda: xformers_ops)
    monkeypatch.setattr(xformers_ops, "memory_efficient_attention", on_device(xformers_ops.memory_efficient_attention))

    def load(implementation, *args, **kwargs):
        function = on_device(importlib.import_module(KERNELS[implementation]).flash_attn_varlen_func)
        process = modeling_flash_attention_utils._lazy_define_process_function(function)
        return (None, function, None, None, None), (process, None)

    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", load)
    backends_neobert._find_best_backend.cache_clear()
    yield
    backends_neobert._find_best_backend.cache_clear()


REPORTED = defaultdict(lambda: {"cases": 0, "before": 0, "before_trusted": 0, "after": 0})
DONE = set()


def run(device, model, inputs, dtype="float32"):
    """The output, and the operations for which the host waits before the first block and after it."""
    waits, at_first_block = device.waits, []
    stages = [module for name, module in model.named_modules() if name.endswith("transformer_encoder.0")]
    hooks = [stage.register_forward_pre_hook(lambda *_: at_first_block.append(len(waits))) for stage in stages]
    waits.clear()
    try:
        with torch.autocast(device.device.type, torch.bfloat16, dtype == "autocast"):
            output = model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return output, waits[: at_first_block[-1]], waits[at_first_block[-1] :]


def compare(found, expected, tolerance, case):
    """Shapes, dtypes, device and values; zero where the CPU has zero, at padding."""
    layout, device = case
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert type(x) is DeviceTensor and x.device == device, (layout, name)
        assert (x.shape, x.dtype) == (expected[name].shape, expected[name].dtype), (layout, name)
        values, wanted_values = x.twin.double(), expected[name].double()
        error = (values - wanted_values).abs().max()
        scale = max(wanted_values.abs().max(), 1e-3)  # the gradient of a bias before a softmax is zero up to rounding
        assert tolerance == torch.inf or error <= tolerance * scale, (layout, name, error)


def check_waits(before, after, device, backend, head, layout):
    """No wait after the first block; before it none where boundaries are trusted and read on the device, else one on CUDA."""
    assert not after, (layout, after)
    is_trusted = layout == "trusted" and backend in READS_BOUNDARIES
    reads = [wait for wait in before if "to_device" not in wait.line]  # copies to MPS and XPU are synchronous
    assert len(reads) <= (0 if is_trusted else 1), (layout, before)
    assert device != "cuda" or len(before) == len(reads), (layout, before)
    counts = REPORTED[device, backend]
    counts["cases"] += 1
    key = "before_trusted" if layout == "trusted" else "before"
    counts[key] = max(counts[key], len(before))
    counts["after"] = max(counts["after"], len(after))


CASES = [
    (device, backend, head, dtype)
    for device, backends in ON_DEVICE.items()
    for backend in backends
    for head in HEADS
    for dtype in DTYPES
    if device == "cuda" or dtype != "autocast"  # torch asks its own build of MPS or XPU how to cast
]


@pytest.mark.parametrize(("device", "backend", "head", "dtype"), CASES)
def test_every_layout_runs_by_the_rules_of_the_device_with_the_numbers_of_the_cpu(
    device, backend, head, dtype, kernels
):
    """Outputs have the shapes, dtypes and values of the CPU, and are on the device; gradients too."""
    machine_ = machine(device)
    has_spans = device == "cuda"  # the rules of log_softmax ask torch for the device if a tensor is not contiguous
    with machine_:
        model = model_of(head, dtype, f"{device}:0")
        for layout in LAYOUTS:
            inputs = inputs_of(head, layout, has_spans)
            if inputs is None:
                continue
            set_backend(model, backend, layout)
            inputs = moved(inputs, machine_.device)
            if (backend in HALF_ONLY and dtype == "float32") or (backend in PACKED_ONLY and layout in DENSE):
                with pytest.raises(ValueError, match=r"not torch.float32|packed sequences only"):
                    model(**inputs)
                continue
            output, before, after = run(machine_, model, inputs, dtype)
            expected, gradients = wanted(head, dtype, layout, has_spans)
            compare(tensors_of(output), expected, TOLERANCES[dtype], (layout, machine_.device))
            check_waits(before, after, device, backend, head, layout)
            if layout in ("padded", "cu_seq_lens"):
                model.zero_grad()
                backward(loss_of(output))
                found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
                # Small embeddings multiply the rounding of half precision in the first norm, and the derivative of torch_varlen
                # has no values here.
                has_values = dtype == "float32" and backend != "torch_varlen"
                case = (layout, machine_.device)
                compare(found, {name: gradients[name] for name in found}, 1e-4 if has_values else torch.inf, case)
    DONE.add((device, backend, head, dtype))


@pytest.mark.parametrize("backend", ["sdpa", "torch_varlen"])
def test_trusted_rows_are_one_graph_for_all_lengths_compiled_and_exported(backend):
    """One graph, on the device only, that `torch.compile` keeps for other lengths and numbers of documents."""
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), torch.device("cuda:0"):
        config = neobert_hf.NeoBERTConfig(**SHAPE)
        options = dict(attn_implementation=backend, dtype=torch.bfloat16)
        model = neobert_hf.NeoBERTForMaskedLM._from_config(config, **options).eval()

        def row(num_tokens, num_documents):
            bounds = torch.empty(num_documents + 1, dtype=torch.int32)
            ids = torch.empty(1, num_tokens, dtype=torch.long)
            return dict(input_ids=ids, cu_seq_lens_q=bounds, max_length_q=64, trust_boundaries=True)

        graphs = CompileCounter()
        compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
        for size in ((24, 3), (30, 4), (31, 6)):
            logits = compiled(**row(*size)).logits
            assert (logits.shape, logits.dtype, logits.device.type) == ((1, size[0], 50), torch.bfloat16, "cuda")
        assert graphs.frame_count == 1
        lengths = {"input_ids": {1: Dim("T", min=2, max=4096)}, "cu_seq_lens_q": {0: Dim("N", min=3, max=512)}}
        for strict in (False, True):
            shapes = lengths | {"max_length_q": None, "trust_boundaries": None}
            graph = torch.export.export(model, (), row(24, 3), dynamic_shapes=shapes, strict=strict).graph
            values = [node.meta.get("val") for node in graph.nodes]
            assert {x.device.type for x in values if isinstance(x, torch.Tensor)} == {"cuda"}


@pytest.fixture(scope="module", autouse=True)
def report():
    yield
    if set(CASES) == DONE:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        rows = [
            dict(backend=backend, device=device, word="simulated" if backend in STAND_INS else "rehearsed", **counts)
            for (device, backend), counts in REPORTED.items()
        ]
        REPORT.write_text(json.dumps({"benchmark": "rehearsal", "versions": versions, "rows": rows}, indent=2) + "\n")
