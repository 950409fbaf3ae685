"""Masked-token accuracy of a masked language model, and of a bigram model that counts tokens."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def masked_accuracy(model: PreTrainedModel, batches: Iterable[dict]) -> float:
    """Return the share of masked tokens, between 0 and 1, that the model predicts correctly (top-1).

    Args:
        model: A masked language model in evaluation mode.
        batches: Model inputs with `labels`, -100 where no token is masked.
    """
    num_correct = num_masked = 0
    for batch in batches:
        labels = batch["labels"]
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        num_correct += (logits.argmax(-1) == labels).sum().item()  # no prediction is -100
        num_masked += (labels != -100).sum().item()
    return num_correct / num_masked


def bigram_accuracy(training_ids: Iterable[list[int]], batches: Iterable[dict], ignored_ids: Iterable[int]) -> float:
    """Return the masked-token accuracy of a bigram model.

    Each neighbour predicts the token that follows (left neighbour) or precedes it (right neighbour) most often in the training
    text. The prediction with the larger relative frequency counts. A masked neighbour predicts nothing; if both neighbours are
    masked, the prediction is the most frequent token.

    Args:
        training_ids: Token ids of the training documents.
        batches: Rows as for `masked_accuracy`, with the mask token in place of masked tokens.
        ignored_ids: Ids of special tokens, which are never masked and never predicted.
    """
    ignored, after, before, counts = set(ignored_ids), defaultdict(Counter), defaultdict(Counter), Counter()
    for ids in training_ids:
        for left, token, right in zip(ids, ids[1:], ids[2:]):
            if token not in ignored:
                after[left][token] += 1
                before[right][token] += 1
                counts[token] += 1
    most_frequent = counts.most_common(1)[0][0]
    predictions = [{token: _most_likely(c) for token, c in table.items()} for table in (after, before)]
    num_correct = num_masked = 0
    for batch in batches:
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
            for place in (i for i, label in enumerate(labels) if label != -100):
                neighbours = zip(predictions, (ids[place - 1], ids[place + 1]))
                _, prediction = max(table.get(token, (0.0, most_frequent)) for table, token in neighbours)
                num_correct += prediction == labels[place]
                num_masked += 1
    return num_correct / num_masked


def _most_likely(counts: Counter) -> tuple[float, int]:
    """Return the relative frequency of the most frequent token, and this token."""
    ((token, count),) = counts.most_common(1)
    return count / counts.total(), token
