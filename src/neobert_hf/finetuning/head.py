"""The last layer of a classifier, fitted on the vectors of a frozen encoder; what small data can teach it in seconds.

Source: linear probing before fine-tuning, arXiv 2202.10054.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer

from .texts import MULTI, REGRESSION, SINGLE

STRENGTHS = (0.001, 0.01, 0.1, 1.0)  # C of the logistic regression, on features of deviation 1
WEAK = 0.01  # C of a layer whose encoder is trained afterwards: a loss of nearly zero would teach it nothing
NUM_FOLDS = 3


def _regression(strength: float = 1.0) -> LogisticRegression:
    return LogisticRegression(C=strength, max_iter=1000)


# By the kind of labels: a linear model, the name of its strength, and the score that chooses it.
LINEAR = {
    SINGLE: (_regression(), "C", "neg_log_loss"),
    MULTI: (OneVsRestClassifier(_regression()), "estimator__C", "f1_micro"),
    REGRESSION: (Ridge(), "alpha", "neg_mean_squared_error"),
}
# Threads of BLAS and of OpenMP wait for each other in every step of the solver: 77 classes took ten times as long.
one_thread = threadpool_limits.wrap(limits=1, user_api="blas")


def last_layer(model: nn.Module) -> nn.Linear:
    """Return the linear layer that computes the logits: the last one of a classifier of transformers."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def inputs_of_last_layer(trainer: Trainer, rows: Dataset) -> np.ndarray:
    """Return the vectors (N, D) in float32 from which a classifier computes the logits of N rows, without dropout."""
    model = trainer.model
    loader = DataLoader(rows.remove_columns("label"), trainer.args.eval_batch_size, collate_fn=trainer.data_collator)
    found: list[torch.Tensor] = []
    model.eval()
    hook = last_layer(model).register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].float().cpu()))
    with hook, torch.no_grad():
        for batch in loader:
            model(**batch.to(model.device))
    return torch.cat(found).numpy()


@one_thread
def choose_strength(
    vectors: np.ndarray | csr_matrix,
    labels: np.ndarray,
    problem_type: str,
    strengths: Sequence[float] = STRENGTHS,
) -> float:
    """Return the strength of a linear model, of `LINEAR`, with the best score of a cross-validation on training rows.

    Args:
        vectors: (N, D) of the rows. They are scaled to mean 0 and deviation 1, unless they are sparse.
        labels: (N,) class ids, scored by the log-likelihood; (N, C) zeros and ones, scored by F1 over all decisions; or (N,)
            numbers, scored by the squared error.
        problem_type: As in the config of a model.
        strengths: What is compared, in rising order; the last but one serves if there are too few rows to compare.
    """
    model, name, scoring = LINEAR[problem_type]
    folds = KFold(NUM_FOLDS, shuffle=True, random_state=0)  # files are sorted by class
    if problem_type == SINGLE:
        counts = np.bincount(labels)
        is_kept = counts[labels] > 1  # a class with one row cannot be in two folds
        vectors, labels = vectors[is_kept], labels[is_kept]
        folds = StratifiedKFold(min([NUM_FOLDS, *counts[counts > 1]]), shuffle=True, random_state=0)
    if len(labels) < 2 * NUM_FOLDS or len(np.unique(labels, axis=0)) < 2:
        return strengths[-2]
    if isinstance(vectors, np.ndarray):
        vectors = StandardScaler().fit_transform(vectors)
    grid = GridSearchCV(model, {name: strengths}, cv=folds, scoring=scoring, refit=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Label .* is present in all")  # in a fold, of a rare class
        return grid.fit(vectors, labels).best_params_[name]


@one_thread
def fit_linear(
    vectors: np.ndarray,
    labels: np.ndarray,
    num_outputs: int,
    problem_type: str,
    strength: float = 1.0,
    weights: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight (C, D) and bias (C,) of a linear layer: logistic regression, or ridge regression for numbers.

    The features are scaled to mean 0 and deviation 1; the layer reads the vectors as they are.

    Args:
        vectors: (N, D) of the training rows.
        labels: (N,) class ids or numbers, or (N, C) zeros and ones.
        num_outputs: Number of logits.
        problem_type: As in the config of a model.
        strength: C of the logistic regression, as of `choose_strength`.
        weights: (N,) positive weights of rows of one class; 2 is a row that is there twice.
    """
    scaler = StandardScaler().fit(vectors, sample_weight=weights)
    features = scaler.transform(vectors)
    weight = np.zeros((num_outputs, vectors.shape[1]))
    # a class that no row has, or every row, is a constant: the log-odds of half a row
    bias = np.full(num_outputs, -np.log(2 * len(vectors)))
    if problem_type == REGRESSION:
        ridge = RidgeCV(np.logspace(-1, 5, 7)).fit(features, labels)
        weight[0] = ridge.coef_
        bias[0] = ridge.intercept_
    elif problem_type == MULTI:
        for i, column in enumerate(np.transpose(labels)):
            if column.all():
                bias[i] *= -1
            elif column.any():
                fitted = _regression(strength).fit(features, column)
                weight[i] = fitted.coef_[0]
                bias[i] = fitted.intercept_[0]
    else:
        fitted = _regression(strength).fit(features, labels, sample_weight=weights)
        of_rows = fitted.classes_[-len(fitted.coef_) :]  # of two classes, there is the difference of the logits
        bias[fitted.classes_] = 0
        weight[of_rows] = fitted.coef_
        bias[of_rows] = fitted.intercept_
    weight /= scaler.scale_
    bias -= weight @ scaler.mean_
    return torch.tensor(weight, dtype=torch.float32), torch.tensor(bias, dtype=torch.float32)


def cross_validated(vectors: np.ndarray, labels: np.ndarray, num_outputs: int, strength: float) -> np.ndarray:
    """Return the logits (N, C) of N rows, each by a layer that `fit_linear` fits on the rows of four other folds.

    Args:
        vectors: (N, D) of the rows.
        labels: (N,) class ids, of which two at least have two rows.
        num_outputs: Number of logits.
        strength: C of the logistic regressions.
    """
    logits = np.zeros((len(vectors), num_outputs), np.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class")
        for others, fold in folds_of(labels).split(vectors, labels):
            weight, bias = fit_linear(vectors[others], labels[others], num_outputs, SINGLE, strength)
            logits[fold] = vectors[fold] @ weight.numpy().T + bias.numpy()
    return logits


def folds_of(labels: np.ndarray) -> StratifiedKFold:
    """Return the folds of `cross_validated`."""
    return StratifiedKFold(min(5, np.bincount(labels).max()), shuffle=True, random_state=0)


def weighted_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Return the mean over rows of weight times cross-entropy, for Trainer.

    Args:
        outputs: (B, C) logits of a model.
        labels: (B, 2) class ids and weights; or (B,) class ids of an evaluation.
        num_items_in_batch: Number of values in the labels of a step; None takes this batch.
    """
    ids, *weights = labels.reshape(len(labels), -1).T
    losses = cross_entropy(outputs.logits.float(), ids.long(), reduction="none")
    for of_rows in weights:
        losses *= of_rows
    return losses.sum() * (1 + len(weights)) / (num_items_in_batch or labels.numel())
