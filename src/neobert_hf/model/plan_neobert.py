"""`make_plan`: layout, attention backend, mask and kernels of one forward, chosen once before the first block.

The layout follows from the inputs (`layout_neobert.py`), the backend from the table of backends (`backends_neobert.py`), the
kernels from the weights (`kernels_neobert.py`).
"""

import torch
from transformers.utils import logging

from .attention_neobert import ForwardPlan, make_dense_mask
from .backends_neobert import Situation, choose_backend, find_backend, runs_packed
from .kernels_neobert import choose_kernels, is_tracing
from .layout_neobert import NO_MARKS, DocumentMarks, HostValues, SequenceLayout, make_layout
from .machine_neobert import bf16_is_fastest

logger = logging.get_logger(__name__)


def make_plan(
    tokens: torch.Tensor,
    implementation: str,
    *,
    vocab_size: int,
    attention_mask: torch.Tensor | None = None,
    marks: DocumentMarks = NO_MARKS,
    trust_boundaries: bool = False,
    copy_to_host: torch.Tensor | None = None,
    unpad: bool = True,
    need_weights: bool = False,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    is_fast: bool = False,
) -> tuple[ForwardPlan, HostValues]:
    """Choose the layout, the attention backend with its mask, and the kernels of one forward.

    At most one host synchronisation: none while tracing, and none for trusted boundaries if the backend reads them on the
    device.

    Args:
        tokens: As in `make_layout`.
        implementation: The requested attention implementation, or "auto".
        vocab_size: As in `make_layout`.
        attention_mask: As in `make_layout`; a 4-D mask broadcasts to (B, H, L, L).
        marks: As in `make_layout`.
        trust_boundaries: The caller guarantees valid ids and marks; their values need no check.
        copy_to_host: As in `make_layout`.
        unpad: False keeps padding in the computation.
        need_weights: Attention probabilities are required; only the eager backend returns them.
        dtype: dtype of matrix products; it limits the choice of backends.
        head_dim: Width of a head; it limits the choice of backends.
        is_fast: Result of `runs_fast` for the weights; it limits the choice of backends, masks and kernels.

    Returns:
        The plan, and the values that were copied to the host.

    Raises:
        ValueError: Values or shapes contradict each other; the message names both and the solution.
        ImportError: The requested backend is not installed.
    """
    mask_4d = attention_mask if attention_mask is not None and attention_mask.ndim == 4 else None
    can_read_values = not is_tracing(tokens)
    can_pack = unpad and mask_4d is None and not need_weights and runs_packed(implementation)
    situation = Situation(tokens.device, dtype, head_dim, is_packed=True, is_fast=is_fast)
    backend = None
    if marks.cu_seq_lens and can_pack and (trust_boundaries or not can_read_values):
        backend = choose_backend(implementation, situation)
        if find_backend(backend).reads_boundaries:
            can_read_values = False
        else:
            backend = None
    if backend is None:
        can_pack = can_pack and can_read_values
        backend = choose_backend(implementation, situation._replace(is_packed=can_pack), need_weights)

    layout, host_values = make_layout(
        tokens,
        vocab_size=vocab_size,
        attention_mask=attention_mask,
        marks=marks,
        copy_to_host=copy_to_host,
        is_packed=can_pack,
        can_read_values=can_read_values,
    )
    mask = None if layout.is_packed else make_dense_mask(layout, mask_4d)
    if layout.is_packed and (make_mask := find_backend(backend).make_mask):
        mask = make_mask(layout, dtype, is_fast)
    kernels = "plain"
    if is_fast and backend in ("sdpa", "cpu_tiled"):
        kernels = choose_kernels(dtype, len(layout.position_ids))
    return ForwardPlan(layout, backend, mask, kernels), host_values


def warn_of_limits(
    layout: SequenceLayout, max_position_embeddings: int, dtype: torch.dtype, device: torch.device
) -> None:
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
