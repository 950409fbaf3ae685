"""Rows with labels from files or the Hub, as plain lists: all faults in one message, and a tenth of the rows held out."""

# ruff: noqa: RUF009  (HfArg returns a field)

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, load_dataset
from transformers.hf_argparser import HfArg

from ..files.rows import Faults, checked_text, read_rows
from ..files.texts import printable
from .predictions import PREDICTION_COLUMNS, PREDICTION_FORMATS

SHOWN = 10  # rows or labels in a message
FEW_ROWS = 5  # a class with fewer training rows is reported


@dataclass
class LabelledDataArguments:
    """Data."""

    train_file: str = HfArg(default=None, help=".csv, .tsv, .jsonl, .json or .parquet; of words also CoNLL.")
    validation_file: str = HfArg(default=None, help="The same for evaluation. Default: a tenth of the training rows.")
    test_file: str = HfArg(default=None, help="The same for predictions; labels may be missing.")
    predictions_file: str = HfArg(default=None, help=".csv, .jsonl or .parquet. Default: in --output_dir.")
    dataset_name: str = HfArg(default=None, help="Dataset of the Hub, instead of files for training.")
    dataset_config: str = HfArg(default=None, help="Configuration of the dataset.")
    column_names: list[str] = HfArg(default=None, help="Columns of .csv or .tsv files whose first line is a row.")
    max_seq_length: int = HfArg(default=512, help="Length in tokens at which texts are truncated, or of a window.")
    max_train_rows: int = HfArg(default=None, help="Train on this number of rows, drawn at random.")
    skip_bad_rows: bool = HfArg(default=False, help="Leave out rows with a fault, and say how many.")

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
            formats = ", ".join(PREDICTION_FORMATS)
            raise ValueError(f"predictions_file={self.predictions_file} has none of the suffixes {formats}; choose one")
        if self.max_train_rows is not None and self.max_train_rows < 2:
            raise ValueError(f"max_train_rows={self.max_train_rows}; give 2 or more")

    @property
    def has_training(self) -> bool:
        """Whether there are rows to train on; otherwise a script predicts only."""
        return bool(self.train_file or self.dataset_name)


@dataclass
class LabelledRows:
    """What a reader returns: lists in the order of the arguments of `fit`, such as (texts, labels).

    Args:
        train: None without training rows.
        validation: None without training rows.
        test: The last item, the labels, is None if the test rows have none.
        test_rows: All columns of the test rows, unchanged.
        names: Name of the file or the dataset of each split.
        dataset: Id on the Hub, if the training rows are from there.
        dataset_config: Its configuration.
        classes: Names of the classes.
        problem_type: Kind of the labels of texts, as in the config of a model.
    """

    train: tuple | None
    validation: tuple | None
    test: tuple | None
    test_rows: list[dict]
    names: dict[str, str]
    dataset: str | None
    dataset_config: str | None = None
    classes: list[str] | None = None
    problem_type: str | None = None


@dataclass
class Row:
    """A row that has passed its check.

    Args:
        place: Where it stands, such as "a.csv, line 3".
        values: What `fit` takes of it; the last one is the label, or None.
        original: All of its columns, unchanged.
    """

    place: str
    values: list
    original: dict

    @property
    def labels(self) -> list:
        """Its labels as a list, also if it has one or none."""
        label = self.values[-1]
        return label if isinstance(label, list) else [] if label is None else [label]


class MissingColumn(ValueError):
    """A row has no such column; if it is the first row of its file, no row has it."""


def read_splits(
    arguments: LabelledDataArguments,
    check: Callable[[dict, bool], list],
    label_columns: Sequence[str],
    seed: int,
    read: Callable[[str, Faults], Iterable[tuple[str, Any]]] | None = None,
) -> tuple[dict[str, list[Row]], list[str] | None]:
    """Read and check the rows of all files, or of a dataset of the Hub.

    Args:
        arguments: Where the rows are.
        check: Function from a row, and whether it must have a label, to its values; its ValueError is the fault of the row. Test
            rows must have labels if one of them has something in one of the `label_columns`.
        label_columns: Columns of labels.
        seed: Seed of the choice of `max_train_rows`.
        read: Function from a file and a list of faults to places and rows; None takes `read_rows`.

    Returns:
        Rows by split, and the names of the classes in the order of a ClassLabel of the Hub, or None.

    Raises:
        ValueError: Rows have faults; one message has the first ten with file and line. Or a split has too few rows.
        OSError: A file cannot be read.
    """
    faults: Faults = []
    found, hub_names = _hub_rows(arguments, label_columns) if arguments.dataset_name else ({}, None)
    files = {split: getattr(arguments, f"{split}_file") for split in ("train", "validation", "test")}
    for split, file in files.items():
        if file:
            rows = read(file, faults) if read else read_rows(file, column_names=arguments.column_names, faults=faults)
            found[split] = list(rows)
    splits = {split: _checked(rows, split == "test", check, label_columns, faults) for split, rows in found.items()}
    _judge(faults, sum(map(len, splits.values())), arguments.skip_bad_rows)
    for split, rows in splits.items():
        if len(rows) < (needed := 1 if split == "test" else 2):
            name = files[split] or arguments.dataset_name
            raise ValueError(f"{name}: {len(rows)} {split} rows; give at least {needed}")
    wanted = arguments.max_train_rows
    if "train" in splits and wanted and wanted < len(splits["train"]):
        chosen = np.random.default_rng(seed).choice(len(splits["train"]), wanted, replace=False)
        splits["train"] = [splits["train"][i] for i in sorted(chosen)]
    return splits, hub_names


def _checked(
    found: list[tuple[str, Any]], is_test: bool, check: Callable, label_columns: Sequence[str], faults: Faults
) -> list[Row]:
    values = (row.get(name) for _, row in found if isinstance(row, dict) for name in label_columns)
    has_labels = not is_test or any(value is not None and str(value).strip() for value in values)
    rows = []
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


def _judge(faults: Faults, num_good: int, skip: bool) -> None:
    if not faults:
        return
    shown = "; ".join(f"{place}: {reason}" for place, reason in faults[:SHOWN]) + ("; ..." if faults[SHOWN:] else "")
    count = f"{len(faults)} of {len(faults) + num_good} rows"
    if not skip:
        verb = "has a fault" if len(faults) == 1 else "have faults"
        raise ValueError(f"{count} {verb}: {shown}; correct or remove them, or leave them out by --skip_bad_rows")
    print(printable(f"left out {count}: {shown}"), flush=True)


def _hub_rows(arguments: LabelledDataArguments, label_columns: Sequence[str]) -> tuple[dict, list[str] | None]:
    """Places and rows of the splits of a dataset, and the names of its classes."""
    data = load_dataset(arguments.dataset_name, arguments.dataset_config)
    if "train" not in data:
        raise ValueError(
            f"{arguments.dataset_name} has the splits {', '.join(data)} and no train; give its rows as files"
        )
    features = data["train"].features
    label_column = next((name for name in label_columns if name in features), label_columns[0])
    feature = features.get(label_column)
    feature = getattr(feature, "feature", feature)  # of a list
    names = feature.names if isinstance(feature, ClassLabel) else None

    def named(label: Any) -> Any:
        if isinstance(label, list):
            return [named(one) for one in label]
        return names[label] if label is not None and label >= 0 else None  # -1 stands for no label

    def rows(split: str) -> list[tuple[str, dict]]:
        numbered = enumerate(data[split])
        if names:
            numbered = ((number, {**row, label_column: named(row[label_column])}) for number, row in numbered)
        return [(f"{split}, row {number}", row) for number, row in numbered]

    return {split: rows(split) for split in ("train", "validation") if split in data}, names


def column(row: dict, *names: str, remedy: str) -> Any:
    """Return the first of some columns that a row has; `remedy` ends the message of the error.

    Raises:
        MissingColumn: The row has none of them.
    """
    for name in names:
        if name in row:
            return row[name]
    raise MissingColumn(f"no column {' or '.join(map(repr, names))} among {', '.join(row)}; {remedy}")


def check_filled(texts: dict[str, Any]) -> None:
    """Raise ValueError if one of the texts is not a string or has no visible character; the keys name them."""
    for name, text in texts.items():
        if not checked_text(text, repr(name), is_strict=True).strip():
            raise ValueError(f"{name!r} is empty")


def as_list(value: Any) -> Any:
    """Return a tuple or an array as a list, and any other value as it is."""
    return list(value) if isinstance(value, tuple | np.ndarray) else value


def given_names(classes: Iterable[Any] | None) -> list[str]:
    """Return the names of classes that a user gives, as texts; none for None.

    Raises:
        ValueError: A name is given twice, or is neither a string nor a number.
    """
    names = [label_text(name) for name in (() if classes is None else classes)]
    if len({*names}) < len(names):
        raise ValueError(f"classes={names!r:.80} has a name twice; give each class once")
    return names


def label_text(value: Any) -> str:
    """Return a label as a text.

    Raises:
        ValueError: It is missing, or neither a string nor a number.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if (
        value is None or value != value or (isinstance(value, str) and not value.strip())
    ):  # pandas writes NaN to Parquet
        raise ValueError("the label is missing")
    if not isinstance(value, str | int | float):
        raise ValueError(f"the label {value!r:.80} is a {type(value).__name__}, not a string or a number")
    return str(value)


def class_names(labels: Sequence[str], names: Sequence[str] | None = None, hint: str = "") -> list[str]:
    """Return the given names of the classes, or the different labels, numbers before texts; a line names rare classes.

    Args:
        labels: Labels of all training rows.
        names: Names of the classes, if they are known.
        hint: What to do about a label for almost every row, for the message.

    Raises:
        ValueError: There is one label only, or more than half as many as rows.
    """
    counts = dict.fromkeys(names or (), 0) | Counter(labels)
    if not names:
        names = sorted(counts, key=_number_or_text)
        if len(names) > max(2, len(labels) / 2):
            shown = f"{len(names)} classes for {len(labels)} labels, such as {names[0]!r} and {names[-1]!r}"
            raise ValueError(f"{shown}; a class needs several rows; {hint}")
        if len(names) < 2:
            raise ValueError(f"all training rows have the label {names[0]!r}; a classifier needs at least two classes")
    if few := [f"{name} ({counts[name]})" for name in counts if counts[name] < FEW_ROWS]:
        line = f"warning: classes with fewer than {FEW_ROWS} training rows, hard to learn: {_first_of(few)}"
        print(printable(line), flush=True)
    return list(names)


def _number_or_text(label: str) -> tuple:
    return (0, int(label), label) if label.removeprefix("-").isdecimal() else (1, 0, label)


def _first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def check_known(rows: Iterable[tuple[str, Iterable[str]]], names: Sequence[str]) -> None:
    """Raise ValueError if a row has a label that is not one of the names; the rows are places and labels."""
    known = set(names)
    for place, labels in rows:
        if unknown := [label for label in labels if label not in known]:
            raise ValueError(f"{place}: the label {unknown[0]!r} is in no training row; they have {_first_of(names)}")


def hold_out(splits: dict[str, list[Row]], seed: int, keep_rare: bool = True) -> None:
    """Move a tenth of the training rows to `validation`, if there is no such split.

    The rows are sorted by their labels, at random within a label, and every tenth is held out. So each class, and each range of
    numbers, has its share in both parts, to within one row.

    Args:
        splits: Rows by split.
        seed: Seed of the choice.
        keep_rare: A row with a label that no other row has stays in training. False for numbers, which are rarely equal.
    """
    if "train" not in splits or "validation" in splits:
        return
    rows = splits["train"]
    counts = Counter(label for row in rows for label in set(row.labels)) if keep_rare else {}
    shuffled = np.random.default_rng(seed).permutation(len(rows))
    order = [i for i in shuffled if not any(counts.get(label) == 1 for label in rows[i].labels)]
    order = sorted(order or range(len(rows)), key=lambda i: rows[i].labels)
    held_out = set(order[min(5, len(order) // 2) :: 10])
    splits["train"] = [row for i, row in enumerate(rows) if i not in held_out]
    splits["validation"] = [row for i, row in enumerate(rows) if i in held_out]


def as_lists(arguments: LabelledDataArguments, splits: dict[str, list[Row]], **more) -> LabelledRows:
    """Return the rows of all splits as plain lists; `more` are further fields of `LabelledRows`."""

    def lists(split: str) -> tuple | None:
        columns = list(map(list, zip(*(row.values for row in splits.get(split, ())))))
        if columns and columns[-1][0] is None:
            columns[-1] = None
        return tuple(columns) or None

    hub = arguments.dataset_name
    hub = None if hub and Path(hub).exists() else hub  # a folder of rows is a dataset too
    trained_on = hub or Path(arguments.train_file or arguments.dataset_name or "").name
    names = {"train": trained_on, "validation": Path(arguments.validation_file or "").name or trained_on}
    names["test"] = Path(arguments.test_file or "").name
    parts = [lists(split) for split in ("train", "validation", "test")]
    return LabelledRows(
        *parts, [row.original for row in splits.get("test", ())], names, hub, arguments.dataset_config, **more
    )
