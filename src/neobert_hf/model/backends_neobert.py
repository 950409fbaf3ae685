"""The table of attention backends (`BACKENDS`) and `choose_backend`, which selects one."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from .attention_neobert import (
    attend_cpu_tiled,
    attend_eager,
    attend_flex,
    attend_registry,
    attend_sdpa,
    attend_varlen,
    attend_xformers,
    has_cached_kernel,
    has_flash_attention,
    has_varlen,
    loading_error,
    make_flex_mask,
    make_sdpa_mask,
    make_xformers_mask,
)
from .machine_neobert import onednn_is_best

logger = logging.get_logger(__name__)


class Backend(NamedTuple):
    """A row of the table: function, requirements and availability of a backend. An empty field is no restriction.

    Attributes:
        attend: A function of attention_neobert.py; None for a function of the user, which `NeoBERTAttention` calls.
        layouts: "packed", "dense" or both.
        capabilities: For each dtype the lowest and the highest CUDA capability; no other dtype is supported.
        make_mask: Function from a packed layout, the dtype and the result of `runs_fast` to the mask that `attend` reads.
        reads_boundaries: Whether it reads `cu_seq_lens` on the device and needs no value on the host.
        is_automatic: Whether "auto" may choose it.
        is_for_inference: Whether it requires `runs_fast` and fast products (`onednn_is_best`).
        remedy: What to do if it is not installed.
    """

    attend: Callable | None
    layouts: tuple[str, ...]
    devices: tuple[str, ...] = ()
    capabilities: dict[torch.dtype, tuple[tuple[int, int], tuple[int, int]]] = {}
    head_multiple: int = 1
    max_head_width: int | None = None
    make_mask: Callable | None = None
    reads_boundaries: bool = False
    is_automatic: bool = False
    is_for_inference: bool = False
    is_installed: Callable[[], bool] = lambda: True
    remedy: str = ""


def _half(lowest, highest=(99, 0)):
    return dict.fromkeys((torch.float16, torch.bfloat16), (lowest, highest))


_flash: dict[str, Any] = dict(
    attend=attend_registry,
    layouts=("packed",),
    reads_boundaries=True,
    head_multiple=8,
    max_head_width=256,
)

# In the order of preference of "auto". The limits are those of FlashAttention 2.8, 3 beta and 4.0 beta (wider heads run on Hopper
# only), of torch 2.13 (torch_varlen) and of xformers 0.0.35, whose wheel has kernels for Turing or newer, in fp32 up to Hopper.
# tests/rehearsal/test_contracts.py compares them with these packages.
BACKENDS = {
    "flash_attention_3": Backend(
        **_flash,
        devices=("cuda",),
        capabilities=_half((9, 0), (9, 9)),
        is_automatic=True,
        is_installed=lambda: has_flash_attention(3) or has_cached_kernel("flash_attention_3"),
        remedy="pip install kernels and load once with attn_implementation='kernels-community/flash-attn3', "
        "or build it from the folder hopper of https://github.com/Dao-AILab/flash-attention",
    ),
    "flash_attention_2": Backend(
        **_flash,
        devices=("cuda", "mlu", "musa", "npu", "xpu"),
        capabilities=_half((8, 0)),
        is_automatic=True,
        is_installed=lambda: has_flash_attention(2) or has_cached_kernel("flash_attention_2"),
        remedy="pip install kernels and load once with attn_implementation='kernels-community/flash-attn2', "
        "or pip install flash-attn --no-build-isolation",
    ),
    "flash_attention_4": Backend(
        **{**_flash, "max_head_width": 128},
        devices=("cuda",),
        capabilities=_half((9, 0), (12, 9)),
        is_installed=lambda: has_flash_attention(4),
        remedy="pip install --pre flash-attn-4",
    ),
    "torch_varlen": Backend(
        **{**_flash, "attend": attend_varlen},
        devices=("cuda",),
        capabilities=_half((8, 0)),
        is_automatic=True,
        is_installed=has_varlen,
        remedy=f"it needs torch>=2.10, but torch {torch.__version__} is installed; pip install -U torch",
    ),
    "xformers": Backend(
        attend_xformers,
        layouts=("packed",),
        devices=("cuda",),
        capabilities={
            torch.float32: ((7, 5), (9, 0)),
            torch.float16: ((7, 5), (99, 0)),
            torch.bfloat16: ((8, 0), (99, 0)),
        },
        head_multiple=8,
        max_head_width=256,
        make_mask=make_xformers_mask,
        is_automatic=True,
        is_installed=lambda: not loading_error("xformers"),
        remedy="pip install 'xformers>=0.0.35'",
    ),
    "cpu_tiled": Backend(
        attend_cpu_tiled,
        layouts=("packed",),
        devices=("cpu",),
        capabilities={torch.bfloat16: ((0, 0), (99, 0))},
        is_automatic=True,
        is_for_inference=True,
    ),
    "sdpa": Backend(
        attend_sdpa,
        layouts=("packed", "dense"),
        make_mask=make_sdpa_mask,
        is_automatic=True,
    ),
    "eager": Backend(
        attend_eager,
        layouts=("dense",),
    ),
    "flex_attention": Backend(
        attend_flex,
        layouts=("packed",),
        make_mask=make_flex_mask,
    ),
}


def find_backend(implementation: str) -> Backend:
    """The row of `implementation`, or a generic row for a FlashAttention kernel from the Hub or a function of the user."""
    if implementation in BACKENDS:
        return BACKENDS[implementation]
    if "flash" in implementation:
        return Backend(
            attend_registry,
            layouts=("packed",),
            capabilities=_half((0, 0)),
            reads_boundaries=True,
        )
    return Backend(None, layouts=("dense",))


def check_installed(implementation: str) -> None:
    """Raise ImportError with the installation command if a backend of the table is not installed."""
    backend = find_backend(implementation)
    if not backend.is_installed():
        error = loading_error(implementation) or "is not installed"
        raise ImportError(f"attn_implementation={implementation!r} {error}: {backend.remedy}")


def is_own_backend(implementation: str) -> bool:
    """Whether a backend is in the table but not in transformers' registry, so that transformers cannot check it."""
    return implementation in BACKENDS and BACKENDS[implementation].attend is not attend_registry


class Situation(NamedTuple):
    """What determines which backends can run: devices and dtype of attention, head width, layout, result of `runs_fast`."""

    devices: tuple[torch.device, ...]
    dtype: torch.dtype
    head_dim: int
    is_packed: bool
    is_fast: bool = False


def choose_backend(
    implementation: str,
    situation: Situation,
    need_weights: bool = False,
) -> str:
    """Choose the attention backend: the requested one, the best one for "auto", and eager if probabilities are needed.

    Raises:
        ValueError: The requested backend cannot run in this situation.
        ImportError: The requested backend is not installed.
    """
    if need_weights:
        if implementation != "eager" and not torch.compiler.is_compiling():
            logger.warning_once(
                f"output_attentions=True: this forward runs 'eager' instead of {implementation!r}, because only eager attention "
                "returns probabilities. Set attn_implementation='eager' to avoid this warning."
            )
        return "eager"
    if implementation == "auto":
        return _best_backend(*situation)
    reason = _unsupported_reason(implementation, *situation)
    if reason:
        check_installed(implementation)
        raise ValueError(
            f"attn_implementation={implementation!r} {reason}; choose 'sdpa', or omit it to use the best backend"
        )
    return implementation


@torch.compiler.assume_constant_result  # the compiler must not trace this function
def _unsupported_reason(implementation, *situation):
    """Why a backend cannot run in a situation; an empty string if it can run."""
    backend = find_backend(implementation)
    devices, dtype, head_dim, is_packed, is_fast = situation
    if ("packed" if is_packed else "dense") not in backend.layouts:
        return "supports packed sequences only, not a 4-D mask, unpad_inputs=False, or a padding mask while compiling"
    for device in devices:
        if backend.devices and device.type not in backend.devices:
            return f"runs on {', '.join(backend.devices).upper()}, not on {device.type}"
    if backend.capabilities and dtype not in backend.capabilities:
        known = " or ".join(str(each).removeprefix("torch.") for each in backend.capabilities)
        return f"supports {known}, not {dtype}; load the model with dtype=torch.bfloat16, use autocast"
    if backend.is_for_inference and not (is_fast and onednn_is_best(dtype)):
        return f"requires inference on a CPU with fast products in {dtype}; call model.eval() and use torch.inference_mode()"
    if head_dim % backend.head_multiple or head_dim > (backend.max_head_width or head_dim):
        limits = f"a multiple of {backend.head_multiple} and at most {backend.max_head_width}"
        return f"requires a head width that is {limits}, not {head_dim}"
    for gpu in (device for device in devices if device.type == "cuda" and backend.capabilities):
        lowest, highest = backend.capabilities[dtype]
        found = torch.cuda.get_device_capability(gpu)
        if not lowest <= found <= highest:
            limit = "at least {}.{}".format(*lowest) if found < lowest else "at most {}.{}".format(*highest)
            return f"requires a CUDA capability of {limit} for {dtype}, but {gpu} has {found[0]}.{found[1]}"
    # the last check, because it imports the package
    return "" if backend.is_installed() else "is not installed"


@torch.compiler.assume_constant_result
def _best_backend(*situation):
    return _find_best_backend(*situation)


@lru_cache
def _find_best_backend(*situation):
    """The first backend of the table that can run; cached, so that each choice is logged once."""
    automatic = [name for name, row in BACKENDS.items() if row.is_automatic]
    name = next(name for name in automatic if not _unsupported_reason(name, *situation))
    logger.info(f"NeoBERT runs {name} attention in this {Situation(*situation)}")
    return name
