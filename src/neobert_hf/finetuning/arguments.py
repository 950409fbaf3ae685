"""Arguments of the commands that fine-tune: files, columns, and the length of texts. The readers need no transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from neobert_cli.parser import option

from ..data.lengths import DEFAULT_LENGTH, Truncation
from .predictions import check_predictions_file

Kind = Literal["auto", "single_label_classification", "multi_label_classification", "regression"]


@dataclass
class LabelledDataArguments:
    """Data."""

    train_file: str = option(".csv, .tsv, .jsonl, .json or .parquet; of words also CoNLL.")
    validation_file: str = option(
        "The same for evaluation. Default: a tenth of the training rows; a classifier trains on all of few rows."
    )
    test_file: str = option("The same for predictions; labels may be missing.")
    predictions_file: str = option(".csv, .jsonl or .parquet. Default: in --output_dir.")
    overwrite: bool = option("Replace predictions and results of an earlier command.", False)
    dataset_name: str = option("Dataset of the Hub, instead of files for training.")
    dataset_config: str = option("Configuration of the dataset.")
    column_names: list[str] = option("All columns of .csv or .tsv files without a line of names.")
    max_seq_length: int = option("Length in tokens at which texts are truncated, or of a window.", DEFAULT_LENGTH)
    max_train_rows: int = option("Train on this number of rows, drawn at random.")
    skip_bad_rows: bool = option("Leave out rows with a fault, and say how many.", False)

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

    text_columns: list[str] = option("One or two columns of text.", ["text"])
    label_column: str = option("Column of the class, the list of classes, or the number.", "label")
    label_columns: list[str] = option("Columns of 0 and 1, one for each class, instead.")
    label_separator: str = option("What separates the classes in --label_column, such as ';'.")
    truncation: Truncation = option("Texts above max_seq_length: warn, error (refuse them), or off.", "warn")
    problem_type: Kind = option("auto: by the labels of the training rows.", "auto")

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= len(self.text_columns) <= 2:
            raise ValueError(f"text_columns={' '.join(self.text_columns)}; name one or two")


@dataclass
class TaggedWordArguments(LabelledDataArguments):
    """Data."""

    word_column: str = option("Default: words or tokens. Of CoNLL a number; default: 1.")
    tag_column: str = option("Default: tags or ner_tags. Of CoNLL a number; default: the last.")
