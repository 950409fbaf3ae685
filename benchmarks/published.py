"""The forward pass of the published code, for comparison: padded rows, complex rotary, a mask per head, SDPA.

Written for the benchmarks from the description of the published code; it takes our weights by their names and is checked
against the golden tensors in benchmarks/tests/test_benchmarks.py.
"""

import torch
import torch.nn.functional as F
from torch import nn

from neobert_hf import NeoBERTConfig

__all__ = ["PublishedMaskedLM", "PublishedModel"]


class PublishedRMSNorm(nn.Module):
    """Normalise in fp32, round, then multiply by the weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class PublishedSwiGLU(nn.Module):
    """Gate and up in one product, plain arithmetic between the products."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__()
        self.w12 = nn.Linear(config.hidden_size, 2 * config.swiglu_width, bias=False)
        self.w3 = nn.Linear(config.swiglu_width, config.hidden_size, bias=False)

    def forward(self, x):
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class PublishedBlock(nn.Module):
    """Attention on padded rows, then SwiGLU."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__()
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.attention_norm = PublishedRMSNorm(config.hidden_size, config.norm_eps)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.ffn_norm = PublishedRMSNorm(config.hidden_size, config.norm_eps)
        self.ffn = PublishedSwiGLU(config)

    def forward(self, x, mask, freqs):
        x = x + self.attention(self.attention_norm(x), mask, freqs)
        return x + self.ffn(self.ffn_norm(x))

    def attention(self, x, mask, freqs):
        num_rows, length, width = x.shape
        q, k, v = self.qkv(x).view(num_rows, length, self.num_heads, 3 * self.head_dim).chunk(3, dim=-1)
        q, k = (self.rotate(heads, freqs) for heads in (q, k))
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool())
        return self.wo(attended.transpose(1, 2).reshape(num_rows, length, width))

    @staticmethod
    def rotate(x, freqs):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs[None, :, None]).flatten(3).type_as(x)


class PublishedModel(nn.Module):
    """The encoder; `attention_mask` is not optional, as in the published code."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__()
        self.config = config
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.transformer_encoder = nn.ModuleList(PublishedBlock(config) for _ in range(config.num_hidden_layers))
        self.layer_norm = PublishedRMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, input_ids, attention_mask):
        """(B, L) ids and mask to (B, L, D)."""
        length, width = input_ids.shape[1], self.config.head_dim
        turns = 10_000.0 ** (-torch.arange(0, width, 2, device=input_ids.device).float() / width)
        angles = torch.outer(torch.arange(length, device=input_ids.device).float(), turns)
        freqs = torch.polar(torch.ones_like(angles), angles)
        x = self.encoder(input_ids)
        mask = attention_mask[:, None, None].repeat(1, self.config.num_attention_heads, length, 1)  # int64, as given
        for block in self.transformer_encoder:
            x = block(x, mask, freqs)
        return self.layer_norm(x)


class PublishedMaskedLM(nn.Module):
    """The encoder and a decoder over every position; a user adds the loss."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__()
        self.model = PublishedModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids, attention_mask, labels=None):
        """Logits (B, L, V), or the mean loss over the labels that are not -100."""
        logits = self.decoder(self.model(input_ids, attention_mask))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
