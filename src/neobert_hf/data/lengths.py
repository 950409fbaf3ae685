"""How much of a text a model reads, and the longest text that it can take."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_LENGTH = 512  # tokens; of a training that names none
Truncation = Literal["warn", "error", "off"]  # what becomes of texts that are longer than the model reads
BLANKS = " \t\n\r"  # white space of every tokenizer; that of BERT removes other control characters
USUAL_CHARACTERS = 32  # more than a token has in nearly all texts


def as_list(values: str | os.PathLike | Iterable[str | os.PathLike] | None) -> list[str]:
    """Return names or paths as a list of strings; a single one is a list of one, None an empty list."""
    if isinstance(values, str | os.PathLike):
        return [str(values)]
    return [str(value) for value in values or ()]


def plain_tokenizer(tokenizer: PreTrainedTokenizerBase | Tokenizer) -> Tokenizer:
    """Return a copy of the inner `tokenizers` tokenizer without truncation and padding."""
    inner: Tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    plain = Tokenizer.from_str(inner.to_str())
    plain.no_truncation()
    plain.no_padding()
    return plain


def beginning(text: str, tokenizer: PreTrainedTokenizerBase | Tokenizer, max_tokens: int | None = None) -> str:
    """Return the beginning of a very long text; truncated, it has the same token ids as the whole text.

    A tokenizer reads a whole text before it truncates it: gigabytes of memory for a cell of 16 MB. The result has more than twice
    as many tokens as are kept. So its last tokens, which may differ, are truncated, and a text that is cut here counts as
    truncated. It ends before white space, if there is any, where common tokenizers begin a new token. Of a pair of two such texts
    with an odd number of tokens, the other one may get the odd token.

    Args:
        text: The text.
        tokenizer: The tokenizer that truncates it afterwards.
        max_tokens: Length in tokens at which it is truncated; by default that of a tokenizer of transformers.
    """
    if max_tokens is None:
        max_tokens = tokenizer.model_max_length
    length = USUAL_CHARACTERS * max_tokens
    if isinstance(tokenizer, Tokenizer):
        side = (tokenizer.truncation or {}).get("direction", "right")
    else:
        side = tokenizer.truncation_side
    while 4 * length < len(text) and side == "right":  # the look costs a quarter at most
        end = max(text.rfind(space, 0, length) for space in BLANKS)
        if end <= length // 2:  # Chinese and base64 have no spaces
            end = length
        part = text[:end].rstrip(BLANKS)
        if isinstance(tokenizer, Tokenizer):
            ids = plain_tokenizer(tokenizer).encode(part, add_special_tokens=False).ids
        else:
            ids = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > 2 * max_tokens:
            return part
        length *= 2  # of blanks, of words that are one token, or without white space
    return text


def tokens_lost(
    tokenizer: PreTrainedTokenizerBase | Tokenizer, longest: int, inputs: Sequence[str | Sequence[str]]
) -> list[int]:
    """Return by how many tokens each input is longer than a model reads.

    Of a text that is far longer, a tokenizer of transformers counts the part that `beginning` returns.

    Args:
        tokenizer: The tokenizer of transformers; or one of `tokenizers` that truncates nothing, as of `plain_tokenizer`.
        longest: Length in tokens at which inputs are truncated.
        inputs: Texts, prompts included, or pairs of texts.
    """
    plain: Any = tokenizer if isinstance(tokenizer, Tokenizer) else None
    lost = []
    for each in inputs:
        texts = [each] if isinstance(each, str) else list(each)
        length = 0
        # a token has at least a byte, and a pair has up to four special ones
        if len("".join(texts).encode()) > longest - 4:
            if plain is None:  # a slow tokenizer truncates only where it is asked to
                plain = plain_tokenizer(tokenizer) if tokenizer.is_fast else tokenizer
            if not isinstance(tokenizer, Tokenizer):
                texts = [beginning(text, tokenizer, longest) for text in texts]
            length = len(plain.encode(*texts))
        lost.append(max(length - longest, 0))
    return lost


def fact_of_truncated(lost: Sequence[int], num_texts: int, longest: int, truncation: Truncation) -> str:
    """Return a sentence that counts the texts that are truncated and their tokens; empty if there is nothing to warn of.

    Args:
        lost: Numbers of `tokens_lost`; those of texts that lose none may be left out.
        num_texts: Number of all texts.
        longest: Length in tokens at which texts are truncated.
        truncation: "warn" returns the sentence, "error" refuses such texts, and "off" allows them.

    Raises:
        ValueError: A text is truncated, and `truncation` is "error"; or it is none of these words.
    """
    if truncation not in get_args(Truncation):
        raise ValueError(f"truncation={truncation!r} is none of {', '.join(get_args(Truncation))}; choose one of them")
    num_cut = sum(map(bool, lost))
    if not num_cut or truncation == "off":
        return ""
    # `beginning` counts a part of a text that is far longer
    least = "at least " * (max(lost) > longest)
    fact = f"{num_cut:,} of {num_texts:,} texts are truncated to {longest:,} tokens, and {least}{sum(lost):,} tokens are lost"
    if truncation == "error":
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
            if module.padding_idx is not None:  # RoBERTa counts from there
                return module.num_embeddings - module.padding_idx - 1
            return module.num_embeddings
    return None


def check_max_length(model: PreTrainedModel, max_length: int, name: str = "max_seq_length") -> None:
    """Raise ValueError if texts of this length in tokens exceed the learned positions of a model, or of its config and 512.

    Args:
        model: The model.
        max_length: The length.
        name: Name of the option, for the message.
    """
    rotary = getattr(model.config, "max_position_embeddings", max_length)  # beyond which nothing was learned
    longest = longest_text(model) or max(rotary, DEFAULT_LENGTH)
    refuse_longer(max_length, longest, model.name_or_path, name)


def refuse_longer(max_length: int, longest: int, source: str, name: str = "max_seq_length") -> None:
    """Raise ValueError if texts of `max_length` tokens exceed the `longest` ones of the model of `source`."""
    if max_length > longest:
        fault = f"{name}={max_length} is more than the {longest} positions of {source}"
        raise ValueError(f"{fault}; give {longest} or less")
