"""Pseudo-perplexity of any masked language model (paper, section 5.3 and appendix E), under a budget of tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ..model.modeling_neobert import NeoBERTForMaskedLM

MAX_TOKENS = 16_384


@dataclass(frozen=True)
class MaskedText:
    """A text as token ids, and the positions to mask, one at a time.

    Attributes:
        input_ids: Token ids with special tokens.
        positions: Indices into `input_ids`.
    """

    input_ids: Sequence[int]
    positions: Sequence[int]


def positions_to_mask(
    input_ids: Sequence[int], special_ids: Iterable[int], num_positions: int | None = None, seed: int = 0
) -> list[int]:
    """Return all positions of tokens that are not special, or a sample of them without replacement, in ascending order.

    Args:
        input_ids: Token ids of a text.
        special_ids: Ids of tokens that are not masked; none, to mask special tokens too.
        num_positions: Size of the sample; None takes all.
        seed: Seed of the sample.

    Raises:
        ValueError: No token can be masked.
    """
    special = set(special_ids)
    positions = [position for position, token in enumerate(input_ids) if token not in special]
    if not positions:
        raise ValueError("the text has special tokens only; give a text with at least one ordinary token")
    if num_positions is None or num_positions >= len(positions):
        return positions
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed))[:num_positions]
    return [positions[i] for i in order.sort().values.tolist()]


@torch.no_grad()
def masked_losses(
    model: PreTrainedModel, mask_token_id: int, texts: Iterable[MaskedText], max_tokens: int = MAX_TOKENS
) -> Iterator[list[float]]:
    """Yield the cross-entropies of each text's masked tokens, in nats, where each token is masked alone.

    A batch holds copies of one or more texts, each with one mask, and at most `max_tokens` tokens with padding. Logits exist at
    masked positions only. So memory depends on the budget, and not on the lengths or the number of texts.

    Args:
        model: A masked language model in evaluation mode.
        mask_token_id: Id of the mask token.
        texts: Texts; in order of length there is the least padding.
        max_tokens: Largest number of tokens in a batch.

    Raises:
        ValueError: A text has more tokens than the budget.

    Source: paper, section 5.3 and appendix E.
    """
    with _decoding_of_one_position(model) as logits_at:
        losses: list[float] = []
        for batch in _batches(texts, max_tokens):
            for (text, _), loss in zip(batch, _losses(model, logits_at, batch, mask_token_id)):
                losses.append(loss)
                if len(losses) == len(text.positions):
                    yield losses
                    losses = []


def _batches(texts: Iterable[MaskedText], max_tokens: int) -> Iterator[list[tuple[MaskedText, int]]]:
    """Batches of copies: each a text and the position to mask in it, in the order of the texts."""
    batch: list[tuple[MaskedText, int]] = []
    longest = 0
    for text in texts:
        length = len(text.input_ids)
        if length > max_tokens:
            raise ValueError(
                f"a text has {length} tokens, and the budget is {max_tokens}; choose a larger budget, or truncate the texts"
            )
        for position in text.positions:
            if batch and (len(batch) + 1) * max(longest, length) > max_tokens:
                yield batch
                batch, longest = [], 0
            batch.append((text, position))
            longest = max(longest, length)
    if batch:
        yield batch


def _losses(model, logits_at, batch, mask_token_id) -> list[float]:
    lengths = [len(text.input_ids) for text, _ in batch]
    input_ids = torch.full((len(batch), max(lengths)), model.config.pad_token_id or 0)
    for row, (text, _) in enumerate(batch):
        input_ids[row, : lengths[row]] = torch.as_tensor(text.input_ids)
    rows, positions = torch.arange(len(batch)), torch.tensor([position for _, position in batch])
    labels = input_ids[rows, positions]
    input_ids[rows, positions] = mask_token_id
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    inputs = {"input_ids": input_ids.to(model.device)}
    if min(lengths) < max(lengths):
        inputs["attention_mask"] = mask.to(model.device)
    logits = logits_at(inputs, positions.to(model.device))
    return cross_entropy(logits.float(), labels.to(model.device), reduction="none").tolist()


@contextmanager
def _decoding_of_one_position(model: PreTrainedModel):
    """A function from inputs and one position per row to the logits there, (rows, vocabulary).

    In other models the head sees only these positions, since a hook takes them from the output of the encoder.
    """
    if isinstance(model, NeoBERTForMaskedLM):

        def logits_at(inputs, positions):
            hidden_BLD = model.model(**inputs).last_hidden_state
            return model.decoder(hidden_BLD[torch.arange(len(positions), device=positions.device), positions])

        yield logits_at
        return
    chosen: list[torch.Tensor] = []

    def select(module, arguments, output):
        (positions,) = chosen
        rows = torch.arange(len(positions), device=positions.device)
        output["last_hidden_state"] = output.last_hidden_state[rows, positions][:, None]
        return output

    def logits_of_selected(inputs, positions):
        chosen[:] = [positions]
        return model(**inputs, return_dict=True).logits[:, 0]

    hook = model.base_model.register_forward_hook(select)
    try:
        yield logits_of_selected
    finally:
        hook.remove()


@torch.no_grad()
def one_pass_losses(model: PreTrainedModel, text: MaskedText) -> list[float]:
    """Return the cross-entropies of the tokens at the text's positions where no token is masked, from one forward.

    The model sees the token that it predicts, so these values are far below those of `masked_losses`. They are an
    approximation only as far as their order is the same; report the correlation with exact values.
    """
    input_ids = torch.tensor([list(text.input_ids)], device=model.device)
    logits = model(input_ids=input_ids).logits[0, list(text.positions)].float()
    return cross_entropy(logits, input_ids[0, list(text.positions)], reduction="none").tolist()


def pseudo_perplexity(losses: Sequence[float]) -> float:
    """Return exp of the mean loss; infinity if it exceeds the range of a float.

    Args:
        losses: Cross-entropies in nats.
    """
    try:
        return math.exp(statistics.fmean(losses))
    except OverflowError:
        return math.inf


def confidence_interval(losses: Sequence[float], num_tokens: int) -> tuple[float, float]:
    """Return the 95 % interval of the pseudo-perplexity of all tokens, from a sample of their losses.

    By the normal approximation of the mean loss, with the correction for a finite population; a sample of all tokens has an
    interval of width zero.

    Args:
        losses: Cross-entropies of the sampled tokens.
        num_tokens: Number of tokens from which the sample was drawn.
    """
    mean, size = statistics.fmean(losses), len(losses)
    if size == num_tokens:
        half = 0.0
    elif size == 1:
        half = math.inf
    else:
        half = 1.96 * statistics.stdev(losses) / math.sqrt(size) * math.sqrt((num_tokens - size) / (num_tokens - 1))
    return pseudo_perplexity([mean - half]), pseudo_perplexity([mean + half])


def median_by_length(lengths: Sequence[int], values: Sequence[float], num_bins: int = 8) -> list[dict]:
    """Return the median of the values in bins of equal numbers of texts.

    Returns:
        For each bin `up_to`, the largest length in it, `median`, and `texts`, their number.
    """
    order = sorted(zip(lengths, values))
    size = math.ceil(len(order) / num_bins)
    bins = [order[start : start + size] for start in range(0, len(order), size)]
    return [
        {"up_to": part[-1][0], "median": statistics.median(value for _, value in part), "texts": len(part)}
        for part in bins
    ]
