"""What the machine and torch can do: bf16 instructions, the fastest dtype and matrix products, private names, tracing.

All results depend on the processor and not on timing, so two runs on one machine take the same path.
`ATEN_CPU_CAPABILITY=avx2` hides AVX-512 from torch, and so from this file; `NEOBERT_CPU_BF16=0` or `1` overrides the
detection of bf16 instructions, and of their speed.
"""

import os
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.utils import logging

logger = logging.get_logger(__name__)

# On a processor with AVX2 only, oneDNN's fp32 products are at least as fast as MKL's below this number of rows, else slower.
AVX2_ONEDNN_ROWS = 256


def find_private_names() -> SimpleNamespace:
    """Look up the private names of torch; one that a later torch lacks is None, and standard operations run instead."""

    def find(path):
        found = torch
        for name in path.split("."):
            found = getattr(found, name, None)
        return found

    return SimpleNamespace(
        FakeTensor=find("_subclasses.fake_tensor.FakeTensor"),
        are_functorch_transforms_active=find("_C._are_functorch_transforms_active"),
        function_modes=find("overrides._get_current_function_mode_stack"),
        DeviceContext=find("utils._device.DeviceContext"),
        num_dispatch_modes=find("_C._len_torch_dispatch_stack"),
        has_global_hooks=find("nn.modules.module._has_any_global_hook"),
        has_avx512_bf16=find("cpu._is_avx512_bf16_supported"),
        has_amx=find("cpu._is_amx_tile_supported"),
        has_onednn_bf16=find("ops.mkldnn._is_mkldnn_bf16_supported"),
        onednn_linear=find("ops.mkldnn._linear_pointwise"),  # operators that torch.compile emits
        onednn_reorder=find("ops.mkldnn._reorder_linear_weight"),
        onednn_int8_prepack=find("ops.onednn.qlinear_prepack"),
        onednn_int8_linear=find("ops.onednn.qlinear_pointwise"),
    )


TORCH = find_private_names()


def is_tracing(tensor: Tensor) -> bool:
    """Whether tensor values cannot be read: compilation, export, torch.func, CUDA graph capture, fake and meta tensors."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or (TORCH.are_functorch_transforms_active is not None and TORCH.are_functorch_transforms_active())
        or tensor.is_meta
        or (TORCH.FakeTensor is not None and isinstance(tensor, TORCH.FakeTensor))
        or is_capturing(tensor)
    )


def is_capturing(tensor: Tensor) -> bool:
    """Whether the operations of this thread become a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def has_bf16_instructions() -> bool:
    """Whether this CPU has instructions for bf16 products. Without them torch emulates bf16, and fp32 is several times faster.

    Raises:
        ValueError: The environment variable NEOBERT_CPU_BF16 is neither 0 nor 1.
    """
    override = os.environ.get("NEOBERT_CPU_BF16", "")
    if override:
        if override not in ("0", "1"):
            raise ValueError(f"NEOBERT_CPU_BF16={override} is neither 0 nor 1; unset it to detect the instructions")
        return override == "1"
    capability = torch.backends.cpu.get_cpu_capability()
    checks: tuple = ()  # an x86 processor without AVX-512 has no bf16 instructions
    if capability == "AVX512":
        checks = (TORCH.has_avx512_bf16, TORCH.has_amx)
    elif "AVX" not in capability:  # "DEFAULT" and "SVE256" are Arm
        checks = (TORCH.has_onednn_bf16,)
    return any(check is not None and check() for check in checks)


def bf16_is_fastest() -> bool:
    """Whether bf16 products are faster than fp32 products on this CPU.

    Intel processors since Sapphire Rapids, which have AVX512-FP16, have fast bf16 products in AMX only, and a virtual machine can
    hide AMX. What remains is 0.6 times as fast as fp32 (benchmarks/results/dtypes_cpu.md). A torch without
    `torch.cpu.get_capabilities` cannot tell; bf16 then counts as faster.
    """
    has_instructions = has_bf16_instructions()
    if not has_instructions or os.environ.get("NEOBERT_CPU_BF16"):
        return has_instructions
    found = getattr(torch.cpu, "get_capabilities", dict)()
    is_amx_hidden = found.get("avx512_fp16", False) and not found.get("amx_tile", False)
    return not (is_amx_hidden and "Intel" in found.get("cpu_name", ""))


def warn_of_slow_bf16() -> None:
    """Warn once where bf16 is slow on this CPU."""
    if not bf16_is_fastest():
        logger.warning_once(
            "bfloat16 is slower than float32 on this CPU, several times so if it has no bf16 instructions. Load the model with "
            "dtype=torch.float32, or with dtype=neobert_hf.best_dtype(), which is the fastest dtype on any machine."
        )


def best_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """The dtype with the fastest inference on `device` that is at least as precise as bf16.

    On a CPU bfloat16 if bf16 products are faster (`bf16_is_fastest`), else float32. On CUDA bfloat16 from Ampere on, float16 on
    older GPUs. On any other device float32, because no other device was measured.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return torch.bfloat16 if bf16_is_fastest() else torch.float32
    if device.type == "cuda":
        is_ampere = torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if is_ampere else torch.float16
    return torch.float32


def attention_devices(
    blocks: torch.nn.ModuleList,
    device: torch.device,
) -> tuple[torch.device, ...]:
    """The device of the tokens, and those on which accelerate has placed blocks (`device_map`)."""
    # accelerate's hook, which has no public name, moves the arguments of a block to its device
    if not hasattr(blocks[0], "_hf_hook"):
        return (device,)
    of_blocks = [next(block.parameters()).device for block in blocks]
    found = dict.fromkeys((device, *of_blocks))
    found.pop(torch.device("meta"), None)  # offloaded blocks run on the device of the tokens
    return tuple(found)


def onednn_is_best(dtype: torch.dtype, num_rows: int = AVX2_ONEDNN_ROWS) -> bool:
    """Whether oneDNN is the fastest library for products of `num_rows` rows in `dtype` on this CPU.

    The rules were measured on AMD EPYC processors of the third and the fourth generation (benchmarks/README.md).
    """
    if TORCH.onednn_linear is None or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return has_bf16_instructions() and TORCH.has_onednn_bf16 is not None and TORCH.has_onednn_bf16()
    capability = torch.backends.cpu.get_cpu_capability()
    is_faster = capability == "AVX512" or (capability == "AVX2" and num_rows < AVX2_ONEDNN_ROWS)
    return dtype == torch.float32 and is_faster


def has_invariant_products(dtype: torch.dtype) -> bool:
    """Whether a row of a product has the same bits beside any other rows, on this CPU and in `dtype`, by oneDNN.

    With AMX, the order of the sums in bf16 follows the number of rows. On Intel processors with AVX2 only, that of MKL, which
    SDPA calls, follows the number of threads. Both were seen on a Xeon of the fourth generation.
    """
    if TORCH.onednn_reorder is None or not onednn_is_best(dtype, num_rows=1):
        return False
    if dtype == torch.bfloat16:
        return not has_amx()
    found = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.backends.cpu.get_cpu_capability() == "AVX512" or "Intel" not in found.get("cpu_name", "")


def has_amx() -> bool:
    """Whether torch uses the tile registers of AMX on this CPU."""
    is_hidden = torch.backends.cpu.get_cpu_capability() != "AVX512"
    return not is_hidden and TORCH.has_amx is not None and TORCH.has_amx()


def is_autocast_on(device: torch.device) -> bool:
    """Whether torch.autocast is on for a device; the meta device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def product_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of matrix products: that of autocast if it is on, else that of the weights."""
    if is_autocast_on(weight.device):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def widen(x: Tensor) -> Tensor:
    """`x` in float32, or as it is if it has float32 or more."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
