"""GeGLU (arXiv 2002.05202) in the place of SwiGLU, with the same matrices."""

import torch.nn.functional as F

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel
from neobert_hf.model import SwiGLU


class GegluConfig(NeoBERTConfig):
    """The config of this variant."""

    model_type = "geglu_neobert"


class Geglu(SwiGLU):
    """w3(gelu(gate) * up)."""

    def forward(self, x_TD):
        """(T, D) to (T, D)."""
        gate_TF, up_TF = self.w12(x_TD).chunk(2, dim=-1)
        return self.w3(F.gelu(gate_TF) * up_TF)


class GegluModel(NeoBERTModel):
    """The encoder."""

    config_class, ffn_class = GegluConfig, Geglu


class GegluForMaskedLM(NeoBERTForMaskedLM):
    """The encoder with its head."""

    config_class, encoder_class = GegluConfig, GegluModel


class GegluForSequenceClassification(NeoBERTForSequenceClassification):
    """The encoder with the head of a classifier; other heads are written in the same way."""

    config_class, encoder_class = GegluConfig, GegluModel
