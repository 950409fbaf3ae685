"""Hardware capabilities: the environment overrides the detection, and no private name of torch is required."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import neobert_hf
from neobert_hf.model import machine_neobert
from neobert_hf.model.machine_neobert import has_amx, has_bf16_instructions, onednn_is_best


@pytest.mark.parametrize(("answer", "dtype"), [("0", torch.float32), ("1", torch.bfloat16)])
def test_the_environment_overrides_the_detection_and_other_values_are_refused(monkeypatch, answer, dtype):
    monkeypatch.setenv("NEOBERT_CPU_BF16", answer)
    assert has_bf16_instructions() is (answer == "1")
    assert neobert_hf.best_dtype() == neobert_hf.best_dtype(torch.device("cpu")) == dtype
    monkeypatch.setenv("NEOBERT_CPU_BF16", "yes")
    with pytest.raises(ValueError, match="NEOBERT_CPU_BF16=yes is neither 0 nor 1"):
        neobert_hf.best_dtype()


@pytest.mark.parametrize(
    ("capability", "answers", "expected"),
    [
        ("AVX512", {"has_avx512_bf16": True}, True),
        ("AVX512", {"has_amx": True}, True),
        ("AVX512", {"has_onednn_bf16": True}, False),  # oneDNN reports bf16 on AVX-512, but emulates it
        ("AVX2", {"has_avx512_bf16": True}, False),  # the processor has AVX-512, but ATEN_CPU_CAPABILITY=avx2 hides it
        ("NO AVX", {"has_onednn_bf16": True}, False),
        ("DEFAULT", {"has_onednn_bf16": True}, True),
        ("SVE256", {}, False),
    ],
)
def test_bf16_instructions_depend_on_the_processor(monkeypatch, capability, answers, expected):
    monkeypatch.delenv("NEOBERT_CPU_BF16", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for name in ("has_avx512_bf16", "has_amx", "has_onednn_bf16"):
        monkeypatch.setattr(machine_neobert.TORCH, name, lambda name=name: answers.get(name, False))
    assert has_bf16_instructions() is expected


@pytest.mark.parametrize(
    ("capability", "answer", "expected"),
    [
        ("AVX512", lambda: True, True),
        ("AVX512", lambda: False, False),
        ("AVX2", lambda: True, False),  # ATEN_CPU_CAPABILITY=avx2 hides it
        ("AVX512", None, False),  # a torch that cannot tell
    ],
)
def test_amx_depends_on_what_torch_may_use(monkeypatch, capability, answer, expected):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(machine_neobert.TORCH, "has_amx", answer)
    assert has_amx() is expected
    assert neobert_hf.runs.environment()["instructions"].endswith(" and AMX") is expected


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_fp16": True, "amx_tile": False}, torch.float32),  # its AMX is hidden
        ({"cpu_name": "Intel Xeon", "avx512_fp16": True, "amx_tile": True}, torch.bfloat16),  # Sapphire Rapids
        ({"cpu_name": "Intel Xeon", "avx512_fp16": False, "amx_tile": False}, torch.bfloat16),  # Cooper Lake
        ({"cpu_name": "AMD EPYC", "avx512_fp16": True, "amx_tile": False}, torch.bfloat16),
        ({}, torch.bfloat16),
        (None, torch.bfloat16),  # a torch that does not tell
    ],
)
def test_an_intel_processor_whose_amx_is_hidden_uses_float32(monkeypatch, capabilities, dtype):
    monkeypatch.delenv("NEOBERT_CPU_BF16", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(machine_neobert.TORCH, "has_avx512_bf16", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    if capabilities is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert has_bf16_instructions()
    assert neobert_hf.best_dtype() == dtype


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [
        ("cuda", (7, 5), torch.float16),
        ("cuda", (8, 0), torch.bfloat16),
        ("cuda", (9, 0), torch.bfloat16),
        ("mps", None, torch.float32),  # not measured
    ],
)
def test_gpus_before_ampere_use_float16_later_ones_bfloat16_others_float32(monkeypatch, device, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert neobert_hf.best_dtype(device) == expected


@pytest.mark.parametrize("capability, few, many", [("AVX512", 1, 1), ("AVX2", 1, 0), ("DEFAULT", 0, 0)])
def test_onednn_is_chosen_by_processor_and_number_of_rows(monkeypatch, capability, few, many):
    if machine_neobert.TORCH.onednn_linear is None:
        monkeypatch.setattr(machine_neobert.TORCH, "onednn_linear", torch.nn.functional.linear)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert onednn_is_best(torch.float32, 16) is bool(few)
    assert onednn_is_best(torch.float32, 512) is bool(many)
    assert not onednn_is_best(torch.float16, 16)


WITHOUT_ONEDNN = """
import json, sys
import torch
torch.ops.mkldnn = torch.ops.onednn = object()  # as torch of macOS
torch.backends.mkldnn.is_available = lambda: False
import neobert_hf
from neobert_hf.model.machine_neobert import TORCH
from safetensors.torch import load_file
assert TORCH.onednn_linear is TORCH.onednn_int8_prepack is None
wanted, errors = load_file(f"{sys.argv[1]}/expected.safetensors"), {}
inputs = {name: wanted[name] for name in ("input_ids", "attention_mask")}
for dtype in (torch.float32, torch.bfloat16):
    model = neobert_hf.NeoBERTModel.from_pretrained(f"{sys.argv[1]}/masked_lm", dtype=dtype)
    for name, each in {"model": model, "copy": neobert_hf.inference_copy(model)}.items():
        with torch.inference_mode():
            difference = each(**inputs).last_hidden_state.double() - wanted["last_hidden_state"]
        largest = wanted["last_hidden_state"].abs().max()
        errors[f"{name} {dtype}"] = (difference[inputs["attention_mask"] == 1].abs().max() / largest).item()
try:
    neobert_hf.inference_copy(model, int8=True)
except ValueError as error:
    errors["refusal"] = str(error)
print(json.dumps(errors))
"""


@pytest.mark.slow
def test_the_model_is_right_where_torch_has_no_onednn():
    """torch for macOS has none. The error of bf16 is that of its 8 bits after 3 blocks; int8 needs oneDNN and is refused."""
    command = [sys.executable, "-c", WITHOUT_ONEDNN, str(Path(__file__).parents[1] / "golden")]
    errors = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    assert "has no int8 products for cpu on this machine; omit int8=True" in errors.pop("refusal")
    assert len(errors) == 4
    assert all(error < (1e-5 if name.endswith("float32") else 5e-2) for name, error in errors.items()), errors
