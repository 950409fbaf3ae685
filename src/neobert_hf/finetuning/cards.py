"""The card of a fine-tuned model."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import TrainingArguments

from ..files.trust import read_json
from ..runs.cards import eval_results, training_facts, write_card
from .labelled import LabelledDataArguments

if TYPE_CHECKING:
    from sentence_transformers.base.model import BaseModel


def write_finetuning_card(
    arguments: LabelledDataArguments,
    training: TrainingArguments,
    data: Mapping[str, Sized],
    model: BaseModel | None = None,
    folder: str | Path | None = None,
) -> None:
    """Write the card of a fine-tuned model, with the scores of eval_results.json and test_results.json; nothing without training.

    Args:
        arguments: Model and data of the training.
        training: Training arguments.
        data: Rows by split; those of `train` are counted.
        model: As in `write_card`.
        folder: Folder of the model; by default the output folder.

    Raises:
        OSError: The folder cannot be read or written.
    """
    if not (arguments.has_training and training.should_save):
        return
    dataset, results = arguments.dataset_name, []
    trained_on = dataset or arguments.train_file
    if Path(trained_on).exists():  # a folder of rows is a dataset too
        dataset, trained_on = None, Path(trained_on).name
    for prefix, split, file in (
        ("eval", "validation", arguments.validation_file),
        ("test", "test", arguments.test_file),
    ):
        scores = Path(training.output_dir, f"{prefix}_results.json")
        if scores.is_file() and (prefix == "eval" or file):
            name, is_hub = (Path(file).name, False) if file else (trained_on, bool(dataset))
            options = {"dataset_type": dataset, "dataset_config": arguments.dataset_config} if is_hub else {}
            results += eval_results(read_json(scores), name, dataset_split=split, **options)
    facts = training_facts(
        training,
        arguments.model_name_or_path,
        rows={trained_on: len(data["train"])},
        datasets=[dataset] if dataset else [],
        results=results,
        is_pair=len(getattr(arguments, "text_columns", ())) > 1,
    )
    write_card(folder or training.output_dir, facts, model)
