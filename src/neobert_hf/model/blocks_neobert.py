"""The block of NeoBERT: attention with rotary positions, then SwiGLU, each added to the residual stream.

Axes: `T` tokens; `S` selected tokens; `D` hidden; `H` heads; `K` head width; `F` feed-forward.

Source: paper, section 3.1.
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_neobert import ForwardPlan
from .backends_neobert import attend
from .configuration_neobert import NeoBERTConfig
from .kernels_neobert import (
    SHORTEST_TILED,
    RMSNorm,
    choose_kernels,
    is_hooked,
    product,
    rms_norm,
    split_and_rotate,
    split_and_rotate_fast,
)


class SwiGLU(nn.Module):
    """w3(silu(gate) * up); `w12` holds the gate and up projections side by side."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__()
        self.w12 = nn.Linear(config.hidden_size, 2 * config.swiglu_width, bias=False)
        self.w3 = nn.Linear(config.swiglu_width, config.hidden_size, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """(T, D) to (T, D)."""
        gate_TF, up_TF = self.w12(x_TD).chunk(2, dim=-1)
        return self.w3(F.silu(gate_TF) * up_TF)


class Rotary:
    """Wraps the rotary table as an argument of the blocks, so that FSDP2 does not cast it.

    With mixed precision FSDP2 casts every tensor in the arguments of a block, which would round cosine and sine to 8 bits. It
    does not search this object. accelerate, which moves arguments between devices, calls `to`.
    """

    def __init__(self, table: torch.Tensor):
        self.table = table

    @cached_property
    def turns(self) -> torch.Tensor:
        """(T, K / 2) complex64, the table as complex numbers cosine + i sine."""
        return torch.view_as_complex(self.table)

    def to(self, *args, **kwargs) -> "Rotary":
        """The same table on another device."""
        return Rotary(self.table.to(*args, **kwargs))


class NeoBERTBlock(GradientCheckpointingLayer):
    """One pre-normalised block: attention, then SwiGLU, each added to the residual stream."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__()
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.ffn_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(
        self, x_TD: torch.Tensor, rotary: Rotary, plan: ForwardPlan, tokens_S: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream (T, D) after the block, and the probabilities (B, H, L, L) of eager attention.

        With `tokens_S`, indices on the flat axis, the stream of these tokens only, (S, D): their attention reads all tokens, and
        the products after attention are computed for them alone.
        """
        parts = self.attention_norm, self.ffn_norm, self.ffn
        # an adapter may have replaced one
        is_own = type(self.attention_norm) is type(self.ffn_norm) is RMSNorm and type(self.ffn) is SwiGLU
        if plan.kernels != "plain" and is_own and not is_hooked(*parts):
            return self.forward_fast(x_TD, rotary, plan, tokens_S)
        qkv_TH3K = self.qkv(self.attention_norm(x_TD)).unflatten(-1, (self.num_heads, 3, self.head_dim))
        out_THK, weights = attend(*split_and_rotate(qkv_TH3K, rotary.table), plan)
        if tokens_S is not None:
            x_TD, out_THK = x_TD.index_select(0, tokens_S), out_THK.index_select(0, tokens_S)
        x_TD = x_TD + self.wo(out_THK.flatten(1))
        return x_TD + self.ffn(self.ffn_norm(x_TD)), weights

    def forward_fast(self, x_TD: torch.Tensor, rotary: Rotary, plan: ForwardPlan, tokens_S: torch.Tensor | None):
        """`forward` in fewer operations, for inference on a CPU (see kernels_neobert.py)."""
        kernels = plan.kernels
        qkv_TD = product(self.qkv, rms_norm(x_TD, self.attention_norm), kernels)
        by_head = plan.backend == "cpu_tiled" and plan.layout.max_length >= SHORTEST_TILED[qkv_TD.dtype]
        qkv_TH3K = qkv_TD.view(-1, self.num_heads, 3, self.head_dim)
        out_THK, weights = attend(*split_and_rotate_fast(qkv_TH3K, rotary.turns, by_head), plan)
        if tokens_S is not None:
            x_TD, out_THK = x_TD.index_select(0, tokens_S), out_THK.index_select(0, tokens_S)
            kernels = choose_kernels(qkv_TD.dtype, len(tokens_S))
        x_TD = product(self.wo, out_THK.flatten(1).to(qkv_TD.dtype), kernels, residual=x_TD)
        gate_TF, up_TF = product(self.ffn.w12, rms_norm(x_TD, self.ffn_norm), kernels).chunk(2, dim=-1)
        return product(self.ffn.w3, F.silu(gate_TF).mul_(up_TF), kernels, residual=x_TD), weights
