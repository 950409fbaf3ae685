"""The attention functions and their masks; `backends_neobert.py` chooses one of them.

Every function reads queries, keys, values (T, H, K) and the plan of the forward (`ForwardPlan`), and returns the output (T, H, K)
and the probabilities or None.

Axes: `B` rows, `L` columns of the input; `T` tokens on the flat axis, real tokens only in a packed layout, B * L in a dense one;
`N` sequences; `H` heads; `K` head width.
"""

import importlib
import os
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from huggingface_hub import constants
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface
from transformers import utils as transformers_utils
from transformers.utils import logging

from .kernels_neobert import tiled_attention
from .layout_neobert import to_device
from .machine_neobert import widen

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch < 2.10
    varlen_attn = None

logger = logging.get_logger(__name__)

# The module with the kernels of a backend, if they come in a package of their own.
KERNELS = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
    "xformers": "xformers.ops",
}
cached_kernels = {}  # functions that `has_cached_kernel` has loaded, by backend


def split_rows(shape, *tensors_THK):
    """Each (T, H, K) to (B, H, L, K), where `shape` is (B, L)."""
    return [x.unflatten(0, shape).transpose(1, 2) for x in tensors_THK]


def join_rows(x_BHLK):
    """(B, H, L, K) to (T, H, K)."""
    return x_BHLK.transpose(1, 2).flatten(0, 1)


def attend_eager(q_THK, k_THK, v_THK, plan):
    """Attention in standard operations on a dense layout, with the probabilities."""
    q, k, v = split_rows(plan.layout.shape, q_THK, k_THK, v_THK)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if plan.mask is not None:
        scores = scores + additive(plan.mask, scores.dtype)
    wide = torch.promote_types(scores.dtype, torch.float32)  # a softmax of wide scores would keep a copy of them
    weights = scores.softmax(-1, dtype=wide).to(scores.dtype)
    return join_rows(weights @ v), weights


def additive(mask, dtype):
    """The mask as finite numbers to add to the scores; a row without any key then does not become NaN."""
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)
    lowest = max(lowest, torch.finfo(mask.dtype).min)
    return mask.clamp(min=lowest).to(dtype)


def attend_sdpa(q_THK, k_THK, v_THK, plan):
    """`scaled_dot_product_attention` of PyTorch, on a dense layout with a mask or on a packed layout."""
    layout, mask = plan.layout, plan.mask
    if not layout.is_packed:
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q_THK.dtype)
        q, k, v = split_rows(layout.shape, q_THK, k_THK, v_THK)
        return join_rows(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), None
    if mask is not None:
        return _attend_groups(q_THK, k_THK, v_THK, mask), None
    if len(set(layout.lengths)) == 1:  # sequences of equal length form a batch
        q, k, v = split_rows((-1, layout.lengths[0]), q_THK, k_THK, v_THK)
        return join_rows(F.scaled_dot_product_attention(q, k, v)), None
    parts = [x.transpose(0, 1).split(layout.lengths, dim=1) for x in (q_THK, k_THK, v_THK)]
    outputs = []
    for q, k, v in zip(*parts):
        output = F.scaled_dot_product_attention(q[None], k[None], v[None])
        outputs.append(output[0])
    return torch.cat(outputs, dim=1).transpose(0, 1), None


def attend_rows(attend, q_THK, k_THK, v_THK, plan):
    """(T, H, K) by `NeoBERTAttention.attend` of a variant, which one call for each document of a packed layout keeps apart."""
    layout, mask = plan.layout, q_THK.new_zeros(())
    if not layout.is_packed:
        if plan.mask is not None:
            mask = additive(plan.mask, q_THK.dtype)
        q, k, v = split_rows(layout.shape, q_THK, k_THK, v_THK)
        positions_BL = layout.position_ids.view(layout.shape)
        return join_rows(attend(q, k, v, positions_BL, mask))
    lengths = layout.lengths or layout.cu_seq_lens.diff().tolist()  # trusted boundaries are on the device only
    parts = [x.split(lengths) for x in (q_THK, k_THK, v_THK, layout.position_ids)]
    outputs = []
    for *document, positions_L in zip(*parts):
        q, k, v = (x.transpose(0, 1)[None] for x in document)
        output = attend(q, k, v, positions_L[None], mask)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def make_dense_mask(layout, mask_4d=None):
    """Mask of a dense layout, broadcastable to (B, H, L, L); None if every token may attend to all others."""
    is_key = layout.is_real
    if is_key is not None:
        is_key = is_key[:, None, None, :]
    if layout.documents is not None:
        is_same = layout.documents[:, None, :, None] == layout.documents[:, None, None, :]
        return is_same if is_key is None else is_same & is_key
    if is_key is not None:
        return is_key
    if mask_4d is None or mask_4d.is_floating_point():
        return mask_4d
    return mask_4d.bool()


class LengthGroups(NamedTuple):
    """Groups of sequences of similar length, padded to the longest sequence of the group; SDPA runs once per group.

    Attributes:
        indices: (T,) int64, index of each token on the flat axis of all padded groups.
        shapes: Number of sequences and padded length of each group.
        masks: For each group (sequences, 1, 1, length) bool, True at real keys; None if the group has no padding.
    """

    indices: Tensor
    shapes: tuple[tuple[int, int], ...]
    masks: tuple[Tensor | None, ...]


# In training on a CPU, groups are faster than one call of SDPA for each sequence up to this length in tokens.
LONGEST_GROUPED = {torch.bfloat16: 1024, torch.float32: 32}


def make_sdpa_mask(layout, dtype, is_fast):
    """Length groups for SDPA on a GPU and for training on a CPU; None if one call per sequence is faster.

    On a GPU every call costs a kernel launch. In inference on a CPU, one call per sequence is faster and needs no copies. A
    forward without gradients in training mode is no inference: gradient caching repeats it with gradients, and both must give
    the same numbers.
    """
    if layout.cu_seq_lens.device.type == "cpu":
        is_grouped = not is_fast and layout.max_length <= LONGEST_GROUPED.get(dtype, 0)
    else:
        is_grouped = len(set(layout.lengths)) > 1
    if is_grouped:
        return group_by_length(layout)
    return None


def group_by_length(layout):
    """Group sequences whose lengths differ by less than a factor of two; padding is then less than half of each group."""
    lengths, device = layout.lengths, layout.cu_seq_lens.device
    on_host = partial(torch.tensor, device="cpu")  # torch.set_default_device may name another
    groups: dict[int, list[int]] = {}
    for sequence, length in enumerate(lengths):
        groups.setdefault((length - 1).bit_length(), []).append(sequence)
    starts = [0] * len(lengths)
    shapes, masks = [], []
    group_start = 0
    for members in groups.values():
        in_group = [lengths[sequence] for sequence in members]
        longest = max(in_group)
        for row, sequence in enumerate(members):
            starts[sequence] = group_start + row * longest
        group_start += longest * len(members)
        shapes.append((len(members), longest))
        mask = None
        if min(in_group) < longest:
            is_key = torch.arange(longest, device="cpu") < on_host(in_group)[:, None, None, None]
            mask = to_device(is_key, device)
        masks.append(mask)
    num_tokens = sum(lengths)
    shifts = on_host(starts) - on_host([0, *lengths[:-1]]).cumsum(0)
    shift_of_each_token = shifts.repeat_interleave(on_host(lengths), output_size=num_tokens)
    indices = torch.arange(num_tokens, device="cpu") + shift_of_each_token
    return LengthGroups(to_device(indices, device), tuple(shapes), tuple(masks))


def _attend_groups(q_THK, k_THK, v_THK, groups):
    sizes = [count * length for count, length in groups.shapes]
    padded = []
    for x in (q_THK, k_THK, v_THK):
        places = x.new_zeros(sum(sizes), *x.shape[1:])
        padded.append(places.index_copy(0, groups.indices, x).split(sizes))
    outputs = []
    for shape, mask, *parts in zip(groups.shapes, groups.masks, *padded):
        q, k, v = split_rows(shape, *parts)
        output = _attend_group(q, k, v, mask)
        outputs.append(join_rows(output))
    return torch.cat(outputs).index_select(0, groups.indices)


def _attend_group(q_NHLK, k_NHLK, v_NHLK, mask):
    if q_NHLK.device.type == "cpu":
        return _BatchedProducts.apply(q_NHLK, k_NHLK, v_NHLK, mask)
    return F.scaled_dot_product_attention(q_NHLK, k_NHLK, v_NHLK, attn_mask=mask)


class _BatchedProducts(torch.autograd.Function):
    """`scaled_dot_product_attention` as batched matrix products that keep the probabilities, for training on a CPU.

    The backward pass of PyTorch's kernel computes the probabilities again in blocks, head by head. For short sequences, the
    products of all heads and sequences at once take a third of the time.
    """

    @staticmethod
    def forward(ctx, q_NHLK, k_NHLK, v_NHLK, mask):
        q, k, v = (x.flatten(0, 1) for x in (q_NHLK, k_NHLK, v_NHLK))
        scale = q.shape[-1] ** -0.5
        scores = widen(torch.bmm(q, k.mT)).mul_(scale)
        if mask is not None:
            scores.unflatten(0, q_NHLK.shape[:2]).masked_fill_(~mask, -torch.inf)
        weights = scores.softmax(-1).to(q.dtype)
        output = torch.bmm(weights, v)
        ctx.save_for_backward(q, k, v, weights, output)
        return output.unflatten(0, q_NHLK.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NHLK):
        q, k, v, weights, output = ctx.saved_tensors
        grad = grad_NHLK.flatten(0, 1)
        mean = (widen(grad) * output).sum(-1, keepdim=True)
        scale = q.shape[-1] ** -0.5
        grad_scores = widen(torch.bmm(grad, v.mT)).sub_(mean)
        grad_scores = grad_scores.mul_(weights).mul_(scale).to(q.dtype)
        grads = (
            torch.bmm(grad_scores, k),
            torch.bmm(grad_scores.mT, q),
            torch.bmm(weights.mT, grad),
        )
        return *(x.unflatten(0, grad_NHLK.shape[:2]) for x in grads), None


def attend_cpu_tiled(q_THK, k_THK, v_THK, plan):
    """Attention in blocks of scores, for inference on a CPU in bf16."""
    return tiled_attention(q_THK, k_THK, v_THK, plan.layout.lengths), None


def attend_varlen(q_THK, k_THK, v_THK, plan):
    """FlashAttention for packed sequences from `torch.nn.attention.varlen`."""
    boundaries, longest = plan.layout.cu_seq_lens, plan.layout.max_length
    return varlen_attn(q_THK, k_THK, v_THK.contiguous(), boundaries, boundaries, longest, longest), None


def attend_xformers(q_THK, k_THK, v_THK, plan):
    """Memory-efficient attention of xformers with a block-diagonal mask."""
    q, k, v = (x[None] for x in (q_THK, k_THK, v_THK))
    return find_xformers().memory_efficient_attention(q, k, v, attn_bias=plan.mask)[0], None


class _Caller(nn.Module):
    """In place of the calling module: the attributes that the attention functions of transformers read."""

    is_causal = False
    num_key_value_groups = 1

    def __init__(self, implementation):
        super().__init__()
        self.config = type("Config", (), {"_attn_implementation": implementation})()
        self.training = False


_caller = lru_cache(_Caller)


def attend_registry(q_THK, k_THK, v_THK, plan):
    """Functions of transformers' registry on a packed layout: FlashAttention, flex attention and Hub kernels."""
    boundaries, longest = plan.layout.cu_seq_lens, plan.layout.max_length
    kernel = cached_kernels.get(plan.backend)
    if kernel is not None:  # transformers would import a package or ask the Hub
        output = kernel(q_THK, k_THK, v_THK, boundaries, boundaries, longest, longest)
        if isinstance(output, tuple):
            output = output[0]
        return output, None
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_THK, v_THK))
    output, _ = AttentionInterface()[plan.backend](
        _caller(plan.backend),
        q,
        k,
        v,
        plan.mask,
        scaling=q_THK.shape[-1] ** -0.5,
        dropout=0.0,
        is_causal=False,
        cu_seq_lens_q=boundaries,
        cu_seq_lens_k=boundaries,
        max_length_q=longest,
        max_length_k=longest,
    )
    return output[0], None


def attend_flex(q_THK, k_THK, v_THK, plan):
    """Flex attention; it is compiled, except on a CPU."""
    if q_THK.device.type != "cpu":
        return attend_registry(q_THK, k_THK, v_THK, plan)
    # On a CPU, compiled flex attention (torch 2.13) fails for a second sequence length. It has no backward pass there at all.
    with torch.compiler.set_stance("force_eager"):
        return attend_registry(q_THK, k_THK, v_THK, plan)


def make_flex_mask(layout, dtype, is_fast):
    """Block mask of flex attention, in which tokens attend within their sequence."""
    sequence_ids = layout.sequence_ids()

    def same_sequence(row, head, query, key):
        return sequence_ids[query] == sequence_ids[key]

    num_tokens, device = len(sequence_ids), sequence_ids.device
    # Without compilation this makes a full T x T mask once; compiled, on a GPU, it evaluates blocks only.
    is_compiled = device.type == "cuda"
    return create_block_mask(same_sequence, 1, None, num_tokens, num_tokens, device=device, _compile=is_compiled)


def make_xformers_mask(layout, dtype, is_fast):
    """Block-diagonal mask, made on the host: xformers' copy to the device would wait, and the boundaries are there already."""
    mask = find_xformers().fmha.BlockDiagonalMask.from_seqlens(layout.lengths, device=torch.device("cpu"))
    mask.q_seqinfo.seqstart = mask.k_seqinfo.seqstart = layout.cu_seq_lens
    return mask


def has_flash_attention(version: int) -> bool:
    """Whether transformers finds this version of FlashAttention, and its kernels load."""
    is_available = getattr(transformers_utils, f"is_flash_attn_{version}_available", bool)  # an old one lacks some
    return is_available() and not loading_error(f"flash_attention_{version}")


@lru_cache
def has_cached_kernel(backend: str) -> bool:
    """Whether the Hub cache has a prebuilt FlashAttention that `kernels` loads with this torch; nothing is downloaded."""
    cache = Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)
    snapshots = cache.glob(f"*--kernels-community--flash-attn{backend[-1]}/snapshots/*")
    for snapshot in sorted(snapshots, key=os.path.getmtime, reverse=True):
        try:
            load = importlib.import_module("kernels").get_local_kernel  # `get_kernel` asks the Hub for a newer build
            cached_kernels[backend] = load(snapshot).flash_attn_varlen_func
            logger.info(f"attn_implementation={backend!r} runs the kernel in {str(snapshot)!r}")
            return True
        except Exception as error:  # no package `kernels`, no build for this torch, or any error of the kernel
            logger.warning(f"The kernel of {backend!r} in {str(snapshot)!r} does not load: {error!r}")
    return False


def has_varlen() -> bool:
    """Whether torch has `torch.nn.attention.varlen`."""
    return varlen_attn is not None


def find_xformers() -> ModuleType:
    """The module `xformers.ops`, whose import takes seconds and initialises CUDA."""
    return importlib.import_module("xformers.ops")


@lru_cache
def loading_error(backend: str) -> str:
    """Why the package of a backend cannot be imported; empty if it can, or if there is none.

    Kernels run only with the torch and the CUDA that they were built for. The package is imported when a forward on its devices
    asks for it, because a process that has initialised CUDA cannot fork.
    """
    module = KERNELS.get(backend, "torch")
    try:
        importlib.import_module(module)
        if backend == "xformers" and not getattr(importlib.import_module(backend), "_has_cpp_library", True):
            raise ImportError("its kernels are of another torch or CUDA")  # of which its import only warns
        return ""
    except Exception as error:  # an initialisation that fails raises any class
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return "is not installed"
        reason = f"is installed, but does not load beside torch {torch.__version__}: {error!r}; uninstall it"
    logger.warning(f"The package of attn_implementation={backend!r} {reason}. 'auto' uses another backend.")
    return f"{reason}, then"
