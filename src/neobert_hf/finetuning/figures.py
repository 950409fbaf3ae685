"""Figures of labels of texts: what logits decide, the metrics of a kind of labels, and the best answer that looks at no text."""

from __future__ import annotations

import numpy as np
from scipy.stats import pearsonr, rankdata
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error

from .findings import Scores
from .texts import MULTI, REGRESSION, SINGLE


def decisions(problem_type: str, logits: np.ndarray) -> np.ndarray:
    """Return the predictions of (N, C) logits: (N,) class ids, (N, C) zeros and ones for several classes, or (N,) numbers."""
    if problem_type == REGRESSION:
        return logits.reshape(len(logits))
    if problem_type == MULTI:
        return (logits > 0).astype(int)
    return logits.argmax(-1)


def label_metrics(problem_type: str, labels: np.ndarray, logits: np.ndarray) -> Scores:
    """Return the metrics of a kind of labels.

    One class: accuracy, F1 as the mean over the classes, and Matthews' coefficient for two classes. Several classes: the share of
    rows whose classes are all right, F1 as the mean over the classes, and F1 over all decisions. Numbers: Pearson's and
    Spearman's correlation, and the mean squared error.

    Args:
        problem_type: As in the config of a model.
        labels: (N,) class ids or numbers, or (N, C) zeros and ones.
        logits: (N, C) predictions of the model.
    """
    predicted = decisions(problem_type, logits)
    if problem_type == REGRESSION:
        error = float(mean_squared_error(labels, predicted))
        return {
            "pearson": pearson(labels, predicted),
            "spearman": spearman(labels, predicted),
            "mse": error,
        }
    found = {"accuracy": accuracy_score(labels, predicted)}
    found["f1"] = f1_score(labels, predicted, average="macro", zero_division=0)
    if problem_type == MULTI:
        found["f1_micro"] = f1_score(labels, predicted, average="micro", zero_division=0)
    elif logits.shape[-1] == 2:
        is_constant = len({*labels, *predicted}) == 1  # scikit-learn warns
        found["matthews"] = 0 if is_constant else matthews_corrcoef(labels, predicted)
    return {name: float(value) for name, value in found.items()}


def trivial_logits(problem_type: str, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return logits (N, C) of the most frequent class, or of the classes of at least half of the rows; or (N,) times the mean.

    Args:
        problem_type: As in the config of a model.
        labels: (N,) class ids or numbers, or (N, C) zeros and ones.
        num_classes: Number of classes.
    """
    if problem_type == REGRESSION:
        return np.full(len(labels), labels.mean())
    if problem_type == SINGLE:
        logits = np.eye(num_classes)[np.bincount(labels).argmax()]
    else:
        logits = np.where(labels.mean(0) < 0.5, -1, 1)
    return np.tile(logits, (len(labels), 1))


def pearson(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return Pearson's correlation, and 0 if all predictions are equal, as they can be early in training."""
    if not np.ptp(predicted) or not np.ptp(labels):
        return 0.0
    return float(pearsonr(predicted, labels).statistic)


def spearman(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return Spearman's rank correlation, and 0 if all predictions are equal."""
    return pearson(rankdata(labels), rankdata(predicted))
