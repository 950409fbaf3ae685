"""`make_plan`: what one forward computes with, decided once, before the first block.

The inputs say where sequences are (`layout_neobert.py`), the table of backends says which attention can run
(`backends_neobert.py`), and the weights say which kernels can (`kernels_neobert.py`).
"""

import torch
from transformers.utils import logging

from .attention_neobert import ForwardPlan, make_dense_mask
from .backends_neobert import Situation, choose_backend, find_backend, runs_packed
from .kernels_neobert import choose_kernels, is_tracing
from .layout_neobert import OnHost, SequenceLayout, make_layout
from .machine_neobert import has_bf16_instructions

logger = logging.get_logger(__name__)


def make_plan(
    tokens: torch.Tensor,
    implementation: str,
    *,
    vocab_size: int,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens: list[torch.Tensor] | tuple[torch.Tensor, ...] = (),
    max_length: int | None = None,
    trust_boundaries: bool = False,
    copy_to_host: torch.Tensor | None = None,
    unpad: bool = True,
    need_weights: bool = False,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    is_fast: bool = False,
) -> tuple[ForwardPlan, OnHost]:
    """Decide once where sequences are, which attention runs, on which mask, and which kernels compute the rest.

    The host waits for the device once at most: not at all while tracing, and not for trusted boundaries where attention reads
    them on the device.

    Args:
        tokens: As for `make_layout`; so are `vocab_size` to `max_length` and `copy_to_host`. A 4-D `attention_mask`
            broadcasts to (B, H, L, L).
        implementation: The requested attention implementation, or "auto".
        trust_boundaries: The caller says that ids, `cu_seq_lens` and `max_length` are right; no value needs a look.
        unpad: False keeps padding in the computation.
        need_weights: Attention probabilities are wanted, which only the eager backend has.
        dtype: The dtype in which products will run; it limits the choice of backends.
        head_dim: Width of a head; it limits the choice of backends.
        is_fast: What `runs_fast` says of the weights; it limits the choice of backends and of kernels.

    Raises:
        ValueError: Values or shapes contradict each other; the message names both and the way out.
        ImportError: The requested backend is not installed.
    """
    mask_4d = attention_mask if attention_mask is not None and attention_mask.ndim == 4 else None
    may_look = not is_tracing(tokens)
    may_pack = unpad and mask_4d is None and not need_weights and runs_packed(implementation)
    situation = Situation(tokens.device, dtype, head_dim, is_packed=True, is_fast=is_fast)
    backend = None
    if cu_seq_lens and may_pack and (trust_boundaries or not may_look):
        backend = choose_backend(implementation, situation)
        if find_backend(backend).reads_boundaries:
            may_look = False
        else:
            backend = None
    if backend is None:
        may_pack = may_pack and may_look
        backend = choose_backend(implementation, situation._replace(is_packed=may_pack), need_weights)

    sequences = dict(attention_mask=attention_mask, position_ids=position_ids, cu_seq_lens=cu_seq_lens)
    options = dict(max_length=max_length, copy_to_host=copy_to_host, is_packed=may_pack, may_look=may_look)
    layout, on_host = make_layout(tokens, vocab_size=vocab_size, **sequences, **options)
    mask = None if layout.is_packed else make_dense_mask(layout, mask_4d)
    if layout.is_packed and (make_mask := find_backend(backend).make_mask):
        mask = make_mask(layout)
    kernels = "plain"
    if is_fast and backend in ("sdpa", "cpu_tiled"):
        kernels = choose_kernels(dtype, len(layout.position_ids))
    return ForwardPlan(layout, backend, mask, kernels), on_host


def warn_of_limits(
    layout: SequenceLayout, max_position_embeddings: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Warn once of a sequence that is longer than the training length, and of a CPU that emulates bf16."""
    longest = layout.max_length or layout.shape[1]
    if longest > max_position_embeddings:
        logger.warning_once(
            f"A sequence of {longest} tokens is longer than the {max_position_embeddings} that this model was trained for "
            "(max_position_embeddings); it runs, but quality is not assured."
        )
    if dtype == torch.bfloat16 and device.type == "cpu" and not has_bf16_instructions():
        logger.warning_once(
            "This CPU has no bf16 instructions: bfloat16 is emulated, several times slower than float32. Load the model with "
            "dtype=torch.float32, or on any machine with dtype=neobert_hf.best_dtype()."
        )
