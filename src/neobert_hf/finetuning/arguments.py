"""Arguments of the commands that fine-tune: files, columns, and the length of texts. The readers need no transformers."""

# ruff: noqa: RUF009  (HfArg returns a field)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers.hf_argparser import HfArg

from ..data.lengths import DEFAULT_LENGTH, Truncation
from .predictions import check_predictions_file

Kind = Literal["auto", "single_label_classification", "multi_label_classification", "regression"]


@dataclass
class LabelledDataArguments:
    """Data."""

    train_file: str = HfArg(default=None, help=".csv, .tsv, .jsonl, .json or .parquet; of words also CoNLL.")
    validation_file: str = HfArg(
        default=None,
        help="The same for evaluation. Default: a tenth of the training rows; a classifier trains on all of few rows.",
    )
    test_file: str = HfArg(default=None, help="The same for predictions; labels may be missing.")
    predictions_file: str = HfArg(default=None, help=".csv, .jsonl or .parquet. Default: in --output_dir.")
    overwrite: bool = HfArg(default=False, help="Replace predictions and results of an earlier command.")
    dataset_name: str = HfArg(default=None, help="Dataset of the Hub, instead of files for training.")
    dataset_config: str = HfArg(default=None, help="Configuration of the dataset.")
    column_names: list[str] = HfArg(default=None, help="All columns of .csv or .tsv files without a line of names.")
    max_seq_length: int = HfArg(
        default=DEFAULT_LENGTH, help="Length in tokens at which texts are truncated, or of a window."
    )
    max_train_rows: int = HfArg(default=None, help="Train on this number of rows, drawn at random.")
    skip_bad_rows: bool = HfArg(default=False, help="Leave out rows with a fault, and say how many.")

    def __post_init__(self):
        if not self.has_training and not self.test_file:
            raise ValueError("give train_file or dataset_name to train, or test_file alone to predict")
        if self.train_file and self.dataset_name:
            raise ValueError("give exactly one of train_file and dataset_name")
        if self.predictions_file:  # before anything is trained
            if not self.test_file:
                raise ValueError("predictions_file belongs to test_file; give the rows to predict")
            read = (self.train_file, self.validation_file, self.test_file)
            check_predictions_file(Path(self.predictions_file), self.overwrite, read)

    @property
    def has_training(self) -> bool:
        """Whether there are rows to train on; otherwise a script predicts only."""
        return bool(self.train_file or self.dataset_name)


@dataclass
class LabelledTextArguments(LabelledDataArguments):
    """Data."""

    text_columns: list[str] = HfArg(default_factory=lambda: ["text"], help="One or two columns of text.")
    label_column: str = HfArg(default="label", help="Column of the class, the list of classes, or the number.")
    label_columns: list[str] = HfArg(default=None, help="Columns of 0 and 1, one for each class, instead.")
    label_separator: str = HfArg(default=None, help="What separates the classes in --label_column, such as ';'.")
    truncation: Truncation = HfArg(
        default="warn", help="Texts above max_seq_length: warn, error (refuse them), or off."
    )
    problem_type: Kind = HfArg(default="auto", help="auto: by the labels of the training rows.")

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= len(self.text_columns) <= 2:
            raise ValueError(f"text_columns={' '.join(self.text_columns)}; name one or two")


@dataclass
class TaggedWordArguments(LabelledDataArguments):
    """Data."""

    word_column: str = HfArg(default=None, help="Default: words or tokens. Of CoNLL a number; default: 1.")
    tag_column: str = HfArg(default=None, help="Default: tags or ner_tags. Of CoNLL a number; default: the last.")
