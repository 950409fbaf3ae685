"""What a fit does, decided before anything is trained: its rows, weights, epochs, learning rate, last layer, cross-validation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.utils.class_weight import compute_sample_weight
from transformers import PretrainedConfig

from ..files.output import content_hash
from ..runs import default_learning_rate
from ..runs.arguments import EPOCHS, EPOCHS_OF_FEW
from .texts import MULTI, REGRESSION, SINGLE

# With fewer rows of each class, and at most this number of rows, a last layer on frozen vectors is the better start.
FEW_OF_CLASS, FEW_TEXTS = 100, 2000
SHORT_ROWS = 2500  # of all epochs of a short training
SMALL = 384  # hidden_size of the mini model, whose training was compared

Columns = list[list]  # inputs, and labels as the last column


@dataclass(frozen=True)
class Plan:
    """What a fit does.

    Args:
        columns: Columns of the training rows.
        validation: Columns of the validation rows.
        identity: What of the job, besides the training arguments, a resumed run must have too, as plain types.
        epochs: Number of epochs, unless the user gives one.
        learning_rate: Unless the user gives one; None decides by the size of the model.
        best_metric: Chooses the best epoch if the validation rows are not few, see `choose_metric`; None is F1 in any case.
        has_short_steps: Whether a step of short texts may have more rows, see `choose_batch`.
        is_head_first: Whether the last layer is fitted before the training.
        is_head_weak: Whether this layer stays weak, because a short training of all layers follows.
        is_crossed: Whether a cross-validation of the last layer gives the metrics.
        pooling: What a classifier reads of a text; None keeps what the config of the model says.
        weights: (N,) of the training rows.
        mean: Of the numbers of a regression, which are trained with mean 0 and deviation 1.
        deviation: Their standard deviation.
    """

    columns: Columns
    validation: Columns | None
    identity: dict[str, Any] = field(default_factory=dict)
    epochs: int = EPOCHS
    learning_rate: float | None = None
    best_metric: str | None = None
    has_short_steps: bool = False
    is_head_first: bool = False
    is_head_weak: bool = False
    is_crossed: bool = False
    pooling: str | None = None
    weights: np.ndarray | None = None
    mean: float = 0.0
    deviation: float = 1.0


def plan_fit(
    columns: Columns,
    validation: Columns | None,
    weights: np.ndarray | None,
    problem_type: str,
    num_classes: int,
    parameters: Mapping[str, Any],
    config: PretrainedConfig,
    is_head_new: bool,
    is_held_out: bool,
) -> Plan:
    """Return what the fit of a classifier does.

    Args:
        columns: Texts and labels of the training.
        validation: The same for validation.
        weights: (N,) of the training rows.
        problem_type: As in the config of a model.
        num_classes: Number of classes.
        parameters: Those of `Classifier`.
        config: Config of the model that the training starts from.
        is_head_new: Whether this model has no head for these classes.
        is_held_out: Whether the validation rows are training rows, on which a cross-validation may train too.

    Raises:
        ValueError: Nothing can be learned from the labels.
    """
    texts, labels = columns
    if problem_type != MULTI and len(set(labels)) < 2:
        hint = "give others, or validation rows (validation_file), so that none of them is held out"
        raise ValueError(f"all training rows have the label {labels[0]!r}, so nothing can be learned; {hint}")
    adapter, pooling = parameters["adapter"], parameters["classifier_pooling"]
    is_head_first = parameters["head_first"]
    if is_head_first is None:
        is_few = len(texts) < min(FEW_TEXTS, FEW_OF_CLASS * num_classes)
        is_head_first = is_head_new and is_few and problem_type != REGRESSION
    is_small = not adapter and config.hidden_size <= SMALL  # larger models, and adapters, were not compared
    is_single_first = is_head_first and problem_type == SINGLE
    options: dict[str, Any] = {"weights": weights, "best_metric": "f1"}
    if validation and is_held_out and is_single_first and weights is None and can_cross(labels):
        columns = [of_training + held_out for of_training, held_out in zip(columns, validation)]
        validation = None
        options["is_crossed"] = True
    if problem_type == REGRESSION:
        options["best_metric"] = "pearson"
        options["mean"], options["deviation"] = unit_of(labels)
    if adapter:  # keeps the pooling of its base
        options["learning_rate"] = 10 * default_learning_rate(config)
    elif is_head_first and hasattr(config, "classifier_pooling"):  # the first token of a frozen encoder says less
        pooling = pooling or "mean"
    is_short = is_small and is_single_first
    return Plan(
        columns,
        validation,
        _identity(problem_type, parameters, is_head_first, weights),
        num_epochs(len(columns[0]), is_head_first, is_short),
        pooling=pooling,
        has_short_steps=is_small,
        is_head_first=is_head_first,
        is_head_weak=is_short,
        **options,
    )


def can_cross(labels: list) -> bool:
    """Return whether two classes at least have two rows, of which each can be in another fold."""
    return sum(count > 1 for count in Counter(labels).values()) > 1


def num_epochs(num_rows: int, is_head_first: bool, is_short: bool) -> int:
    """Return the number of epochs of a classifier: 3, or 10 after a fit of the last layer; it falls in a short training."""
    if is_short:
        return max(4, min(EPOCHS_OF_FEW, SHORT_ROWS // num_rows))
    return EPOCHS_OF_FEW if is_head_first else EPOCHS


def unit_of(labels: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation of numbers, as a model reads them.

    Raises:
        ValueError: All numbers are equal in float32, or one is too large for it.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = np.array(labels, np.float32).tolist()
        mean, deviation = float(np.mean(numbers)), float(np.std(numbers))
    if not deviation > 0:
        fault = f"the labels, from {min(labels)!r} to {max(labels)!r}, cannot be told apart in float32"
        raise ValueError(f"{fault}; subtract a constant, or choose another unit")
    return mean, deviation


def weigh(
    columns: Columns,
    labels: list,
    sample_weight: Sequence[float] | None,
    class_weight: Mapping[Any, float] | str | None,
) -> tuple[Columns, np.ndarray]:
    """Return columns without the rows of weight 0, and the weights of the others, times those of their classes.

    Args:
        columns: Columns of the training rows.
        labels: Labels as the user gave them.
        sample_weight: Weight of each row; None is 1.
        class_weight: As of scikit-learn.

    Raises:
        ValueError: The weights are not one number of at least 0 for each row, or all of them are 0.
    """
    weights = np.ones(len(labels))
    if sample_weight is not None:
        weights = np.array([*sample_weight], float)
    if weights.shape != (len(labels),) or not (weights >= 0).all() or not weights.any():
        rule = f"give each of the {len(labels)} rows a number of at least 0, and not only 0"
        raise ValueError(f"sample_weight={weights.tolist()!r:.80}; {rule}")
    kept = np.flatnonzero(weights)
    weights = weights[kept] * compute_sample_weight(class_weight, np.array(labels)[kept])
    return [[column[i] for i in kept] for column in columns], weights


def _identity(
    problem_type: str, parameters: Mapping[str, Any], is_head_first: bool, weights: np.ndarray | None
) -> dict[str, Any]:
    found = {
        "problem_type": problem_type,
        "classifier_pooling": parameters["classifier_pooling"],
        "head_first": is_head_first,
        "adapter": {},
    }
    if parameters["adapter"]:
        # sets become lists; their order differs between processes
        settings = json.loads(json.dumps(parameters["adapter"].to_dict(), default=sorted))
        found["adapter"] = {name: value for name, value in settings.items() if value}
    if weights is not None:
        found["weights"] = content_hash(weights.tolist())
    return found
