"""More depth for a trained model: new blocks between its own, which change nothing until they are trained."""

import copy

from torch import nn
from transformers import PreTrainedModel


def with_more_blocks(model: PreTrainedModel, num_hidden_layers: int) -> PreTrainedModel:
    """Return a copy of a NeoBERT that has more blocks and computes the same.

    The new blocks are spread evenly. Each is a copy of the block before it with two output projections of zero, so it adds
    nothing to the residual stream. Gradients reach the projections, and from the second step on the whole block.

    Args:
        model: NeoBERT with or without a head; it stays as it is.
        num_hidden_layers: Number of blocks of the result.

    Raises:
        ValueError: `num_hidden_layers` is not more than the model has.

    Source: block expansion of LLaMA Pro (arXiv 2401.02415, section 3.2).
    """
    before = model.config.num_hidden_layers
    if num_hidden_layers <= before:
        raise ValueError(f"num_hidden_layers={num_hidden_layers}, but the model has {before}; choose a larger number")
    deeper = copy.deepcopy(model)
    encoder = deeper.base_model
    origins = [i * before // num_hidden_layers for i in range(num_hidden_layers)]
    blocks = nn.ModuleList()
    for i, origin in enumerate(origins):
        block = encoder.transformer_encoder[origin]
        if i and origins[i - 1] == origin:
            block = copy.deepcopy(block)
            nn.init.zeros_(block.wo.weight)
            nn.init.zeros_(block.ffn.w3.weight)
        blocks.append(block)
    encoder.transformer_encoder = blocks
    # the encoder of an embedding model has a configuration of its own
    deeper.config.num_hidden_layers = encoder.config.num_hidden_layers = num_hidden_layers
    return deeper
