"""`make_plan`: layout, attention backend, mask and kernels of one forward, chosen once before the first block."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .attention_neobert import additive, make_dense_mask
from .backends_neobert import Situation, choose_backend, find_backend
from .kernels_neobert import SHORTEST_TILED, choose_product, runs_fast
from .layout_neobert import NO_BOUNDARIES, Boundaries, SequenceLayout, is_4d, make_layout, warn_of_length
from .machine_neobert import attention_devices, is_tracing, product_dtype, warn_of_slow_bf16


class ForwardPlan(NamedTuple):
    """Layout, attention backend, mask and kernels of one forward; made once, read by all blocks and heads.

    Attributes:
        layout: Where sequences start and end.
        backend: Name of the attention backend.
        mask: Mask of the backend: a tensor that broadcasts to (B, H, L, L), a mask object of the backend, or None.
        multiply: How blocks and heads multiply if they run fast, for inference on a CPU: the result of `choose_product`. None if
            all modules run as they are written.
        need_weights: Whether the probabilities of all blocks are returned.
        options: Arguments of the caller for a registered attention function (see `arguments_of`).
    """

    layout: SequenceLayout
    backend: str
    mask: Any = None
    multiply: Callable[..., Tensor] | None = None
    need_weights: bool = False
    options: dict[str, Any] = {}

    @property
    def is_fast(self) -> bool:
        """Whether the kernels for inference run in place of the operations that are written in the modules."""
        return self.multiply is not None


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
    encoder: nn.Module,
    tokens: Tensor,
    boundaries: Boundaries = NO_BOUNDARIES,
    attention_mask: Tensor | None = None,
    need_weights: bool = False,
) -> ForwardPlan:
    """Choose the layout, the attention backend with its mask, and the kernels of one forward.

    At most one host synchronisation: none while tracing, and none for trusted boundaries if the backend reads them on the
    device.

    Args:
        encoder: A `NeoBERTModel`. Its devices and the dtype of its products limit the choice of backends, and so does
            `runs_fast`. Its config has the attention implementation; `unpad_inputs=False` keeps padding in the computation.
        tokens: (B, L) or (B, L, D), and with `boundaries` and `attention_mask` as in `make_layout`.
        need_weights: Attention probabilities are required; only the eager backend returns them.

    Raises:
        ValueError: Values or shapes contradict each other.
        ImportError: The requested backend is not installed.
    """
    config, weight = encoder.config, encoder.encoder.weight  # an adapter may compute it
    devices = attention_devices(encoder.transformer_encoder, tokens.device)
    dtype, is_fast = product_dtype(weight), runs_fast(weight, encoder)
    implementation, can_read_values = config._attn_implementation, not is_tracing(tokens)
    has_boundaries = boundaries.cu_seq_lens is not None
    runs_packed = implementation == "auto" or "packed" in find_backend(implementation).layouts
    can_pack = config.unpad_inputs and runs_packed and not is_4d(attention_mask) and not need_weights
    forms = [False]
    if can_pack and (can_read_values or has_boundaries):  # packing needs the boundaries, on the host or on the device
        forms = [True, False]
    for is_packed in forms:
        situation = Situation(devices, dtype, config.head_dim, is_packed, is_fast)
        backend = choose_backend(implementation, situation, need_weights)
        reads_on_device = is_packed and has_boundaries and find_backend(backend).reads_boundaries
        if can_read_values or reads_on_device:
            break
    is_masked = _is_masked(backend)
    if not is_masked and (attention_mask is not None or has_boundaries or boundaries.seq_idx is not None):
        raise ValueError(
            f"attn_implementation={backend!r} is registered without a mask function, so it would ignore attention_mask, "
            f"cu_seq_lens and seq_idx; omit them, or register one: AttentionMaskInterface.register({backend!r}, sdpa_mask)"
        )
    reads_values = can_read_values and is_masked and not (boundaries.is_trusted and reads_on_device)
    if reads_values and dtype == torch.bfloat16 and tokens.device.type == "cpu":
        warn_of_slow_bf16()

    layout = make_layout(tokens, config.vocab_size, boundaries, attention_mask, is_packed, reads_values)
    if reads_values:
        warn_of_length(layout, config.max_position_embeddings)
    if backend == "cpu_tiled" and layout.max_length < SHORTEST_TILED:  # type: ignore[operator]  # packed: it is known
        backend = "sdpa"
    mask = multiply = None
    if is_masked:
        mask = _make_mask(backend, layout, attention_mask, dtype, is_fast)
    if is_fast and backend in ("sdpa", "cpu_tiled"):
        multiply = choose_product(dtype, len(layout.position_ids))
    return ForwardPlan(layout, backend, mask, multiply, need_weights, boundaries.options)


def _make_mask(backend, layout, attention_mask, dtype, is_fast):
    """The mask that a backend reads; a registered function reads numbers to add to the scores."""
    row = find_backend(backend)
    if layout.is_packed:
        return row.make_mask and row.make_mask(layout, dtype, is_fast)
    mask = make_dense_mask(layout, attention_mask)
    if row.attend is None and mask is not None:
        mask = additive(mask, dtype)
    return mask


def indices_of_states(
    requested: bool | int | list[int] | None,
    num_states: int,
) -> range | set[int] | None:
    """Indices of the hidden states to return, which may count from the end in `requested`; None if it asks for no states."""
    if requested is True:
        return range(num_states)
    if not requested:
        return None
    indices = [requested] if isinstance(requested, int) else requested
    return {index % num_states for index in indices if -num_states <= index < num_states}
