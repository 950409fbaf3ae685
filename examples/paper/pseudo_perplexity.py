"""Pseudo-perplexity of any masked language model (paper, section 5.3 and appendix E), under a budget of tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import t as student
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from neobert_hf import NeoBERTForMaskedLM

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


def load_masked_model(name_or_path: str, auto_class=AutoModelForMaskedLM, **options) -> PreTrainedModel:
    """Load a masked language model in evaluation mode.

    Args:
        name_or_path: Folder or Hub id.
        auto_class: Class whose `from_pretrained` loads it.
        options: Of `from_pretrained`.

    Raises:
        ValueError: The checkpoint has no head of masked language modelling, or other weights are missing.
    """
    model, info = auto_class.from_pretrained(name_or_path, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{name_or_path} has no {', '.join(missing[:3])}; choose a checkpoint with the head of masked language modelling"
        )
    return model.eval()


def unmasked_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of the special tokens, without that of unknown words, which stand for text."""
    return set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}


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

    A batch holds copies of one or more texts, each with one mask: at most `max_tokens` tokens with padding, or one copy of a
    longer text. Logits exist at masked positions only. So memory depends on the budget, and not on the number of texts.

    Args:
        model: A masked language model in evaluation mode.
        mask_token_id: Id of the mask token.
        texts: Texts; in order of length there is the least padding.
        max_tokens: Largest number of tokens in a batch.

    Source: paper, section 5.3 and appendix E.
    """
    losses: list[float] = []
    for batch in _batches(texts, max_tokens):
        for (text, _), loss in zip(batch, _losses(model, batch, mask_token_id)):
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
        for position in text.positions:
            if batch and (len(batch) + 1) * max(longest, length) > max_tokens:
                yield batch
                batch, longest = [], 0
            batch.append((text, position))
            longest = max(longest, length)
    if batch:
        yield batch


def _losses(model, batch, mask_token_id) -> list[float]:
    lengths = [len(text.input_ids) for text, _ in batch]
    copies = [torch.as_tensor(text.input_ids) for text, _ in batch]
    input_ids = pad_sequence(copies, batch_first=True, padding_value=model.config.pad_token_id or 0)
    rows, positions = torch.arange(len(batch)), torch.tensor([position for _, position in batch])
    labels = input_ids[rows, positions]
    input_ids[rows, positions] = mask_token_id
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    inputs = {"input_ids": input_ids.to(model.device)}
    if min(lengths) < max(lengths):
        inputs["attention_mask"] = mask.to(model.device)
    logits = _logits_at(model, inputs, positions.to(model.device))
    return cross_entropy(logits.float(), labels.to(model.device), reduction="none").tolist()


def _logits_at(model: PreTrainedModel, inputs: dict[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
    """The logits at one position per row, (rows, vocabulary).

    In other models the head sees only these positions, since a hook takes them from the output of the encoder.
    """
    if isinstance(model, NeoBERTForMaskedLM):
        outputs = model.model(
            **inputs,
            return_packed=True,
            return_dict=True,
            select_tokens=lambda layout: layout.first_tokens + positions,
        )
        return model.decoder(outputs.last_hidden_state)

    def select(module, arguments, output):
        rows = torch.arange(len(positions), device=positions.device)
        output["last_hidden_state"] = output.last_hidden_state[rows, positions][:, None]
        return output

    hook = model.base_model.register_forward_hook(select)
    try:
        return model(**inputs, return_dict=True).logits[:, 0]
    finally:
        hook.remove()


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

    By Student's t for the mean loss, with the correction for a finite population; a sample of all tokens has an interval of
    width zero. Losses are skewed, so samples of less than ten tokens are covered less often than 95 % says.

    Args:
        losses: Cross-entropies of the sampled tokens.
        num_tokens: Number of tokens from which the sample was drawn.
    """
    mean, size = statistics.fmean(losses), len(losses)
    if size == 1:
        half = 0.0 if num_tokens == 1 else math.inf
    else:
        unseen = (num_tokens - size) / (num_tokens - 1)
        half = student.ppf(0.975, size - 1) * statistics.stdev(losses) * math.sqrt(unseen / size)
    return pseudo_perplexity([mean - half]), pseudo_perplexity([mean + half])


def median_by_length(lengths: Sequence[int], values: Sequence[float], num_bins: int = 8) -> list[dict]:
    """Return the median of the values in bins of about equal numbers of texts; texts of one length are in one bin.

    Returns:
        For each bin `up_to`, the largest length in it, `median`, and `texts`, their number.
    """
    size, bins = math.ceil(len(lengths) / num_bins), [[]]
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for before, i in zip([None, *order], order):
        if len(bins[-1]) >= size and lengths[i] > lengths[before]:
            bins.append([])
        bins[-1].append(i)
    return [
        {"up_to": lengths[part[-1]], "median": statistics.median(values[i] for i in part), "texts": len(part)}
        for part in bins
    ]
