"""The shortest and the longest text that a model can take."""

from torch import nn
from transformers import PreTrainedModel


def check_leaves_tokens(max_seq_length: int | None, name: str = "max_seq_length") -> None:
    """Raise ValueError if a text that is truncated at this length in tokens has special tokens only; None is no limit.

    Args:
        max_seq_length: The length.
        name: Name of the option, for the message.
    """
    if max_seq_length is not None and max_seq_length < 3:
        raise ValueError(f"{name}={max_seq_length} leaves no token beside [CLS] and [SEP]; give 3 or more")


def longest_text(model: PreTrainedModel) -> int | None:
    """Return the number of tokens for which a model has learned positions; None for rotary positions, which have no end."""
    for name, module in model.named_modules():
        if name.endswith(("position_embeddings", "embed_positions")) and isinstance(module, nn.Embedding):
            first = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from there
            return module.num_embeddings - first
    return None


def check_max_length(model: PreTrainedModel, max_length: int, name: str = "max_seq_length") -> None:
    """Raise ValueError if texts of this length in tokens may exceed the positions that a model has learned.

    Args:
        model: The model.
        max_length: The length.
        name: Name of the option, for the message.
    """
    longest = longest_text(model)
    if longest is not None and max_length > longest:
        raise ValueError(
            f"{name}={max_length} is more than the {longest} positions of {model.name_or_path}; give --{name} {longest}, or less"
        )
