"""Rotary positions (RoFormer, arXiv 2104.09864): the table of angles, made once per forward, and the rotation of heads.

Axes: `T` tokens on the flat axis; `H` heads; `K` head width; `C` pairs of a head, K / 2.
"""

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from .layout_neobert import SequenceLayout
from .machine_neobert import is_tracing

CHUNK_TOKENS = 256  # tokens whose fp32 copy stays in the cache between two passes


def rotary_table(
    config,
    layout: SequenceLayout,
    dtype: torch.dtype,
) -> Tensor:
    """Cosine and sine for every token, in fp32 (fp64 for an fp64 model), computed in each forward.

    The table is not a buffer: a buffer is lost when a model is built on the meta device and loaded afterwards.

    Returns:
        (T, K / 2, 2), cosine and sine of position * theta^(-2i / K) for pair i.

    Source: RoFormer, equation 34. YaRN: arXiv 2309.00071, sections 3.2 to 3.4. Dynamic NTK scales the base by the length of each
        sequence, so that a sequence does not depend on other sequences of the batch.
    """
    rope, width = config.rope_parameters, config.head_dim
    factor = rope.get("factor", 1.0)
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    device = layout.position_ids.device
    exponents = -torch.arange(0, width, 2, device=device, dtype=dtype) / width
    amplitude = 1.0
    base = rope["rope_theta"]
    if rope["rope_type"] == "dynamic":
        base = _longer_base(config, layout, dtype)
    frequencies = base**exponents
    if rope["rope_type"] == "linear":
        frequencies = frequencies / factor
    if rope["rope_type"] == "yarn":
        keep = _yarn_kept_share(rope, width, exponents)
        frequencies = frequencies * (keep + (1 - keep) / factor)
        amplitude = rope.get("attention_factor") or 0.1 * math.log(factor) + 1.0
    angles = layout.position_ids.to(dtype)[:, None] * frequencies
    return amplitude * torch.stack((angles.cos(), angles.sin()), -1)


def _longer_base(config, layout, dtype):
    """(T, 1), the base of dynamic NTK for each token, by the length of its sequence."""
    rope, width, context_length = config.rope_parameters, config.head_dim, config.max_position_embeddings
    factor, sequence_ids = rope["factor"], layout.sequence_ids()
    longest = torch.zeros_like(layout.position_ids).scatter_reduce(0, sequence_ids, layout.position_ids, "amax")
    length = (longest + 1)[sequence_ids][:, None].to(dtype)
    length = length.clamp(min=context_length)
    scale = factor * length / context_length - (factor - 1)
    return rope["rope_theta"] * scale ** (width / (width - 2))


def _yarn_kept_share(rope, width, like):
    """Share of each pair's frequency that YaRN keeps: 1 for pairs that rotate many times within the original context."""
    first = math.floor(_pair_with_rotations(rope, width, rope.get("beta_fast") or 32))
    last = math.ceil(_pair_with_rotations(rope, width, rope.get("beta_slow") or 1))
    first, last = max(first, 0), min(last, width - 1)
    pairs = torch.arange(width // 2, device=like.device, dtype=like.dtype)
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)


def _pair_with_rotations(rope, width, count):
    """The pair, a real number, that rotates `count` times within the original context."""
    context_length = rope["original_max_position_embeddings"]
    longest_wave = context_length / (count * 2 * math.pi)
    return width * math.log(longest_wave) / (2 * math.log(rope["rope_theta"]))


class Rotary:
    """Wraps the rotary table as an argument of the blocks: with mixed precision, FSDP2 rounds every tensor among them to 8 bits.

    It does not search this object. accelerate, which moves arguments between devices, calls `to`.
    """

    def __init__(self, table: Tensor):
        self.table = table

    @cached_property
    def rotations(self) -> Tensor:
        """(T, C) complex64, the table as complex numbers cosine + i sine."""
        return torch.view_as_complex(self.table)

    def to(self, *args, **kwargs) -> "Rotary":
        """The same table on another device."""
        return Rotary(self.table.to(*args, **kwargs))


def split_and_rotate(
    qkv_TH3K: Tensor,
    rotary: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split queries, keys and values, and rotate queries and keys by each token's angles in the dtype of the table.

    RoPE rotates consecutive pairs (2i, 2i + 1) of each head.

    Args:
        qkv_TH3K: (T, H, 3, K), query, key and value of each head side by side.
        rotary: (T, K / 2, 2), cosine and sine of each pair's angle.

    Returns:
        Queries, keys and values, (T, H, K).
    """
    qk_TH2K = qkv_TH3K[:, :, :2].to(rotary.dtype)
    pairs_TH2C2 = qk_TH2K.unflatten(-1, (-1, 2))
    if qkv_TH3K.device.type in ("cpu", "cuda") and not is_tracing(qkv_TH3K):
        # a half of the time of the real arithmetic on a CPU; compilers do not support complex numbers
        rotations_TC = torch.view_as_complex(rotary)
        turned_TH2C = torch.view_as_complex(pairs_TH2C2) * rotations_TC[:, None, None]
        turned = torch.view_as_real(turned_TH2C).flatten(-2)
        # where the dtype changes, queries and keys become contiguous; cuDNN's attention was not tested with views of both
        turned_2THK = turned.movedim(2, 0).to(qkv_TH3K.dtype, memory_format=torch.contiguous_format)
    else:
        even, odd = pairs_TH2C2.unbind(-1)
        cos, sin = rotary[:, None, None].unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        turned_2THK = turned.to(qkv_TH3K.dtype).unbind(2)
    return *turned_2THK, qkv_TH3K[:, :, 2]


def split_and_rotate_fast(
    qkv_TH3K: Tensor,
    rotations: Tensor,
    by_head: bool,
    multiply: Callable = torch.mul,
) -> tuple[Tensor, Tensor, Tensor]:
    """`split_and_rotate` for inference on a CPU.

    Args:
        qkv_TH3K: (T, H, 3, K).
        rotations: (T, C) complex64, cosine + i sine of each pair's angle.
        by_head: Return the dtype of `qkv_TH3K`, stored head by head in memory, as `tiled_attention` reads it. If False, return
            float32, in which attention over few tokens is faster and more precise.
        multiply: Without `by_head`: the elementwise product of complex numbers.
    """
    if not by_head:
        q_k_v = qkv_TH3K.float()
        pairs_TH2C2 = q_k_v[:, :, :2].unflatten(-1, (-1, 2))
        pairs_TH2C = torch.view_as_complex(pairs_TH2C2)
        turned_TH2C = multiply(pairs_TH2C, rotations[:, None, None])
        q, k = torch.view_as_real(turned_TH2C).flatten(-2).unbind(2)
        return q, k, q_k_v[:, :, 2]
    num_tokens, num_heads, _, width = qkv_TH3K.shape
    qkv_3HTK = qkv_TH3K.new_empty(3, num_heads, num_tokens, width)
    for start in range(0, num_tokens, CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        out = qkv_3HTK[:, :, chunk]
        qk = out.copy_(qkv_TH3K[chunk].permute(2, 1, 0, 3))[:2]
        wide = qk.to(torch.float32, copy=True)
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
        pairs.mul_(rotations[chunk])
        qk.copy_(wide)
    return qkv_3HTK.transpose(1, 2).unbind(0)
