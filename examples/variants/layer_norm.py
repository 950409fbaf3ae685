"""LayerNorm in the place of RMSNorm: it subtracts the mean, and has a bias."""

import torch.nn.functional as F
from torch import nn

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel


class LayerNormConfig(NeoBERTConfig):
    """The config of this variant."""

    model_type = "layer_norm_neobert"


class LayerNorm(nn.LayerNorm):
    """LayerNorm in the dtype of the residual stream, which may be wider than that of the weights."""

    def forward(self, x_TD):
        """(x - mean) / sqrt(variance + eps) * weight + bias, in the dtype of the weight."""
        weight, bias = self.weight.to(x_TD.dtype), self.bias.to(x_TD.dtype)
        return F.layer_norm(x_TD, self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


class LayerNormModel(NeoBERTModel):
    """The encoder."""

    config_class, norm_class = LayerNormConfig, LayerNorm


class LayerNormForMaskedLM(NeoBERTForMaskedLM):
    """The encoder with its head."""

    config_class, encoder_class = LayerNormConfig, LayerNormModel
