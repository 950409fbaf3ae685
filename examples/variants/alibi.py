"""ALiBi (arXiv 2108.12409): scores decrease with the distance of two tokens; there are no rotary positions."""

import torch

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel
from neobert_hf.model import NeoBERTAttention


class AlibiConfig(NeoBERTConfig):
    """`alibi_exponent` sets the slopes of H heads: 2 ** (-alibi_exponent * h / H) for h = 1 to H."""

    model_type = "alibi_neobert"
    alibi_exponent = 8.0


class AlibiAttention(NeoBERTAttention):
    """softmax(q k^T / sqrt(K) - slope * |i - j|) v."""

    def attend(self, q, k, v, positions_BL, mask):
        """(B, H, L, K) each; the mask keeps padding apart where it was not removed."""
        share_H11 = torch.arange(1, q.shape[1] + 1, device=q.device)[:, None, None] / self.config.num_attention_heads
        distance_BLL = (positions_BL[:, :, None] - positions_BL[:, None]).abs()
        bias_BHLL = mask - distance_BLL[:, None] * 2 ** (-self.config.alibi_exponent * share_H11)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias_BHLL.to(q.dtype))


class AlibiModel(NeoBERTModel):
    """The encoder."""

    config_class, attention_class = AlibiConfig, AlibiAttention

    def rotary_table(self, layout, dtype):
        """The angle of position 0, which is 0, for each token."""
        return super().rotary_table(layout._replace(position_ids=torch.zeros_like(layout.position_ids)), dtype)


class AlibiForMaskedLM(NeoBERTForMaskedLM):
    """The encoder with its head."""

    config_class, encoder_class = AlibiConfig, AlibiModel
