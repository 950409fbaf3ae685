"""Validation of texts, and of their length, before a model gets them."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel


def check_texts(texts: Sequence[str]) -> None:
    """Raise an error that names the first text that cannot be embedded.

    An empty text is valid; its embedding is that of the special tokens alone.

    Raises:
        ValueError: A text is not a string, or holds a lone surrogate (half of a surrogate pair), which UTF-8 cannot store.
    """
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"text {i} is {text!r}, a {type(text).__name__}; every text must be a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text {i} has the lone surrogate {text[error.start]!r} at character {error.start}; "
                'read the file with errors="replace", or remove it'
            ) from error


def longest_text(model: PreTrainedModel) -> int | None:
    """Return the number of tokens for which a model has learned positions; None for rotary positions, which have no end."""
    for name, module in model.named_modules():
        if name.endswith(("position_embeddings", "embed_positions")) and isinstance(module, nn.Embedding):
            first = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from there
            return module.num_embeddings - first
    return None


def check_max_length(model: PreTrainedModel, max_length: int) -> None:
    """Raise ValueError if texts of this length in tokens may exceed the positions that a model has learned."""
    longest = longest_text(model)
    if longest is not None and max_length > longest:
        raise ValueError(
            f"max_seq_length={max_length} is more than the {longest} positions of {model.name_or_path}; give --max_seq_length "
            f"{longest}, or less"
        )
