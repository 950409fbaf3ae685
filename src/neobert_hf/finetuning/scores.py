"""Logits become scores, and scores the columns of a file of predictions; without torch, for exported models too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .schemes import from_iob2


def sigmoid(logits: Any) -> np.ndarray:
    """Return the sigmoid in float64; in float32, that of large logits is one number, and rerankers have ties."""
    return np.exp(-np.logaddexp(0, -np.asarray(logits, np.float64)))


def softmax(logits: Any) -> np.ndarray:
    """Return the softmax over the last dimension in float64."""
    logits = np.asarray(logits, np.float64)
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def scores_of(logits: Any, score_type: str) -> np.ndarray:
    """Return scores of logits by a type as of `SavedModel.score_type`, in float64."""
    if score_type == "regression":
        return np.asarray(logits, np.float64)
    if score_type == "multi_label_classification":
        return sigmoid(logits)
    return softmax(logits)


def label_columns(
    logits: np.ndarray, names: Sequence[str], score_type: str, separator: str | None = None
) -> list[dict[str, Any]]:
    """Return for each row its `prediction`, and `probability_NAME` for each class; a number has no probability.

    Args:
        logits: (N, C) logits of the N rows.
        names: Names of the C classes.
        score_type: Of one class, several classes, or a number; as in the config of a model.
        separator: What joins the classes of a row, if it has several; None gives lists.
    """
    columns = [f"probability_{name}" for name in names]
    found: list[dict[str, Any]] = []
    for row, scores in zip(logits, scores_of(logits, score_type)):
        if score_type == "regression":
            found.append({"prediction": float(scores[0])})
            continue
        prediction: Any = names[row.argmax()]
        if score_type == "multi_label_classification":
            prediction = [name for name, logit in zip(names, row) if logit > 0]
            if separator:
                prediction = separator.join(prediction)
        probabilities = (round(float(score), 6) for score in scores)
        found.append({"prediction": prediction, **dict(zip(columns, probabilities))})
    return found


def tag_columns(logits: Sequence[np.ndarray], names: Sequence[str], scheme: str | None = None) -> list[dict[str, Any]]:
    """Return for each row its `prediction`, a tag for each word, and `probability`, that of each tag.

    Args:
        logits: (number of words, number of tags) logits of each row.
        names: Tags of the model.
        scheme: Scheme of the predictions, as of `from_iob2`, if it is not that of the model.
    """
    tags = [[names[number] for number in row.argmax(-1)] for row in logits]
    if scheme:
        tags = from_iob2(tags, scheme)
    found = []
    for of_row, row in zip(tags, logits):
        best = softmax(row).max(-1)
        found.append({"prediction": of_row, "probability": [round(float(score), 6) for score in best]})
    return found
