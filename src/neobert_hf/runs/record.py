"""`training.json`: what a training has done, for the model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from ..files.texts import as_list
from ..files.trust import read_json
from ..files.writing import write_json
from . import MINI_MODEL_PATH

RECORD = "training.json"
MINI = "the mini model of neobert_hf"  # a start that is no id on the Hub
# Of all training arguments, those that a reader of a card needs to train the model again.
SETTINGS = ("learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "optim", "seed")


def write_record(
    folder: str | Path,
    training: TrainingArguments,
    *,
    source: str | None,
    rows: Mapping[str, int | None],
    datasets: Sequence[str] = (),
    scores: Sequence[Mapping[str, Any]] = (),
    settings: Mapping[str, Any] | None = None,
    remark: str = "",
    is_pair: bool = False,
) -> None:
    """Write what a model was trained from, on what, how, and with which result.

    Args:
        folder: Folder of the saved model.
        training: Training arguments.
        source: Folder or Hub id of the model that the training started from; None for random weights.
        rows: Number of training rows by name of the file or dataset; None if it is unknown.
        datasets: Ids of the datasets on the Hub that the training read.
        scores: One mapping for each evaluation: `dataset`, a name; `dataset_id`, an id on the Hub or None; `split`; `metrics`,
            numbers by name; perhaps `trivial`, those of an answer that does not look at the inputs.
        settings: How the model was trained, by name; by default a few of the training arguments.
        remark: A sentence about the training.
        is_pair: Whether the model reads pairs of texts.

    Raises:
        OSError: The file cannot be written.
    """
    if settings is None:
        unused = "num_train_epochs" if training.max_steps > 0 else "max_steps"
        settings = {name: getattr(training, name) for name in SETTINGS if name != unused}
    record = {
        "source": origin_of(source),
        "model_id": training.hub_model_id,
        "license": training.license,
        "language": as_list(training.language),
        "rows": dict(rows),
        "datasets": list(datasets),
        "scores": [dict(score) for score in scores],
        "settings": {name: getattr(value, "value", value) for name, value in settings.items()},
        "remark": remark,
        "is_pair": is_pair,
    }
    write_json(Path(folder, RECORD), record)


def origin_of(source: str | Path | None) -> str | None:
    """Return the Hub id from which a chain of trainings started, or `MINI`; None for another folder, or random weights."""
    if not source or not Path(source).is_dir():
        return None if source is None else str(source)
    if Path(source).resolve() == Path(MINI_MODEL_PATH).resolve():
        return MINI
    file = Path(source, RECORD)
    return read_json(file)["source"] if file.is_file() else None
