"""How well a masked language model fills the blanks."""

from collections import Counter
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def masked_accuracy(model: PreTrainedModel, batches: Iterable[dict]) -> float:
    """Share of masked tokens, between 0 and 1, that the model's first guess gets right.

    Args:
        model: A masked language model; it is left in the mode it was in.
        batches: Inputs of the model with `labels`, -100 where no token is masked.

    Raises:
        ValueError: No token of any batch is masked.
    """
    was_training = model.training
    model.eval()
    right = total = 0
    for batch in batches:
        labels = batch["labels"].to(model.device)
        is_masked = labels != -100
        inputs = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in batch.items()}
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
        right += int((logits.argmax(-1) == labels)[is_masked].sum())
        total += int(is_masked.sum())
    model.train(was_training)
    if not total:
        raise ValueError("no batch holds a masked token, so there is no share of them; mask some")
    return right / total


def unigram_accuracy(training_ids: Iterable[list[int]], batches: Iterable[dict], ignored_ids: Iterable[int]) -> float:
    """Share of masked tokens that are the most frequent token of the training text: what knowing no context achieves.

    Args:
        training_ids: Token ids of the training documents.
        batches: As for `masked_accuracy`.
        ignored_ids: Special tokens, which are never masked.
    """
    ignored = set(ignored_ids)
    counts = Counter(token for ids in training_ids for token in ids if token not in ignored)
    most_frequent = counts.most_common(1)[0][0]
    labels = torch.cat([batch["labels"][batch["labels"] != -100] for batch in batches])
    return (labels == most_frequent).float().mean().item()
