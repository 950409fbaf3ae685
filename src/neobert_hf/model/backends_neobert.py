"""The one table of attention backends, `attend`, which calls the one that runs, and `choose_backend`, which names it."""

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from transformers.utils import logging

from .attention_neobert import (
    ForwardPlan,
    attend_cpu_tiled,
    attend_eager,
    attend_flex,
    attend_registry,
    attend_sdpa,
    attend_varlen,
    attend_xformers,
    has_flash_attention,
    has_flex,
    has_varlen,
    has_xformers,
    make_flex_mask,
    make_sdpa_mask,
    make_xformers_mask,
)
from .machine_neobert import onednn_is_best

logger = logging.get_logger(__name__)


def attend(
    q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, plan: ForwardPlan
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention within each sequence, in both directions: softmax(q k^T / sqrt(K)) v.

    Returns:
        (T, H, K), and the probabilities (B, H, L, L) if the backend is eager, else None.
    """
    return find_backend(plan.backend).attend(q_THK, k_THK, v_THK, plan)


class Backend(NamedTuple):
    """A row of the table: what runs, on what, and whether it is there. An empty field sets no limit.

    Attributes:
        attend: From queries, keys, values (T, H, K) and a plan to the attended values, and the probabilities or None.
        layouts: "packed", "dense" or both.
        devices: Types of device.
        capabilities: For each dtype the lowest and the highest CUDA capability; no other dtype is computed.
        head_multiple: The head width is a multiple of this.
        max_head_width: The head width is at most this.
        make_mask: From a packed layout to the mask that `attend` finds in it.
        reads_boundaries: Whether it finds the sequences in `cu_seq_lens` on the device, without any value on the host.
        is_automatic: Whether "auto" may choose it.
        is_for_inference: Whether it needs what `runs_fast` asks for, and products that pay (`onednn_is_best`).
        is_installed: Whether it is there.
        remedy: What to do if it is not.
    """

    attend: Callable
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

    @property
    def is_of_transformers(self) -> bool:
        """Whether transformers registers it, and says itself whether it can be loaded."""
        return self.attend is attend_registry


def _half(lowest, highest=(99, 0)):
    return dict.fromkeys((torch.float16, torch.bfloat16), (lowest, highest))


_flash = dict(attend=attend_registry, layouts=("packed",), reads_boundaries=True, head_multiple=8, max_head_width=256)

# In the order in which "auto" prefers them. FlashAttention's numbers are those of its versions 2.8, 3 beta and 4.0 beta,
# torch_varlen's those of torch 2.13, xformers' those of its version 0.0.35, whose kernels for fp32 end at Hopper.
BACKENDS = {
    "flash_attention_3": Backend(
        **_flash,
        devices=("cuda",),
        capabilities=_half((9, 0), (9, 9)),
        is_automatic=True,
        is_installed=lambda: has_flash_attention(3),
        remedy="build it from the folder hopper of https://github.com/Dao-AILab/flash-attention",
    ),
    "flash_attention_2": Backend(
        **_flash,
        devices=("cuda", "mlu", "musa", "npu", "xpu"),
        capabilities=_half((8, 0)),
        is_automatic=True,
        is_installed=lambda: has_flash_attention(2),
        remedy="pip install flash-attn --no-build-isolation",
    ),
    "flash_attention_4": Backend(
        **_flash,
        devices=("cuda",),
        capabilities=_half((9, 0)),
        is_installed=lambda: has_flash_attention(4),
        remedy="pip install --pre flash-attn-4",
    ),
    "torch_varlen": Backend(
        **{**_flash, "attend": attend_varlen},
        devices=("cuda",),
        capabilities=_half((8, 0)),
        is_automatic=True,
        is_installed=has_varlen,
        remedy=f"it needs torch>=2.10, this is {torch.__version__}; pip install -U torch",
    ),
    "xformers": Backend(
        attend_xformers,
        layouts=("packed",),
        devices=("cuda",),
        capabilities={
            torch.float32: ((6, 0), (9, 0)),
            torch.float16: ((6, 0), (99, 0)),
            torch.bfloat16: ((8, 0), (99, 0)),
        },
        head_multiple=8,
        max_head_width=256,
        make_mask=make_xformers_mask,
        is_automatic=True,
        is_installed=has_xformers,
        remedy="pip install 'xformers>=0.0.35'",
    ),
    "cpu_tiled": Backend(
        attend_cpu_tiled, layouts=("packed",), devices=("cpu",), is_automatic=True, is_for_inference=True
    ),
    "sdpa": Backend(attend_sdpa, layouts=("packed", "dense"), make_mask=make_sdpa_mask, is_automatic=True),
    "eager": Backend(attend_eager, layouts=("dense",)),
    "flex_attention": Backend(
        attend_flex,
        layouts=("packed",),
        make_mask=make_flex_mask,
        is_installed=has_flex,
        remedy="it needs torch>=2.5; pip install -U torch",
    ),
}


# Old names, which work up to version 0.2.
RENAMED = {"blocked": "cpu_tiled"}


def current_name(implementation: str) -> str:
    """The name of a backend in this version; an old name warns."""
    if implementation not in RENAMED:
        return implementation
    name = RENAMED[implementation]
    message = f"attn_implementation={implementation!r} is now {name!r}; the old name works up to version 0.2"
    warnings.warn(message, FutureWarning, stacklevel=3)
    return name


def find_backend(implementation: str) -> Backend:
    """The row of `implementation`; of a kernel from the Hub, named after its repository; or of what a user registered."""
    if implementation in BACKENDS:
        return BACKENDS[implementation]
    if "flash" in implementation:
        return Backend(attend_registry, layouts=("packed",), capabilities=_half((0, 0)), reads_boundaries=True)
    return Backend(attend_registry, layouts=("dense",))


def runs_packed(implementation: str) -> bool:
    """True for attention that keeps the sequences of a packed layout apart; the rest gets a dense layout and a mask."""
    return implementation == "auto" or "packed" in find_backend(implementation).layouts


def check_installed(implementation: str) -> None:
    """Raise ImportError, saying what to install, if a backend of the table is missing."""
    backend = find_backend(implementation)
    if not backend.is_installed():
        raise ImportError(f"attn_implementation={implementation!r} is not installed; {backend.remedy}")


def is_ours(implementation: str) -> bool:
    """Whether it is a row of the table that transformers does not know."""
    return implementation in BACKENDS and not find_backend(implementation).is_of_transformers


def explain_missing(implementation: str, error: Exception) -> str:
    """What transformers says of an implementation that it cannot load, and the ways out."""
    remedy = find_backend(implementation).remedy or "install what it names"
    return (
        f"attn_implementation={implementation!r} cannot run here: {error} Remedy: {remedy}; choose "
        f"{', '.join(map(repr, BACKENDS))}; or leave it out to take the best attention that is installed"
    )


class Situation(NamedTuple):
    """What decides which backends can run.

    Attributes:
        device: Where attention will run.
        dtype: In which dtype it will run.
        head_dim: Width of a head.
        is_packed: Whether the layout is packed.
        is_fast: What `runs_fast` says.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    is_packed: bool
    is_fast: bool = False


def choose_backend(implementation: str, situation: Situation, need_weights: bool = False) -> str:
    """Decide which attention runs: the requested one if it can, an error if it cannot, the best one if none is named.

    Args:
        implementation: Requested name, or "auto".
        situation: What it has to run on.
        need_weights: Only eager attention returns probabilities.

    Raises:
        ValueError: The requested backend cannot run here.
        ImportError: The requested backend is not installed.
    """
    if need_weights:
        if implementation != "eager" and not torch.compiler.is_compiling():
            logger.warning_once(
                "output_attentions=True needs the attention probabilities, which only eager attention has; this forward "
                f"runs eager instead of {implementation!r}."
            )
        return "eager"
    if implementation == "auto":
        return _best_backend(*situation)
    if obstacle := _find_obstacle(implementation, *situation):
        check_installed(implementation)
        raise ValueError(f"attn_implementation={implementation!r} {obstacle}, or leave it out to take the best one")
    return implementation


@torch.compiler.assume_constant_result  # nothing in here is for a compiler to trace
def _find_obstacle(implementation, *situation):
    """Why a backend cannot run in a situation, and the way out; empty if it can."""
    backend, (device, dtype, head_dim, is_packed, is_fast) = find_backend(implementation), situation
    if not backend.is_installed():
        return f"is not installed; {backend.remedy}"
    if ("packed" if is_packed else "dense") not in backend.layouts:
        return (
            "runs packed sequences only; a 4-D mask, unpad_inputs=False, or a padding mask while compiling needs 'sdpa' or "
            "'eager'"
        )
    if backend.devices and device.type not in backend.devices:
        return f"runs on {', '.join(backend.devices).upper()}, not on {device.type}; choose 'sdpa'"
    if backend.is_for_inference and not (is_fast and onednn_is_best(dtype)):
        return (
            f"is for inference with fast products in {dtype}: model.eval(), torch.inference_mode(), float32 or bfloat16; "
            "choose 'sdpa'"
        )
    if backend.capabilities and dtype not in backend.capabilities:
        return (
            f"computes in {' or '.join(str(each).removeprefix('torch.') for each in backend.capabilities)}, not {dtype}; "
            "load the model with dtype=torch.bfloat16, use autocast, choose 'sdpa'"
        )
    if head_dim % backend.head_multiple or head_dim > (backend.max_head_width or head_dim):
        return (
            f"takes heads whose width is a multiple of {backend.head_multiple} and at most {backend.max_head_width}, not "
            f"{head_dim}; choose 'sdpa'"
        )
    if backend.capabilities and device.type == "cuda":
        lowest, highest = backend.capabilities[dtype]
        capability = torch.cuda.get_device_capability(device)
        if not lowest <= capability <= highest:
            limit = f"up to {highest[0]}.{highest[1]}" if capability > highest else f"from {lowest[0]}.{lowest[1]}"
            return f"runs in {dtype} on GPUs of capability {limit}, {device} has {'.'.join(map(str, capability))}; choose 'sdpa'"
    return ""


@torch.compiler.assume_constant_result
def _best_backend(*situation):
    return _find_best_backend(*situation)


@lru_cache
def _find_best_backend(*situation):
    """The first of the table that can run; cached, so that each answer is logged once."""
    name = next(name for name, row in BACKENDS.items() if row.is_automatic and not _find_obstacle(name, *situation))
    device, dtype, _, is_packed, is_fast = situation
    layout = "packed" if is_packed else "padded"
    kernels = "fast" if is_fast else "plain"
    logger.info(f"NeoBERT on {device} in {dtype}, {layout} layout: {name} attention, {kernels} kernels")
    return name
