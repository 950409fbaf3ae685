"""No positions: attention reads a document as a set of tokens."""

import torch

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel


class NoPositionsConfig(NeoBERTConfig):
    """The config of this variant."""

    model_type = "no_positions_neobert"


class NoPositionsModel(NeoBERTModel):
    """The encoder."""

    config_class = NoPositionsConfig

    def rotary_table(self, layout, dtype):
        """The angle of position 0, which is 0, for each token."""
        return super().rotary_table(layout._replace(position_ids=torch.zeros_like(layout.position_ids)), dtype)


class NoPositionsForMaskedLM(NeoBERTForMaskedLM):
    """The encoder with its head."""

    config_class, encoder_class = NoPositionsConfig, NoPositionsModel
