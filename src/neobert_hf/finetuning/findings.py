"""What a fit and later predictions find: scores beside those of simpler answers, and warnings; the record of a model has both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoints.record import write_record
from ..files import messages
from ..runs import FineTuningArguments
from ..runs.arguments import is_best_if_large
from .rows import LabelledRows

CROSS_VALIDATION = "cross-validation of the last layer"  # a split: the training rows, in turn
GIVEN = LabelledRows(None, None, None, [], dict.fromkeys(("train", "validation", "test"), "rows given in Python"), None)

Scores = dict[str, float]


@dataclass
class Findings:
    """What is known of a trained model.

    Args:
        num_rows: Number of training rows.
        is_pair: Whether a row is a pair of texts.
        scores: By split, and by the answer that has them: those of the model are `metrics`.
        remarks: What a reader of the scores must know.
        frozen: Logits of a linear model on frozen vectors, for the validation rows; None if there is none.
    """

    num_rows: int = 0
    is_pair: bool = False
    scores: dict[str, dict[str, Scores]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    frozen: np.ndarray | None = None

    def warn(self, fact: str, remedy: str) -> None:
        """Print a warning; the record, and so the card, has the fact."""
        self.remarks.append(fact)
        messages.warn(f"{fact}; {remedy}")

    def write(
        self,
        folder: Path,
        training: FineTuningArguments,
        source: str | None,
        data: LabelledRows,
    ) -> None:
        """Write the record of the training.

        Args:
            folder: Folder of the saved model.
            training: Training arguments.
            source: Folder or id of the model that the training started from.
            data: Rows of the training, of which the record has the names.
        """
        names = data.names | {CROSS_VALIDATION: data.names["train"]}
        scores = []
        for split, found in self.scores.items():
            score: dict[str, Any] = {"dataset": names[split], "split": split, **found}
            if names[split] == data.dataset:
                score |= {"dataset_id": data.dataset, "config": data.dataset_config}
            scores.append(score)
        write_record(
            folder,
            training,
            source=source,
            rows={names["train"]: self.num_rows},
            datasets=[data.dataset] if data.dataset else [],
            scores=scores,
            remark=" ".join(f"Warning: {fact}." for fact in self.remarks),
            is_pair=self.is_pair,
        )


def names_of_worse(found: Mapping[str, float], other: Mapping[str, float], is_trivial: bool = False) -> list[str]:
    """Return the metrics that are not better than those of another answer, unless both are perfect.

    Args:
        found: Metrics of a model.
        other: Those of the other answer.
        is_trivial: Whether it does not look at the inputs. What is perfect then, or all if it is right in all rows, is a property
            of the rows.
    """
    if is_trivial and (other.get("accuracy") == 1 or other.get("mse") == 0):
        return []
    worse = []
    for name, value in other.items():
        is_large_best = is_best_if_large(name)
        is_better = found[name] > value if is_large_best else found[name] < value
        said = value if is_trivial else found[name]
        is_perfect = said == is_large_best  # 1 or 0
        if not is_better and not is_perfect:
            worse.append(name)
    return worse


def check_finite(outputs: Any) -> None:
    """Raise FloatingPointError if an output is not finite: an item of an array or of a list of arrays, or a score."""
    for part in outputs:
        values = part["score"] if isinstance(part, dict) else part
        if not np.isfinite(values).all():
            raise FloatingPointError("a prediction is not finite; the model has diverged, lower the learning_rate")
