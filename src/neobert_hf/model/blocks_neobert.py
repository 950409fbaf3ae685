"""The block of NeoBERT: attention with rotary positions, then SwiGLU, each added to the residual stream.

Axes: `T` tokens; `S` selected tokens; `D` hidden; `H` heads; `K` head width; `F` feed-forward.

Source: paper, section 3.1.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_neobert import attend_rows, split_rows
from .backends_neobert import find_backend
from .configuration_neobert import NeoBERTConfig
from .kernels_neobert import choose_product, is_hooked, linear, rms_norm
from .plan_neobert import ForwardPlan
from .rotary_neobert import Rotary, split_and_rotate, split_and_rotate_fast


class RMSNorm(nn.RMSNorm):
    """RMSNorm that returns the dtype of its weight, so that an fp32 residual stream can feed fp16 products."""

    def forward(self, x_TD: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight."""
        weight = self.weight.to(x_TD.dtype)
        return F.rms_norm(x_TD, self.normalized_shape, weight, self.eps).to(self.weight.dtype)


def normalize(norm: nn.Module, x_TD: Tensor, is_fast: bool) -> Tensor:
    """norm(x), by the inference kernel if it is chosen and the module has no hooks."""
    if is_fast and type(norm) is RMSNorm and not is_hooked(norm):
        return rms_norm(x_TD, norm)
    return norm(x_TD)


class SwiGLU(nn.Module):
    """w3(silu(gate) * up); `w12` holds the gate and up projections side by side."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__()
        self.w12 = nn.Linear(config.hidden_size, 2 * config.swiglu_width, bias=False)
        self.w3 = nn.Linear(config.swiglu_width, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) to (T, D)."""
        gate_TF, up_TF = self.w12(x_TD).chunk(2, dim=-1)
        return self.w3(F.silu(gate_TF) * up_TF)


class NeoBERTAttention(nn.Module):
    """Attention within each sequence, by a backend of this package or by a function that the user registered.

    vLLM's backend for transformers searches for a module whose forward calls one function of `ALL_ATTENTION_FUNCTIONS`, and finds
    its own layer of attention by `layer_idx`.

    Attributes:
        attend: In a variant, a method (q, k, v, positions_BL, mask) that attends within each row: queries, keys, values and
            result are (B, H, L, K), `mask` is to be added to the scores. It runs on each document of a packed layout.
    """

    attend: Callable | None = None
    is_causal = False
    num_key_value_groups = 1

    def __init__(self, config: NeoBERTConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.scaling = config.head_dim**-0.5

    def forward(
        self,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THK: Tensor,
        plan: ForwardPlan,
    ) -> tuple[Tensor, Tensor | None]:
        """softmax(q k^T / sqrt(K)) v in both directions; a registered function gets (B, H, L, K), as in transformers' models.

        Returns:
            (T, H, K), and the probabilities (B, H, L, L) if the backend is eager, else None.
        """
        if self.attend is not None:
            return attend_rows(self.attend, q_THK, k_THK, v_THK, plan), None
        own = find_backend(plan.backend).attend
        if own is not None:
            return own(q_THK, k_THK, v_THK, plan)
        q, k, v = split_rows(plan.layout.shape, q_THK, k_THK, v_THK)
        attend = ALL_ATTENTION_FUNCTIONS[plan.backend]
        options = dict(dropout=0.0, scaling=self.scaling, **plan.options)
        out, _ = attend(self, q, k, v, plan.mask, **options)
        return out.reshape(q_THK.shape), None  # vLLM returns (T, H * K)


class NeoBERTBlock(GradientCheckpointingLayer):
    """One pre-normalised block: attention, then SwiGLU, each added to the residual stream.

    Args:
        config: Shape of the block.
        layer_idx: Number of the block.
        norm_class: Made from (D, eps=...) twice; this and the following are those of `NeoBERTModel`.
        attention_class: Made from (config, layer_idx).
        ffn_class: Made from (config).
    """

    # The elementwise operations of inference on a CPU.
    silu = staticmethod(F.silu)
    rotate = staticmethod(torch.mul)

    def __init__(
        self,
        config: NeoBERTConfig,
        layer_idx: int,
        norm_class: type[nn.Module] = RMSNorm,
        attention_class: type[nn.Module] = NeoBERTAttention,
        ffn_class: type[nn.Module] = SwiGLU,
    ):
        super().__init__()
        self.head_dim = config.head_dim  # tensor parallelism leaves a part of the heads in each process
        self.attention_norm = norm_class(config.hidden_size, eps=config.norm_eps)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.attention = attention_class(config, layer_idx)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.ffn_norm = norm_class(config.hidden_size, eps=config.norm_eps)
        self.ffn = ffn_class(config)

    def forward(
        self,
        x_TD: Tensor,
        rotary: Rotary,
        plan: ForwardPlan,
        tokens_S: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The residual stream (T, D) after the block; with eager attention also its probabilities (B, H, L, L).

        With `tokens_S`, indices on the flat axis, the stream of these tokens only, (S, D): their attention reads all tokens, and
        the products after attention are computed for them alone.

        For inference on a CPU, the second half is written in fewer operations (see kernels_neobert.py).
        """
        is_fast = plan.is_fast and self.has_own_parts()
        multiply = plan.multiply if is_fast else None
        qkv_TD = linear(self.qkv, normalize(self.attention_norm, x_TD, is_fast), multiply)
        qkv_TH3K = qkv_TD.unflatten(-1, (-1, 3, self.head_dim))
        if is_fast:
            is_tiled = plan.backend == "cpu_tiled"
            parts_THK = split_and_rotate_fast(qkv_TH3K, rotary.rotations, is_tiled, self.rotate)
        else:
            parts_THK = split_and_rotate(qkv_TH3K, rotary.table)
        out_THK, weights = self.attention(*parts_THK, plan)
        if tokens_S is not None:
            x_TD = x_TD.index_select(0, tokens_S)
            out_THK = out_THK.index_select(0, tokens_S)
        if not is_fast:
            x_TD = x_TD + self.wo(out_THK.flatten(1))
            x_TD = x_TD + self.ffn(self.ffn_norm(x_TD))
            return x_TD if weights is None else (x_TD, weights)
        if tokens_S is not None:
            multiply = choose_product(qkv_TD.dtype, len(tokens_S))
        out_TD = out_THK.flatten(1).to(qkv_TD.dtype)
        x_TD = x_TD + linear(self.wo, out_TD, multiply)
        gate_up_TF = linear(self.ffn.w12, rms_norm(x_TD, self.ffn_norm), multiply)
        gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
        swiglu_TF = self.silu(gate_TF).mul_(up_TF)
        return x_TD + linear(self.ffn.w3, swiglu_TF, multiply)

    def has_own_parts(self) -> bool:
        """Whether no variant of the model, adapter or hook has replaced or reads the norms and SwiGLU."""
        parts = self.attention_norm, self.ffn_norm, self.ffn
        return [type(part) for part in parts] == [RMSNorm, RMSNorm, SwiGLU] and not is_hooked(*parts)
