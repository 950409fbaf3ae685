"""How much of a text a model reads, and the longest text that it can take."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Truncation = Literal["warn", "error", "off"]  # what becomes of texts that are longer than the model reads
BLANKS = " \t\n\r"  # white space of every tokenizer; that of BERT removes other control characters
USUAL_CHARACTERS = 32  # more than a token has in nearly all texts


def as_list(values: str | os.PathLike | Iterable[str | os.PathLike] | None) -> list[str]:
    """Return names or paths as a list of strings; a single one is a list of one, None an empty list."""
    return [str(value) for value in ([values] if isinstance(values, str | os.PathLike) else values or ())]


def beginning(text: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None) -> str:
    """Return the beginning of a very long text; truncated, it has the same token ids as the whole text.

    A tokenizer reads a whole text before it truncates it: gigabytes of memory for a cell of 16 MB. The result has more than twice
    as many tokens as are kept. So its last tokens, which may differ, are truncated, and a text that is cut here counts as
    truncated. It ends before white space, if there is any, where common tokenizers begin a new token. Of a pair of two such texts
    with an odd number of tokens, the other one may get the odd token.

    Args:
        text: The text.
        tokenizer: The tokenizer that truncates it afterwards.
        max_tokens: Length in tokens at which it is truncated; by default that of the tokenizer.
    """
    max_tokens = tokenizer.model_max_length if max_tokens is None else max_tokens
    length = USUAL_CHARACTERS * max_tokens
    while 4 * length < len(text) and tokenizer.truncation_side == "right":  # the look costs a quarter at most
        end = max(text.rfind(space, 0, length) for space in BLANKS)
        part = text[: end if end > length // 2 else length].rstrip(BLANKS)  # Chinese and base64 have no spaces
        if len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]) > 2 * max_tokens:
            return part
        length *= 2  # of blanks, of words that are one token, or without white space
    return text


def fact_of_truncated(lost: Sequence[int], longest: int, truncation: Truncation, is_exact: bool = False) -> str:
    """Return a sentence that counts the texts that are truncated and their tokens; empty if there is nothing to warn of.

    Args:
        lost: For each text, the number of its tokens that are not read.
        longest: Length in tokens at which texts are truncated.
        truncation: "warn" returns the sentence, "error" refuses such texts, and "off" allows them.
        is_exact: Whether all tokens of a text were counted; otherwise only a part of one that is far longer (`beginning`).

    Raises:
        ValueError: A text is truncated, and `truncation` is "error"; or it is none of these words.
    """
    if truncation not in get_args(Truncation):
        raise ValueError(f"truncation={truncation!r} is none of {', '.join(get_args(Truncation))}; choose one of them")
    counts = f"{sum(map(bool, lost)):,} of {len(lost):,} texts are truncated to {longest:,} tokens, and "
    counts += "at least " * (not is_exact and max(lost, default=0) > longest)
    fact = f"{counts}{sum(lost):,} tokens are lost" if any(lost) and truncation != "off" else ""
    if fact and truncation == "error":
        raise ValueError(f"{fact}; split long texts, or choose warn as truncation")
    return fact


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
    from torch import nn

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
        fault = f"{name}={max_length} is more than the {longest} positions of {model.name_or_path}"
        raise ValueError(f"{fault}; give --{name} {longest}, or less")
