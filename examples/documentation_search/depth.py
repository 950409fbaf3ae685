"""More depth for a trained model: new blocks between its own, which change nothing until they are trained."""

import copy

import torch

from ..model.configuration_neobert import NeoBERTConfig
from ..model.modeling_neobert import NeoBERTPreTrainedModel


def check_depth(config: NeoBERTConfig, num_hidden_layers: int) -> None:
    """Raise ValueError if `num_hidden_layers` is not more than a model of this configuration has."""
    if num_hidden_layers <= config.num_hidden_layers:
        raise ValueError(
            f"num_hidden_layers={num_hidden_layers}, but the model has {config.num_hidden_layers}; choose at least "
            f"{config.num_hidden_layers + 1}, or leave the depth as it is"
        )


def with_more_blocks(model: NeoBERTPreTrainedModel, num_hidden_layers: int) -> NeoBERTPreTrainedModel:
    """Return a copy of a NeoBERT, with or without a head, that has more blocks and computes the same.

    The new blocks are spread evenly. Each is a copy of the block before it, but its two output projections are zero, so that it
    adds nothing to the residual stream. Gradients reach the projections, and from the second step on the whole block.

    Source: block expansion of LLaMA Pro (Wu et al., arXiv 2401.02415, section 3.2).

    Args:
        model: The model to deepen; it stays as it is. It is no contextual model, which has two encoders.
        num_hidden_layers: Number of blocks of the result.

    Raises:
        ValueError: `num_hidden_layers` is not more than the model has.
    """
    check_depth(model.config, num_hidden_layers)
    deeper = copy.deepcopy(model)
    encoder = deeper.base_model
    before = len(encoder.transformer_encoder)
    origins = [i * before // num_hidden_layers for i in range(num_hidden_layers)]
    blocks = []
    for i, origin in enumerate(origins):
        block = encoder.transformer_encoder[origin]
        if i and origins[i - 1] == origin:
            block = copy.deepcopy(block)
            with torch.no_grad():
                block.wo.weight.zero_()
                block.ffn.w3.weight.zero_()
        blocks.append(block)
    encoder.transformer_encoder = torch.nn.ModuleList(blocks)
    # an encoder that was put under another head has a configuration of its own
    deeper.config.num_hidden_layers = encoder.config.num_hidden_layers = num_hidden_layers
    return deeper
