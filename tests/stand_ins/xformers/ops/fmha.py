"""Memory-efficient attention and its block-diagonal mask."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class _SeqLenInfo:
    seqstart: torch.Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list


@dataclass
class BlockDiagonalMask:
    """Queries attend to the keys of their own block."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        assert device.type == "cpu", "a mask that is made on a device makes the host wait"
        starts = [0, *torch.tensor(q_seqlen).cumsum(0).tolist()]
        info = _SeqLenInfo(torch.tensor(starts, dtype=torch.int32), max(q_seqlen), min(q_seqlen), starts)
        return cls(info, info)


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """The result of the kernels, with their requirements on the arguments."""
    assert all(x.ndim == 4 and len(x) == 1 and x.stride(-1) == 1 for x in (query, key, value)) and scale is None
    info = attn_bias.q_seqinfo
    assert info.seqstart.dtype == torch.int32 and info is attn_bias.k_seqinfo
    lengths = info.seqstart.diff().tolist()
    assert max(lengths) == info.max_seqlen and sum(lengths) == query.shape[1]
    parts = zip(*(x[0].transpose(0, 1).split(lengths, dim=1) for x in (query, key, value)))
    return torch.cat([F.scaled_dot_product_attention(*part) for part in parts], dim=1).transpose(0, 1)[None]
