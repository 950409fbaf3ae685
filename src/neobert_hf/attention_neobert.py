"""Rotary positions, and `attend`: the one place that knows attention backends.

Axes: `B` rows, `L` columns of the input; `T` tokens on the flat axis that the blocks see; `N` sequences; `H` heads;
`K` head width. A token tensor is always `(T, ...)`: in a packed layout T counts real tokens only, in a dense layout
T = B * L.
"""

import importlib.util
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, logging

from .kernels_neobert import blocked_attention, onednn_is_best

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch < 2.10
    varlen_attn = None
try:
    from xformers.ops import memory_efficient_attention
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask
except ImportError:
    memory_efficient_attention = BlockDiagonalMask = None

logger = logging.get_logger(__name__)


class SequenceLayout(NamedTuple):
    """Where sequences begin and end on the flat token axis; made once per forward, read by `attend` and the heads.

    Attributes:
        backend: Name of the attention implementation that runs.
        shape: (B, L) of the input.
        position_ids: (T,) int64, the position that RoPE gives each token.
        first_tokens: (N,) int64, index on the flat axis of each sequence's first real token.
        cu_seq_lens: (N + 1,) int32 boundaries of a packed layout; None in a dense layout.
        lengths: N sequence lengths of a packed layout, on the host; None in a dense layout and under tracing.
        max_length: The longest of `lengths`.
        indices: (T,) int64, place of each packed token in the flattened (B * L) input; None if every place is kept.
        is_real: (B, L) bool, True at tokens that are not padding, in a dense layout with a padding mask; else None.
        documents: (B, L) int64 in a dense layout of packed rows: tokens attend where it is equal; else None.
        mask: What the backend takes as a mask: a tensor that broadcasts to (B, H, L, L), a mask object of its own, or None.
        labelled: (M,) int64, places on the flat axis that have a label; None without labels and under tracing.
    """

    backend: str
    shape: tuple[int, int]
    position_ids: torch.Tensor
    first_tokens: torch.Tensor
    cu_seq_lens: torch.Tensor | None = None
    lengths: tuple[int, ...] | None = None
    max_length: int | None = None
    indices: torch.Tensor | None = None
    is_real: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    mask: Any = None
    labelled: torch.Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the flat axis holds real tokens only."""
        return self.cu_seq_lens is not None

    def flatten(self, x_BL: torch.Tensor, fill: float | None = None) -> torch.Tensor:
        """Bring (B, L, ...) to (T, ...); with `fill`, padding that a dense layout keeps gets this value."""
        if fill is not None and self.is_real is not None:
            x_BL = x_BL.masked_fill(~self.is_real, fill)
        x_T = x_BL.flatten(0, 1)
        return x_T if self.indices is None else x_T[self.indices]

    def unflatten(self, x_T: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Bring (T, ...) back to (B, L, ...); padding gets `fill`."""
        if self.indices is not None:
            flat = x_T.new_full((self.shape[0] * self.shape[1], *x_T.shape[1:]), fill)
            x_T = flat.index_copy(0, self.indices, x_T)
        x_BL = x_T.unflatten(0, self.shape)
        if self.is_real is not None:
            x_BL = x_BL.masked_fill(~self.is_real.view(*self.shape, *[1] * (x_BL.ndim - 2)), fill)
        return x_BL

    def sequence_ids(self) -> torch.Tensor:
        """(T,) int64, a number for each token that two tokens share when they belong to the same sequence."""
        if self.is_packed:
            return sequence_of_each_token(self.cu_seq_lens, len(self.position_ids))
        rows = torch.arange(self.shape[0], device=self.position_ids.device)[:, None]
        within_row = torch.zeros_like(rows) if self.documents is None else self.documents
        return (rows * self.shape[1] + within_row).expand(self.shape).flatten()


def sequence_of_each_token(cu_seq_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """(T,) int64, the number of the sequence between whose boundaries each token lies; waits for no value."""
    tokens = torch.arange(num_tokens, device=cu_seq_lens.device)
    return torch.bucketize(tokens, cu_seq_lens[1:].long(), right=True)


# ----------------------------------------------------------------------------------------------------------------------
# Rotary positions
# ----------------------------------------------------------------------------------------------------------------------


def rotary_table(config, layout: SequenceLayout, dtype: torch.dtype) -> torch.Tensor:
    """Cosine and sine for every token, in fp32 (fp64 for an fp64 model), computed anew in each forward.

    Nothing is stored: a table in a buffer is lost when a model is built on the meta device and loaded afterwards.

    Returns:
        (T, K / 2, 2), cosine and sine of position * theta^(-2i / K) for pair i.

    Source: RoFormer (arXiv 2104.09864), equation 34; dynamic NTK scales the base by each sequence's own length, so a
        sequence never depends on its neighbours in the batch; YaRN is arXiv 2309.00071, section 3.2 to 3.4.
    """
    rope, width = config.rope_parameters, config.head_dim
    theta, factor = rope["rope_theta"], rope.get("factor", 1.0)
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    positions = layout.position_ids.to(dtype)[:, None]
    exponents = -torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width
    amplitude = 1.0
    if rope["rope_type"] == "dynamic":
        context_length = config.max_position_embeddings
        sequence_ids = layout.sequence_ids()
        longest = torch.zeros_like(layout.position_ids).scatter_reduce(0, sequence_ids, layout.position_ids, "amax")
        length = (longest + 1)[sequence_ids][:, None].to(dtype).clamp(min=context_length)
        frequencies = (theta * (factor * length / context_length - (factor - 1)) ** (width / (width - 2))) ** exponents
    else:
        frequencies = theta**exponents
        if rope["rope_type"] == "linear":
            frequencies = frequencies / factor
        elif rope["rope_type"] == "yarn":
            keep = _yarn_kept_share(rope, width, exponents)
            frequencies = frequencies * (keep + (1 - keep) / factor)
            amplitude = rope.get("attention_factor") or 0.1 * math.log(factor) + 1.0
    angles = positions * frequencies
    return amplitude * torch.stack((angles.cos(), angles.sin()), -1)


def _yarn_kept_share(rope, width, like):
    """Share of each pair's frequency that YaRN leaves alone: 1 for pairs that turn often in the original context."""

    def pair_that_turns(times):
        context_length = rope["original_max_position_embeddings"]
        return width * math.log(context_length / (times * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    first = max(math.floor(pair_that_turns(rope.get("beta_fast") or 32)), 0)
    last = min(math.ceil(pair_that_turns(rope.get("beta_slow") or 1)), width - 1)
    pairs = torch.arange(width // 2, device=like.device, dtype=like.dtype)
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)


# ----------------------------------------------------------------------------------------------------------------------
# Backends
# ----------------------------------------------------------------------------------------------------------------------


def attend(
    q_THK: torch.Tensor, k_THK: torch.Tensor, v_THK: torch.Tensor, layout: SequenceLayout
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention within each sequence, in both directions: softmax(q k^T / sqrt(K)) v.

    Returns:
        (T, H, K), and the probabilities (B, H, L, L) if the backend is eager, else None.
    """
    return BACKENDS.get(layout.backend, _attend_registry)(q_THK, k_THK, v_THK, layout)


def _split_rows(x_THK, layout):
    """(T, H, K) to (B, H, L, K) in a dense layout."""
    return x_THK.unflatten(0, layout.shape).transpose(1, 2)


def _attend_eager(q_THK, k_THK, v_THK, layout):
    q, k, v = (_split_rows(x, layout) for x in (q_THK, k_THK, v_THK))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if layout.mask is not None:
        scores = scores + _additive(layout.mask, scores.dtype)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    return (weights @ v).transpose(1, 2).flatten(0, 1), weights


def _additive(mask, dtype):
    """The mask as numbers to add to the scores; finite, so that a row without any key stays a number."""
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)
    return mask.clamp(min=lowest).to(dtype)


def _attend_sdpa(q_THK, k_THK, v_THK, layout):
    if not layout.is_packed:
        mask = layout.mask
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(q_THK.dtype)
        q, k, v = (_split_rows(x, layout) for x in (q_THK, k_THK, v_THK))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(0, 1), None
    if len(set(layout.lengths)) == 1:  # sequences of one length are a batch
        q, k, v = (x.unflatten(0, (-1, layout.lengths[0])).transpose(1, 2) for x in (q_THK, k_THK, v_THK))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1), None
    sequences = zip(*(x.transpose(0, 1).split(layout.lengths, dim=1) for x in (q_THK, k_THK, v_THK)))
    outputs = [F.scaled_dot_product_attention(q[None], k[None], v[None])[0] for q, k, v in sequences]
    return torch.cat(outputs, dim=1).transpose(0, 1), None


def _attend_blocked(q_THK, k_THK, v_THK, layout):
    return blocked_attention(q_THK, k_THK, v_THK, layout.lengths), None


def _attend_varlen(q_THK, k_THK, v_THK, layout):
    boundaries, longest = layout.cu_seq_lens, layout.max_length
    return varlen_attn(q_THK, k_THK, v_THK.contiguous(), boundaries, boundaries, longest, longest), None


def _attend_xformers(q_THK, k_THK, v_THK, layout):
    return memory_efficient_attention(q_THK[None], k_THK[None], v_THK[None], attn_bias=layout.mask)[0], None


class _Caller(nn.Module):
    """What the attention functions of transformers ask about the module that calls them."""

    is_causal = False
    num_key_value_groups = 1

    def __init__(self, implementation):
        super().__init__()
        self.config = type("Config", (), {"_attn_implementation": implementation})()
        self.training = False


_caller = lru_cache(_Caller)


def _attend_registry(q_THK, k_THK, v_THK, layout):
    """FlashAttention 2, 3 and 4, flex attention and Hub kernels, packed; functions that users registered, dense."""
    caller, attention = _caller(layout.backend), ALL_ATTENTION_FUNCTIONS[layout.backend]
    options = dict(scaling=q_THK.shape[-1] ** -0.5, dropout=0.0, is_causal=False)
    if not layout.is_packed:
        mask = None if layout.mask is None else _additive(layout.mask, q_THK.dtype)
        q, k, v = (_split_rows(x, layout) for x in (q_THK, k_THK, v_THK))
        return attention(caller, q, k, v, mask, **options)[0].flatten(0, 1), None
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_THK, v_THK))
    output, _ = attention(
        caller,
        q,
        k,
        v,
        layout.mask,
        **options,
        cu_seq_lens_q=layout.cu_seq_lens,
        cu_seq_lens_k=layout.cu_seq_lens,
        max_length_q=layout.max_length,
        max_length_k=layout.max_length,
    )
    return output[0], None


def _attend_flex(q_THK, k_THK, v_THK, layout):
    if q_THK.device.type != "cpu":
        return _attend_registry(q_THK, k_THK, v_THK, layout)
    # On a CPU the compiled form (torch 2.13) fails to build for a second sequence length. Neither form has a backward there.
    with torch.compiler.set_stance("force_eager"):
        return _attend_registry(q_THK, k_THK, v_THK, layout)


def _flex_mask(layout):
    from torch.nn.attention.flex_attention import create_block_mask

    sequence_ids = layout.sequence_ids()

    def same_sequence(row, head, query, key):
        return sequence_ids[query] == sequence_ids[key]

    num_tokens, device = len(sequence_ids), sequence_ids.device
    # Uncompiled, this builds all T x T pairs once; on a GPU the compiled form visits blocks only.
    return create_block_mask(
        same_sequence, 1, None, num_tokens, num_tokens, device=device, _compile=device.type == "cuda"
    )


BACKENDS = {
    "eager": _attend_eager,
    "sdpa": _attend_sdpa,
    "blocked": _attend_blocked,
    "flex_attention": _attend_flex,
    "torch_varlen": _attend_varlen,
    "xformers": _attend_xformers,
}

MASK_MAKERS = {
    "flex_attention": _flex_mask,
    "xformers": lambda layout: BlockDiagonalMask.from_seqlens(layout.lengths, device=layout.cu_seq_lens.device),
}


def takes_boundaries(backend: str) -> bool:
    """True for kernels that read `cu_seq_lens` on the device, so that they run where no value may be looked at."""
    return backend == "torch_varlen" or "flash" in backend


def runs_packed(implementation: str) -> bool:
    """True for attention that keeps the sequences of a packed layout apart; the rest gets a dense layout and a mask."""
    return implementation in ("auto", "sdpa", "blocked", "flex_attention", "xformers") or takes_boundaries(
        implementation
    )


def check_installed(implementation: str) -> None:
    """Raise ImportError, saying what to install, if one of our own backends is missing."""
    if implementation == "torch_varlen" and varlen_attn is None:
        raise ImportError(
            f"attn_implementation='torch_varlen' needs torch>=2.10, this is {torch.__version__}; pip install -U torch"
        )
    if implementation == "xformers" and memory_efficient_attention is None:
        raise ImportError("attn_implementation='xformers' needs xformers; pip install 'xformers>=0.0.35'")


def attention_dtype(weight: torch.Tensor) -> torch.dtype:
    """The dtype in which products run: that of the weights unless autocast is on."""
    device_type = weight.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return weight.dtype


def choose_backend(
    implementation: str,
    device: torch.device,
    dtype: torch.dtype,
    may_pack: bool,
    need_weights: bool = False,
    is_fast: bool = False,
) -> str:
    """Decide which attention runs: the requested one if it can, an error if it cannot, the best one if none is named.

    Args:
        implementation: Requested name, or "auto".
        device: Where attention will run.
        dtype: In which dtype attention will run.
        may_pack: Whether the layout is packed; kernels for packed sequences cannot run a dense one.
        need_weights: Only eager attention returns probabilities.
        is_fast: What `runs_fast` says; blocked attention has no backward pass.

    Raises:
        ValueError: The requested backend cannot run this layout, device or dtype.
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
        return _best_backend(device.type, dtype, may_pack, is_fast)
    if implementation == "sdpa" or not runs_packed(implementation):
        return implementation
    check_installed(implementation)
    if not may_pack:
        raise ValueError(
            f"attn_implementation={implementation!r} runs packed sequences only; a 4-D mask, unpad_inputs=False, or a "
            "padding mask while compiling needs 'sdpa' or 'eager'"
        )
    if implementation == "blocked" and not (is_fast and onednn_is_best(dtype)):
        raise ValueError(
            f"attn_implementation='blocked' is for inference on a CPU with fast products in {dtype}: model.eval(), "
            "torch.inference_mode(), float32 or bfloat16; choose 'sdpa', or leave it out to take the best one each time"
        )
    if implementation in ("torch_varlen", "xformers") and device.type != "cuda":
        raise ValueError(f"attn_implementation={implementation!r} runs on CUDA, not on {device.type}; choose 'sdpa'")
    is_half = dtype in (torch.float16, torch.bfloat16)
    if takes_boundaries(implementation) and not is_half:
        raise ValueError(
            f"attn_implementation={implementation!r} computes in float16 or bfloat16, not {dtype}; load the model with "
            "dtype=torch.bfloat16, use autocast, or choose 'sdpa'"
        )
    return implementation


@torch.compiler.assume_constant_result  # nothing in here is for a compiler to trace
def _best_backend(*what_runs):
    return _find_best_backend(*what_runs)


@lru_cache
def _find_best_backend(device_type, dtype, may_pack, is_fast):
    """The best attention that is installed; cached, so that each answer is logged once."""
    backend = "blocked" if may_pack and is_fast and onednn_is_best(dtype) else "sdpa"
    if may_pack and device_type == "cuda":
        is_half = dtype in (torch.float16, torch.bfloat16)
        candidates = {
            "flash_attention_3": is_half and is_flash_attn_3_available(),
            "flash_attention_2": is_half and is_flash_attn_2_available(),
            "torch_varlen": is_half and varlen_attn is not None,
            "xformers": memory_efficient_attention is not None,
            "flex_attention": is_half and importlib.util.find_spec("triton") is not None,  # compiles first
        }
        backend = next((name for name, can_run in candidates.items() if can_run), backend)
    layout = "packed" if may_pack else "padded"
    kernels = "fast" if is_fast else "plain"
    logger.info(f"NeoBERT on {device_type} in {dtype}, {layout} layout: {backend} attention, {kernels} kernels")
    return backend
