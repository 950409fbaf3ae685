"""What the machine can do, asked in one place: bf16 instructions, the fastest dtype and the fastest products.

Every answer follows from the processor's instructions, so that two runs on one machine take the same path.
`ATEN_CPU_CAPABILITY=avx2` hides AVX-512 from torch, and so from this file; `NEOBERT_CPU_BF16=0` (or `1`) overrules
whether the processor has bf16 instructions.

Names of torch that are not public are looked up here and nowhere else (`TORCH`). A later torch may lack one of them: it is
None then, and the plain operations run.
"""

import os
from types import SimpleNamespace

import torch

# Up to this number of rows oneDNN's fp32 products are at least as fast as MKL's on a processor with AVX2 only; above, slower.
AVX2_ONEDNN_ROWS = 256


def find_private_names() -> SimpleNamespace:
    """Look up the names of torch that are not public; None stands for a name that this torch lacks."""

    def find(path):
        found = torch
        for name in path.split("."):
            found = getattr(found, name, None)
        return found

    return SimpleNamespace(
        FakeTensor=find("_subclasses.fake_tensor.FakeTensor"),
        are_functorch_transforms_active=find("_C._are_functorch_transforms_active"),
        has_avx512_bf16=find("cpu._is_avx512_bf16_supported"),
        has_amx=find("cpu._is_amx_tile_supported"),
        has_onednn_bf16=find("ops.mkldnn._is_mkldnn_bf16_supported"),
        onednn_linear=find("ops.mkldnn._linear_pointwise"),  # the operators that torch's own compiler emits
        onednn_reorder=find("ops.mkldnn._reorder_linear_weight"),
    )


TORCH = find_private_names()


def has_bf16_instructions() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware; without, torch emulates it and fp32 is several times as fast.

    Raises:
        ValueError: The environment variable NEOBERT_CPU_BF16 is neither 0 nor 1.
    """
    overruled = os.environ.get("NEOBERT_CPU_BF16", "")
    if overruled:
        if overruled not in ("0", "1"):
            raise ValueError(f"NEOBERT_CPU_BF16={overruled} is neither 0 nor 1; unset it to ask the processor")
        return overruled == "1"
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        asked = (TORCH.has_avx512_bf16, TORCH.has_amx)
    else:  # what torch calls "DEFAULT" or "SVE256" is Arm; an x86 processor without AVX-512 has no bf16 products
        asked = () if "AVX" in capability else (TORCH.has_onednn_bf16,)
    return any(has is not None and has() for has in asked)


def best_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """The dtype in which inference is fastest on `device` and as exact as bf16 at least.

    Returns:
        On a CPU bfloat16 if it has the instructions, else float32. On CUDA bfloat16 from Ampere on, float16 before. On any
        other device float32, since no other has been measured.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return torch.bfloat16 if has_bf16_instructions() else torch.float32
    if device.type == "cuda":
        is_ampere = torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if is_ampere else torch.float16
    return torch.float32


def onednn_is_best(dtype: torch.dtype, num_rows: int = AVX2_ONEDNN_ROWS) -> bool:
    """Whether products of `num_rows` rows in `dtype` are fastest through oneDNN on this CPU.

    A table, measured on AMD EPYC processors of the third and the fourth generation (benchmarks/README.md).
    """
    if TORCH.onednn_linear is None or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return has_bf16_instructions() and TORCH.has_onednn_bf16 is not None and TORCH.has_onednn_bf16()
    capability = torch.backends.cpu.get_cpu_capability()
    return dtype == torch.float32 and (capability == "AVX512" or (capability == "AVX2" and num_rows < AVX2_ONEDNN_ROWS))


def is_autocast_on(device: torch.device) -> bool:
    """Whether torch.autocast is on for a device; the meta device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def product_dtype(weight: torch.Tensor) -> torch.dtype:
    """The dtype in which matrix products run: that of the weights unless autocast is on."""
    return torch.get_autocast_dtype(weight.device.type) if is_autocast_on(weight.device) else weight.dtype


def widen_residual(x: torch.Tensor) -> torch.Tensor:
    """The residual stream in float32 where half precision is not enough for it; products stay in half precision.

    It outgrows float16 in deep blocks. Under autocast it is float32 in any case: FSDP2 shows bf16 weights where DDP has
    float32 ones.
    """
    is_half = x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and is_autocast_on(x.device))
    return x.float() if is_half else x
