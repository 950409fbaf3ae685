"""Rows with labels from files or the Hub: checked, with all faults in one message, and a tenth of them held out.

A job reads its rows in three steps: `read_splits` with a check of one row, `with_validation`, and its own encoding of the labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import ClassLabel, load_dataset

from ..files.rows import Faults, checked_text, read_rows
from ..files.texts import check_leaves_tokens

PREDICTION_FORMATS = (".csv", ".jsonl", ".parquet")
SHOWN = 10  # rows or labels in a message
PREDICTION_COLUMNS = ("prediction", "probability")  # which the file of the predictions gets
FEW_ROWS = 5  # a class with fewer training rows is reported


@dataclass
class LabelledDataArguments:
    """Data."""

    train_file: str = field(
        default=None, metadata={"help": ".csv, .tsv, .jsonl, .json or .parquet with labels, compressed or not."}
    )
    validation_file: str = field(
        default=None,
        metadata={"help": "The same for evaluation. Default: a tenth of the training rows, of each class."},
    )
    test_file: str = field(
        default=None,
        metadata={"help": "The same for predictions, also without labels. Without training rows, nothing is trained."},
    )
    predictions_file: str = field(
        default=None,
        metadata={
            "help": "File of the predictions for --test_file: .csv, .jsonl or .parquet. Default: in --output_dir."
        },
    )
    dataset_name: str = field(
        default=None,
        metadata={"help": "Dataset of the Hub, instead of files; validation as above if it has no such split."},
    )
    dataset_config: str = field(default=None, metadata={"help": "Configuration of the dataset."})
    column_names: list[str] = field(
        default=None,
        metadata={
            "help": "Names of the columns of .csv and .tsv files whose first line is a row; further columns are left out."
        },
    )
    max_seq_length: int = field(default=512, metadata={"help": "Length in tokens at which texts are truncated."})
    max_train_rows: int = field(default=None, metadata={"help": "Train on this number of rows, drawn at random."})
    skip_bad_rows: bool = field(default=False, metadata={"help": "Leave out rows with a fault, and say how many."})

    def __post_init__(self):
        if not self.has_training and not self.test_file:
            raise ValueError("give --train_file or --dataset_name to train, or --test_file alone to predict")
        if self.train_file and self.dataset_name:
            raise ValueError("give exactly one of --train_file and --dataset_name")
        if self.validation_file and not self.train_file:
            raise ValueError("--validation_file belongs to --train_file; a dataset has its own validation rows")
        if self.predictions_file and not self.test_file:
            raise ValueError("--predictions_file belongs to --test_file; give the rows to predict")
        if self.predictions_file and Path(self.predictions_file).suffix not in PREDICTION_FORMATS:
            raise ValueError(
                f"predictions_file={self.predictions_file} has none of the suffixes {', '.join(PREDICTION_FORMATS)}; choose one"
            )
        if self.max_train_rows is not None and self.max_train_rows < 2:
            raise ValueError(f"max_train_rows={self.max_train_rows}; give 2 or more")
        check_leaves_tokens(self.max_seq_length)

    @property
    def has_training(self) -> bool:
        """Whether there are rows to train on; otherwise a script evaluates and predicts only."""
        return bool(self.train_file or self.dataset_name)


class Row(NamedTuple):
    """A row that has passed its check.

    Args:
        place: Where it stands, such as "a.csv, line 3".
        values: What the check returned.
        original: All of its columns, unchanged.
    """

    place: str
    values: dict
    original: dict


class MissingColumn(ValueError):
    """A row has no such column; if it is the first row of its file, no row has it."""


def read_splits(
    arguments: LabelledDataArguments,
    check: Callable[[dict, bool], dict],
    label_columns: Sequence[str],
    seed: int,
    read: Callable[[str, Faults], Iterable[tuple[str, Any]]] | None = None,
) -> tuple[dict[str, list[Row]], list[str] | None]:
    """Read and check the rows of all files, or of a dataset of the Hub.

    Args:
        arguments: Where the rows are, how many of the training rows are kept, and whether bad rows are left out.
        check: Function from a row, and whether it must have labels, to the values that the job needs. Its ValueError is the
            fault of the row, without file and line. Training and validation rows must have labels; test rows must if one of them
            has something in one of the `label_columns`.
        label_columns: Columns of labels.
        seed: Seed of the choice of training rows.
        read: Function from a file and a list of faults to places and rows, which adds the rows that it cannot read to the
            list; None takes `read_rows`.

    Returns:
        Rows by split: `train`, and `validation` and `test` where they are given. And the names of the classes in the order of a
        ClassLabel of the Hub, or None.

    Raises:
        ValueError: Rows have faults; one message has the first ten with file and line. Or a split has too few rows.
        OSError: A file cannot be read.
    """

    def read_file(file: str, faults: Faults) -> Iterable[tuple[str, Any]]:
        return read_rows(file, column_names=arguments.column_names, faults=faults)

    names, sources = None, {}
    if arguments.dataset_name:
        sources, names = _hub_sources(arguments, label_columns)
    files = {name: getattr(arguments, f"{name}_file") for name in ("train", "validation", "test")}
    sources |= {name: (file, read or read_file) for name, file in files.items() if file}
    faults: Faults = []
    splits = {name: _checked(*source, name == "test", check, label_columns, faults) for name, source in sources.items()}
    _judge_faults(faults, sum(map(len, splits.values())), arguments.skip_bad_rows)
    for name, rows in splits.items():
        needed = 1 if name == "test" else 2
        if len(rows) < needed:
            kind = {"train": "training"}.get(name, name)
            raise ValueError(f"{sources[name][0]}: {len(rows)} {kind} rows; give at least {('one', 'two')[needed - 1]}")
    wanted = arguments.max_train_rows
    if "train" in splits and wanted and wanted < len(splits["train"]):
        chosen = np.random.default_rng(seed).choice(len(splits["train"]), wanted, replace=False)
        splits["train"] = [splits["train"][i] for i in sorted(chosen)]
    return splits, names


def _checked(
    source: str, read: Callable, is_test: bool, check: Callable, label_columns: Sequence[str], faults: Faults
) -> list[Row]:
    rows, found = [], list(read(source, faults))
    has_labels = not is_test or any(_has_label(row, label_columns) for _, row in found)
    for number, (place, row) in enumerate(found):
        try:
            if not isinstance(row, dict):
                raise ValueError(
                    f"the row is a {type(row).__name__}, not an object; write one JSON object on each line"
                )
            if is_test and (taken := [name for name in PREDICTION_COLUMNS if name in row]):
                raise MissingColumn(f"the column {taken[0]!r} has the name of what is predicted; rename it")
            rows.append(Row(place, check(row, has_labels), row))
        except ValueError as error:
            if number == 0 and isinstance(error, MissingColumn):
                raise ValueError(f"{place}: {error}") from error
            faults.append((place, str(error)))
    return rows


def _has_label(row: Any, columns: Sequence[str]) -> bool:
    values = [row[name] for name in columns if name in row] if isinstance(row, dict) else []
    return any(value is not None and str(value).strip() for value in values)


def _judge_faults(faults: Faults, num_good: int, skip: bool) -> None:
    if not faults:
        return
    shown = "; ".join(f"{place}: {reason}" for place, reason in faults[:SHOWN]) + ("; ..." if faults[SHOWN:] else "")
    count = f"{len(faults)} of {len(faults) + num_good} rows"
    if not skip:
        verb = "has a fault" if len(faults) == 1 else "have faults"
        raise ValueError(f"{count} {verb}: {shown}; correct or remove them, or leave them out by --skip_bad_rows")
    print(f"left out {count}: {shown}", flush=True)


def _hub_sources(
    arguments: LabelledDataArguments, label_columns: Sequence[str]
) -> tuple[dict[str, tuple[str, Callable]], list[str] | None]:
    """Sources of the splits of a dataset, and the names of its classes."""
    try:
        data = load_dataset(arguments.dataset_name, arguments.dataset_config)
    except RuntimeError as error:  # a dataset that is a script
        raise ValueError(
            f"{arguments.dataset_name} cannot be loaded ({error}); choose a copy of it in Parquet, or give its rows as files"
        ) from error
    if "train" not in data:
        raise ValueError(
            f"{arguments.dataset_name} has the splits {', '.join(data)} and no train; save its rows as files, and give them "
            "with --train_file and --validation_file"
        )
    features = data["train"].features
    label_column = next((name for name in label_columns if name in features), label_columns[0])
    feature = features.get(label_column)
    feature = getattr(feature, "feature", feature)  # of a list
    names = feature.names if isinstance(feature, ClassLabel) else None

    def named(label):
        if isinstance(label, list):
            return [named(one) for one in label]
        return names[label] if label is not None and 0 <= label < len(names) else None

    def read(split: str, _: Faults) -> Iterator[tuple[str, dict]]:
        for number, row in enumerate(data[split]):
            yield f"{split}, row {number}", row if names is None else {**row, label_column: named(row[label_column])}

    return {split: (split, read) for split in ("train", "validation") if split in data}, names


def column(row: dict, name: str) -> Any:
    """Return a column of a row.

    Raises:
        MissingColumn: The row has no such column.
    """
    if name not in row:
        raise MissingColumn(f"no column {name!r} among {', '.join(row)}; name the columns of texts and labels")
    return row[name]


def check_filled(texts: dict[str, Any]) -> None:
    """Raise ValueError if one of the texts is not a string or has no visible character; the keys name them."""
    for name, text in texts.items():
        if not checked_text(text, repr(name), is_strict=True).strip():
            raise ValueError(f"{name!r} is empty")


def label_text(value: Any) -> str:
    """Return a label as a text.

    Raises:
        ValueError: It is missing, or neither a string nor a number.
    """
    if (
        value is None or value != value or (isinstance(value, str) and not value.strip())
    ):  # pandas writes NaN to Parquet
        raise ValueError("the label is missing")
    if not isinstance(value, str | int | float):
        raise ValueError(f"the label {value!r:.80} is a {type(value).__name__}, not a string or a number")
    return str(value)


def class_names(
    labels: Iterable[str], hint: str = "to predict numbers, give finetune_classifier.py --problem_type regression"
) -> list[str]:
    """Return the different labels, numbers before texts, in order; a line names classes with few rows.

    Args:
        labels: Labels of all training rows.
        hint: What to do about a label for almost every row, for the message.

    Raises:
        ValueError: There is one label only, or more than half as many as rows.
    """
    counts = Counter(labels)
    names = sorted(counts, key=_number_or_text)
    if len(names) > max(2, counts.total() / 2):
        raise ValueError(
            f"{len(names)} classes for {counts.total()} labels, such as {names[0]!r} and {names[-1]!r}; a class needs several "
            f"rows; {hint}"
        )
    if len(names) < 2:
        raise ValueError(f"all training rows have the label {names[0]!r}; a classifier needs at least two classes")
    report_few_rows(counts)
    return names


def report_few_rows(counts: Counter[str]) -> None:
    """Print the classes that have too few training rows to be learned."""
    few = [f"{name} ({counts[name]})" for name in counts if counts[name] < FEW_ROWS]
    if few:
        print(f"warning: classes with fewer than {FEW_ROWS} training rows, hard to learn: {first_of(few)}", flush=True)


def _number_or_text(label: str) -> tuple:
    return (0, int(label), label) if label.removeprefix("-").isdecimal() else (1, 0, label)


def first_of(names: Sequence[str]) -> str:
    """Return the first ten names, for a message."""
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def check_known(rows: Iterable[Row], labels: Callable[[Row], Iterable[str]], names: Sequence[str]) -> None:
    """Raise ValueError with file and line if a row has a label that is not one of the names."""
    known = set(names)
    for row in rows:
        if unknown := [label for label in labels(row) if label not in known]:
            raise ValueError(
                f"{row.place}: the label {unknown[0]!r} is in no training row; they have {first_of(names)}"
            )


def with_validation(
    splits: dict[str, list[Row]], labels: Callable[[Row], Sequence], seed: int, keep_rare: bool = True
) -> dict[str, list[Row]]:
    """Hold out a tenth of the training rows if there are no others for validation.

    The rows are sorted by their labels, at random within a label, and every tenth is held out. So each class, and each range of
    numbers, has its share in both parts, to within one row.

    Args:
        splits: Rows by split.
        labels: Function from a row to its labels.
        seed: Seed of the choice.
        keep_rare: A row with a label that no other row has stays in training. False for numbers, which are rarely equal.
    """
    if "train" not in splits or "validation" in splits:
        return splits
    rows = splits["train"]
    every = [list(labels(row)) for row in rows]
    counts = Counter(label for of_row in every for label in set(of_row)) if keep_rare else {}
    order = [
        i for i in np.random.default_rng(seed).permutation(len(rows)) if not any(counts.get(x) == 1 for x in every[i])
    ]
    order = sorted(order or range(len(rows)), key=lambda i: every[i])
    held_out = set(order[min(5, len(order) // 2) :: 10])
    kept = [row for i, row in enumerate(rows) if i not in held_out]
    return {**splits, "train": kept, "validation": [row for i, row in enumerate(rows) if i in held_out]}
