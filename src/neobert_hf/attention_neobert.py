"""Rotary positions, and `attend`: the one place that knows attention backends.

Axes: `B` rows, `L` columns of the input; `T` tokens on the flat axis that the blocks see; `N` sequences; `H` heads;
`K` head width. A token tensor is always `(T, ...)`: in a packed layout T counts real tokens only, in a dense layout
T = B * L.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers import utils as transformers_utils
from transformers.utils import logging

from .kernels_neobert import blocked_attention, onednn_is_best

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch < 2.10
    varlen_attn = None
try:
    from torch.nn.attention.flex_attention import create_block_mask
except ImportError:  # torch < 2.5
    create_block_mask = None
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
    return find_backend(layout.backend).attend(q_THK, k_THK, v_THK, layout)


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
    if layout.mask is not None:
        return _attend_groups(q_THK, k_THK, v_THK, layout.mask), None
    if len(set(layout.lengths)) == 1:  # sequences of one length are a batch
        q, k, v = (x.unflatten(0, (-1, layout.lengths[0])).transpose(1, 2) for x in (q_THK, k_THK, v_THK))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1), None
    sequences = zip(*(x.transpose(0, 1).split(layout.lengths, dim=1) for x in (q_THK, k_THK, v_THK)))
    outputs = [F.scaled_dot_product_attention(q[None], k[None], v[None])[0] for q, k, v in sequences]
    return torch.cat(outputs, dim=1).transpose(0, 1), None


class LengthGroups(NamedTuple):
    """Sequences of similar length side by side, padded to the longest of their group: a call for each group.

    Attributes:
        places: (T,) int64, the place of each token among the padded ones.
        shapes: Number of sequences and padded length of each group.
        masks: For each group (sequences, 1, 1, length) bool, True at real keys; None where nothing is padded.
    """

    places: torch.Tensor
    shapes: tuple[tuple[int, int], ...]
    masks: tuple[torch.Tensor | None, ...]


def _sdpa_mask(layout):
    """A kernel costs a launch for each call, so on a GPU a call for each of hundreds of sequences is slow.

    A CPU has no launches: there the sequences one by one are faster, and need no copies.
    """
    if layout.cu_seq_lens.device.type == "cpu" or len(set(layout.lengths)) == 1:
        return None
    return _group_by_length(layout)


def _group_by_length(layout):
    """Groups in which lengths differ by less than a factor of two, so that padding is less than half of each."""
    lengths, device = torch.tensor(layout.lengths), layout.cu_seq_lens.device
    starts, begins = torch.empty_like(lengths), 0
    shapes, masks = [], []
    doublings = torch.tensor([(length - 1).bit_length() for length in layout.lengths])
    for doubling in doublings.unique():
        members = doublings == doubling
        group = lengths[members]
        longest = int(group.max())
        starts[members] = begins + longest * torch.arange(len(group))
        begins += longest * len(group)
        shapes.append((len(group), longest))
        is_key = torch.arange(longest) < group[:, None]
        masks.append(None if is_key.all() else to_device(is_key[:, None, None], device))
    within = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    places = starts.repeat_interleave(lengths) + within
    return LengthGroups(to_device(places, device), tuple(shapes), tuple(masks))


def _attend_groups(q_THK, k_THK, v_THK, groups):
    sizes = [count * length for count, length in groups.shapes]
    padded = (x.new_zeros(sum(sizes), *x.shape[1:]).index_copy(0, groups.places, x) for x in (q_THK, k_THK, v_THK))
    outputs = []
    for shape, mask, *group in zip(groups.shapes, groups.masks, *(x.split(sizes) for x in padded)):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in group)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, groups.places)


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
    caller, attention = _caller(layout.backend), AttentionInterface()[layout.backend]
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
    set_stance = getattr(torch.compiler, "set_stance", None)  # torch < 2.6
    with set_stance("force_eager") if set_stance else nullcontext():
        return _attend_registry(q_THK, k_THK, v_THK, layout)


def _flex_mask(layout):
    sequence_ids = layout.sequence_ids()

    def same_sequence(row, head, query, key):
        return sequence_ids[query] == sequence_ids[key]

    num_tokens, device = len(sequence_ids), sequence_ids.device
    # Uncompiled, this builds all T x T pairs once; on a GPU the compiled form visits blocks only.
    return create_block_mask(
        same_sequence, 1, None, num_tokens, num_tokens, device=device, _compile=device.type == "cuda"
    )


def _xformers_mask(layout):
    # Made on the host, because its own copy to the device waits; the boundaries are on the device already.
    mask = BlockDiagonalMask.from_seqlens(layout.lengths, device=torch.device("cpu"))
    mask.q_seqinfo.seqstart = mask.k_seqinfo.seqstart = layout.cu_seq_lens
    return mask


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to `device`, without waiting where that is safe.

    Towards CUDA the copy starts from pinned memory, which torch keeps until the copy is done. Elsewhere memory that is freed
    too early can arrive as garbage (pytorch issues 139550 and 189690), so there the copy waits.
    """
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


# ----------------------------------------------------------------------------------------------------------------------
# The table of backends
# ----------------------------------------------------------------------------------------------------------------------


class Backend(NamedTuple):
    """A row of the table: what runs, on what, and whether it is there. An empty field sets no limit.

    Attributes:
        attend: From queries, keys, values (T, H, K) and a layout to the attended values, and the probabilities or None.
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
        return self.attend is _attend_registry


def _transformers_finds(package):
    """Whether transformers, which may be too old to know it, finds this FlashAttention."""
    is_available = getattr(transformers_utils, f"is_{package}_available", None)
    return is_available is not None and is_available()


def _half(lowest, highest=(99, 0)):
    return dict.fromkeys((torch.float16, torch.bfloat16), (lowest, highest))


_flash = dict(attend=_attend_registry, layouts=("packed",), reads_boundaries=True, head_multiple=8, max_head_width=256)

# In the order in which "auto" prefers them. FlashAttention's numbers are those of its versions 2.8, 3 beta and 4.0 beta,
# torch_varlen's those of torch 2.13, xformers' those of its version 0.0.35, whose kernels for fp32 end at Hopper.
BACKENDS = {
    "flash_attention_3": Backend(
        **_flash,
        devices=("cuda",),
        capabilities=_half((9, 0), (9, 9)),
        is_automatic=True,
        is_installed=lambda: _transformers_finds("flash_attn_3"),
        remedy="build it from the folder hopper of https://github.com/Dao-AILab/flash-attention",
    ),
    "flash_attention_2": Backend(
        **_flash,
        devices=("cuda", "mlu", "musa", "npu", "xpu"),
        capabilities=_half((8, 0)),
        is_automatic=True,
        is_installed=lambda: _transformers_finds("flash_attn_2"),
        remedy="pip install flash-attn --no-build-isolation",
    ),
    "flash_attention_4": Backend(
        **_flash,
        devices=("cuda",),
        capabilities=_half((9, 0)),
        is_installed=lambda: _transformers_finds("flash_attn_4"),
        remedy="pip install --pre flash-attn-4",
    ),
    "torch_varlen": Backend(
        **{**_flash, "attend": _attend_varlen},
        devices=("cuda",),
        capabilities=_half((8, 0)),
        is_automatic=True,
        is_installed=lambda: varlen_attn is not None,
        remedy=f"it needs torch>=2.10, this is {torch.__version__}; pip install -U torch",
    ),
    "xformers": Backend(
        _attend_xformers,
        layouts=("packed",),
        devices=("cuda",),
        capabilities={
            torch.float32: ((6, 0), (9, 0)),
            torch.float16: ((6, 0), (99, 0)),
            torch.bfloat16: ((8, 0), (99, 0)),
        },
        head_multiple=8,
        max_head_width=256,
        make_mask=_xformers_mask,
        is_automatic=True,
        is_installed=lambda: memory_efficient_attention is not None,
        remedy="pip install 'xformers>=0.0.35'",
    ),
    "blocked": Backend(
        _attend_blocked, layouts=("packed",), devices=("cpu",), is_automatic=True, is_for_inference=True
    ),
    "sdpa": Backend(_attend_sdpa, layouts=("packed", "dense"), make_mask=_sdpa_mask, is_automatic=True),
    "eager": Backend(_attend_eager, layouts=("dense",)),
    "flex_attention": Backend(
        _attend_flex,
        layouts=("packed",),
        make_mask=_flex_mask,
        is_installed=lambda: create_block_mask is not None,
        remedy="it needs torch>=2.5; pip install -U torch",
    ),
}


def find_backend(implementation: str) -> Backend:
    """The row of `implementation`; of a kernel from the Hub, named after its repository; or of what a user registered."""
    if implementation in BACKENDS:
        return BACKENDS[implementation]
    if "flash" in implementation:
        return Backend(_attend_registry, layouts=("packed",), capabilities=_half((0, 0)), reads_boundaries=True)
    return Backend(_attend_registry, layouts=("dense",))


def runs_packed(implementation: str) -> bool:
    """True for attention that keeps the sequences of a packed layout apart; the rest gets a dense layout and a mask."""
    return implementation == "auto" or "packed" in find_backend(implementation).layouts


def check_installed(implementation: str) -> None:
    """Raise ImportError, saying what to install, if a backend of the table is missing."""
    backend = find_backend(implementation)
    if not backend.is_installed():
        raise ImportError(f"attn_implementation={implementation!r} is not installed; {backend.remedy}")


def attention_dtype(weight: torch.Tensor) -> torch.dtype:
    """The dtype in which products run: that of the weights unless autocast is on."""
    device_type = weight.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return weight.dtype


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
