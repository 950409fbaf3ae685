"""`make_plan`: layout, attention backend, mask and kernels of one forward, chosen once before the first block."""

import inspect
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import logging

from .attention_neobert import additive, make_dense_mask
from .backends_neobert import Situation, choose_backend, find_backend
from .configuration_neobert import NeoBERTConfig
from .kernels_neobert import SHORTEST_TILED, choose_kernels
from .layout_neobert import NO_BOUNDARIES, Boundaries, SequenceLayout, make_layout
from .machine_neobert import bf16_is_fastest, is_tracing

logger = logging.get_logger(__name__)


class ForwardPlan(NamedTuple):
    """Layout, attention backend, mask and kernels of one forward; made once, read by all blocks and heads.

    Attributes:
        layout: Where sequences start and end.
        backend: Name of the attention backend.
        mask: Mask of the backend: a tensor that broadcasts to (B, H, L, L), a mask object of the backend, or None.
        kernels: Kernels outside attention: the result of `choose_kernels`, or "plain" for standard operations; "compiled" or
            "invariant" in a copy that `inference_copy` has made so.
        options: Arguments of the caller for a registered attention function (see `arguments_of`).
    """

    layout: SequenceLayout
    backend: str
    mask: Any = None
    kernels: str = "plain"
    options: dict[str, Any] = {}


_signature = lru_cache(inspect.signature)


@torch.compiler.assume_constant_result  # the compiler must not trace this function
def arguments_of(implementation: str) -> tuple[str, ...]:
    """Names of the arguments that a caller may give to a registered attention function; none for a backend of the table."""
    if implementation == "auto" or find_backend(implementation).attend is not None:
        return ()
    names = list(_signature(AttentionInterface()[implementation]).parameters)[5:]  # after module, q, k, v and mask
    return tuple(name for name in names if name not in ("scaling", "dropout"))


@torch.compiler.assume_constant_result
def _is_masked(backend):
    """Whether attention gets a mask; as in transformers, a registered function without a mask function gets none."""
    return find_backend(backend).attend is not None or backend in AttentionMaskInterface()


def make_plan(
    tokens: torch.Tensor,
    config: NeoBERTConfig,
    boundaries: Boundaries = NO_BOUNDARIES,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    need_weights: bool = False,
    is_fast: bool = False,
    devices: tuple[torch.device, ...] = (),
) -> ForwardPlan:
    """Choose the layout, the attention backend with its mask, and the kernels of one forward.

    At most one host synchronisation: none while tracing, and none for trusted boundaries if the backend reads them on the
    device.

    Args:
        tokens: (B, L) or (B, L, D), and with `boundaries` and `attention_mask` as in `make_layout`.
        config: Attention implementation, vocabulary, head width; `unpad_inputs=False` keeps padding in the computation.
        dtype: dtype of matrix products; it limits the choice of backends.
        need_weights: Attention probabilities are required; only the eager backend returns them.
        is_fast: Result of `runs_fast` for the weights; it limits the choice of backends, masks and kernels.
        devices: Result of `attention_devices`; the backend must run on all of them. By default the device of the tokens.

    Raises:
        ValueError: Values or shapes contradict each other.
        ImportError: The requested backend is not installed.
    """
    implementation, can_read_values = config._attn_implementation, not is_tracing(tokens)
    mask_4d = attention_mask if attention_mask is not None and attention_mask.ndim == 4 else None
    has_boundaries = len(boundaries.cu_seq_lens) > 0  # torch 2.11 cannot compile bool(a dict)
    runs_packed = implementation == "auto" or "packed" in find_backend(implementation).layouts
    can_pack = config.unpad_inputs and mask_4d is None and not need_weights and runs_packed
    can_pack = can_pack and (can_read_values or has_boundaries)
    for is_packed in (True, False) if can_pack else (False,):
        situation = Situation(devices or (tokens.device,), dtype, config.head_dim, is_packed, is_fast)
        backend = choose_backend(implementation, situation, need_weights)
        reads_on_device = is_packed and has_boundaries and find_backend(backend).reads_boundaries
        if can_read_values or reads_on_device:
            break  # packing needs the boundaries, on the host or on the device
    is_masked = _is_masked(backend)
    if not is_masked and (attention_mask is not None or has_boundaries or boundaries.seq_idx is not None):
        raise ValueError(
            f"attn_implementation={backend!r} is registered without a mask function, so it would ignore attention_mask, "
            f"cu_seq_lens and seq_idx; omit them, or register one: AttentionMaskInterface.register({backend!r}, sdpa_mask)"
        )
    reads_values = can_read_values and is_masked and not (boundaries.is_trusted and reads_on_device)

    layout = make_layout(tokens, config.vocab_size, boundaries, attention_mask, is_packed, reads_values)
    if backend == "cpu_tiled" and layout.max_length < SHORTEST_TILED:  # type: ignore[operator]  # packed: it is known
        backend = "sdpa"
    row = find_backend(backend)
    if is_packed:
        mask = row.make_mask and row.make_mask(layout, dtype, is_fast)
    else:
        mask = make_dense_mask(layout, mask_4d) if is_masked else None
        mask = additive(mask, dtype) if row.attend is None and mask is not None else mask
    is_fast = is_fast and backend in ("sdpa", "cpu_tiled")
    kernels = choose_kernels(dtype, len(layout.position_ids)) if is_fast else "plain"
    if reads_values:
        _warn_of_limits(layout, config.max_position_embeddings, dtype, tokens.device)
    return ForwardPlan(layout, backend, mask, kernels, boundaries.options)


def indices_of_states(requested: bool | int | list[int] | None, num_states: int) -> range | set[int] | None:
    """Indices of the hidden states to return, which may count from the end in `requested`; None if it asks for no states."""
    if not requested or requested is True:
        return range(num_states) if requested else None
    indices = [requested] if isinstance(requested, int) else requested
    return {index % num_states for index in indices if -num_states <= index < num_states}


def _warn_of_limits(layout, max_position_embeddings, dtype, device):
    """Warn once about a sequence longer than the training context, and once about bf16 on a CPU where it is slow."""
    longest = layout.max_length
    if longest > max_position_embeddings:
        logger.warning_once(
            f"A sequence of {longest} tokens is longer than the {max_position_embeddings} tokens of the training context "
            "(max_position_embeddings); results may be worse. Truncate the input to avoid this."
        )
    if dtype == torch.bfloat16 and device.type == "cpu" and not bf16_is_fastest():
        logger.warning_once(
            "bfloat16 is slower than float32 on this CPU, several times so if it has no bf16 instructions. Load the model with "
            "dtype=torch.float32, or with dtype=neobert_hf.best_dtype(), which is the fastest dtype on any machine."
        )
