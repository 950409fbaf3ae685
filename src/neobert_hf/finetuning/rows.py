"""Rows with labels from files or the Hub, as plain lists: all faults in one message, and a tenth of the rows held out."""

# ruff: noqa: RUF009  (HfArg returns a field)

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
from datasets import ClassLabel, load_dataset
from transformers.hf_argparser import HfArg

from ..data.rows import SHOWN, Fault, Faults, Rows, checked_text, read_rows, trimmed
from ..files import messages
from ..files.output import check_file, check_is_no_input
from .predictions import PREDICTION_COLUMNS, PREDICTION_FORMATS

EXAMPLE_CHARACTERS = 300
FEW_ROWS = 5  # a class with fewer training rows is reported


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
    max_seq_length: int = HfArg(default=512, help="Length in tokens at which texts are truncated, or of a window.")
    max_train_rows: int = HfArg(default=None, help="Train on this number of rows, drawn at random.")
    skip_bad_rows: bool = HfArg(default=False, help="Leave out rows with a fault, and say how many.")

    def __post_init__(self):
        if not self.has_training and not self.test_file:
            raise ValueError("give train_file or dataset_name to train, or test_file alone to predict")
        if self.train_file and self.dataset_name:
            raise ValueError("give exactly one of train_file and dataset_name")
        if self.validation_file and not self.train_file:
            raise ValueError("validation_file belongs to train_file; a dataset has its own validation rows")
        if self.predictions_file and not self.test_file:
            raise ValueError("predictions_file belongs to test_file; give the rows to predict")
        if self.predictions_file and Path(self.predictions_file).suffix not in PREDICTION_FORMATS:
            formats = ", ".join(PREDICTION_FORMATS)
            raise ValueError(f"predictions_file={self.predictions_file} has none of the suffixes {formats}; choose one")
        if self.predictions_file:  # before anything is trained
            read = (self.train_file, self.validation_file, self.test_file)
            check_is_no_input(Path(self.predictions_file), read)
            check_file(Path(self.predictions_file), self.overwrite)
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
        test: Only rows with a text. The last item, the labels, is None if the test rows have none; a single label is None if it
            is missing or does not count.
        test_rows: All columns of all test rows, unchanged.
        names: Name of the file or the dataset of each split.
        dataset: Id on the Hub, if the training rows are from there.
        dataset_config: Its configuration.
        classes: Names of the classes.
        problem_type: Kind of the labels of texts, as in the config of a model.
        test_places: For each row of `test`, its place in `test_rows`.
        test_faults: Places and reasons of the test rows whose label does not count.
        is_held_out: Whether the validation rows are training rows that the reader held out.
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
    test_places: list[int] = field(default_factory=list)
    test_faults: list[tuple[str, str]] = field(default_factory=list)
    is_held_out: bool = False

    @property
    def example(self) -> list[str] | None:
        """The texts of the first validation or test row for a card, cut to some characters; None without such rows."""
        if not (rows := self.validation or self.test):
            return None
        inputs, longest = [column[0] for column in rows[:-1]], EXAMPLE_CHARACTERS
        parts = inputs[0] if isinstance(inputs[0], tuple) else inputs
        texts = [" ".join(text if isinstance(text, list) else text.split()) for text in parts]
        return [text if len(text) <= longest else f"{text[:longest].rstrip()} ..." for text in texts]

    def with_empty(self, predictions: list[dict]) -> list[dict]:
        """Return a row for each test row in their order: of the predictions, or with empty columns where it has no text."""
        added = [name for name in predictions[0] if name not in self.test_rows[self.test_places[0]]]
        rows = [row | dict.fromkeys(added) for row in self.test_rows]
        for place, row in zip(self.test_places, predictions):
            rows[place] = row
        return rows

    def not_counted(self, num_counted: int) -> str:
        """Return a line about test rows without a prediction or outside the metrics; empty if there is none."""
        num_rows, num_texts, num_faults = len(self.test_rows), len(self.test_places), len(self.test_faults)
        has_labels = num_counted + num_faults > 0
        first: dict[str, str] = {}
        for place, reason in self.test_faults:
            first.setdefault(reason, f"{place}: {reason}")
        reasons = _first_of([*first.values()], "; ")
        counts = {
            "no text and an empty prediction": num_rows - num_texts,
            "no label": num_texts - num_counted - num_faults if has_labels else 0,
            f"a label that does not count ({reasons})": num_faults,
        }
        parts = [f"{number} {'has' if number == 1 else 'have'} {what}" for what, number in counts.items() if number]
        over = f"; the metrics are over {num_counted} row{'s' * (num_counted > 1)}" if num_counted else ""
        metrics = (over or "; there are no metrics") if has_labels else ""
        return f"test: of {num_rows} rows, {', '.join(parts)}{metrics}" if parts else ""


# A row after its check: its place, such as "a.csv, line 3", all of its columns, what `fit` takes of it (None without a text), and
# its label: None if it is missing, and an error if it does not count. Only test rows lack them.
Row = tuple[str, dict, list | None, Any]


class Missing(ValueError):
    """A row has no text, or no label; a test row may lack both."""


@dataclass
class Columns:
    """What a reader takes of a row.

    Args:
        texts: Columns of texts: the names that each may have, and what to do if no row has it.
        labels: The same of labels.
        check: Function from a row to its inputs. `Missing` says that it has no text, another ValueError is its fault.
        check_label: Function from a row and its inputs to the label, with the same errors.
    """

    texts: dict[tuple, str]
    labels: dict[tuple, str]
    check: Callable[[dict], list]
    check_label: Callable[[dict, list], Any]


def read_splits(
    arguments: LabelledDataArguments, columns: Columns, seed: int, read: Callable[[str, Faults], Rows] | None = None
) -> tuple[dict[str, list[Row]], list[str]]:
    """Read and check the rows of all files, or of a dataset of the Hub.

    A test row without a text, without a label, or with a label that does not count keeps its place. In the other splits each is a
    fault.

    Args:
        arguments: Where the rows are.
        columns: What their columns mean.
        seed: Seed of the choice of `max_train_rows`.
        read: Function from a file and a list of faults to places and rows; None takes `read_rows`.

    Returns:
        Rows by split, and the names of the classes in the order of a ClassLabel of the Hub; none without one.

    Raises:
        ValueError: Rows have faults; one message has the first ten with file and line. Or a split has too few rows, or no row has
            a column.
        OSError: A file cannot be read.
    """
    faults: Faults = []
    found, hub_names = _hub_rows(arguments, columns) if arguments.dataset_name else ({}, [])
    files = {split: getattr(arguments, f"{split}_file") for split in ("train", "validation", "test")}
    for split, file in files.items():
        if file:
            items = read(file, faults) if read else read_rows(file, column_names=arguments.column_names, faults=faults)
            found[split] = list(items)
    splits = {split: _checked(rows, split == "test", columns, faults) for split, rows in found.items()}
    _judge(faults, sum(map(len, splits.values())), arguments.skip_bad_rows)
    for split, rows in splits.items():
        if len(rows) < (needed := 1 if split == "test" else 2):
            name = files[split] or arguments.dataset_name
            raise ValueError(f"{name}: {len(rows)} {split} rows; give at least {needed}")
        if all(inputs is None for _, _, inputs, _ in rows):
            texts = " or ".join(map(repr, itertools.chain(*columns.texts)))
            raise ValueError(f"{rows[0][0]}: neither this row nor another one has a text in {texts}; name its column")
    wanted = arguments.max_train_rows
    if "train" in splits and wanted and wanted < len(splits["train"]):
        chosen = np.random.default_rng(seed).choice(len(splits["train"]), wanted, replace=False)
        splits["train"] = [splits["train"][i] for i in sorted(chosen)]
    return splits, hub_names


def _checked(found: list[tuple[str, Any]], is_test: bool, columns: Columns, faults: Faults) -> list[Row]:
    objects = [(place, row) for place, row in found if isinstance(row, dict)]
    labels = {name for names in columns.labels for name in names}
    has_labels = not is_test or any(not is_missing(row.get(name)) for _, row in objects for name in labels)
    names = dict.fromkeys(name for _, row in objects for name in row)
    for of_column, remedy in (columns.texts | (columns.labels if has_labels else {})).items():
        if objects and not names.keys() & {*of_column}:
            lacking = f"no column {' or '.join(map(repr, of_column))} among {', '.join(names)}"
            raise ValueError(f"{objects[0][0]}: {lacking}; {remedy}")
    if is_test and (taken := [name for name in names if name in PREDICTION_COLUMNS or name.startswith("probability_")]):
        raise ValueError(f"{objects[0][0]}: the column {taken[0]!r} has the name of what is predicted; rename it")
    rows = []
    for place, row in found:
        inputs = label = None
        try:
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise ValueError(f"the row is a {kind}, not an object; write one JSON object on each line")
            inputs = columns.check(row)
            label = columns.check_label(row, inputs) if has_labels else None
        except ValueError as error:
            is_missing_value = isinstance(error, Missing)
            if not is_test or (inputs is None and not is_missing_value):
                faults.append(Fault(place, str(error)))
                continue
            label = None if is_missing_value else error
        rows.append((place, row, inputs, label))
    return rows


def _judge(faults: Faults, num_good: int, skip: bool) -> None:
    if not faults:
        return
    shown = _first_of([f"{fault.place}: {fault.reason}" for fault in faults], "; ")
    count, num_lines = f"{len(faults)} of {len(faults) + num_good} rows", sum(fault.num_lines for fault in faults)
    count += f" ({num_lines} lines)" if num_lines > len(faults) else ""
    if not skip:
        verb = "has a fault" if len(faults) == 1 else "have faults"
        raise ValueError(f"{count} {verb}: {shown}; correct or remove them, or leave them out by skip_bad_rows")
    messages.say(f"left out {count}: {shown}")


def _hub_rows(arguments: LabelledDataArguments, columns: Columns) -> tuple[dict, list[str]]:
    """Places and rows of the splits of a dataset, and the names of its classes."""
    data = load_dataset(arguments.dataset_name, arguments.dataset_config)
    if "train" not in data:
        found = f"{arguments.dataset_name} has the splits {', '.join(data)}"
        raise ValueError(f"{found} and no train; give its rows as files")
    features = data["train"].features
    label_column = next((name for name in itertools.chain(*columns.labels) if name in features), None)
    feature = features.get(label_column)
    feature = getattr(feature, "feature", feature)  # of a list
    names = list(map(trimmed, feature.names)) if isinstance(feature, ClassLabel) else []

    def named(label: Any) -> Any:
        if isinstance(label, list):
            return [named(one) for one in label]
        return names[label] if label is not None and label >= 0 else None  # -1 stands for no label

    def rows(split: str) -> list[tuple[str, dict]]:
        more = ({label_column: named(label)} for label in data[split][label_column]) if names else itertools.repeat({})
        return [(f"{split}, row {number}", row | new) for number, (row, new) in enumerate(zip(data[split], more))]

    return {split: rows(split) for split in ("train", "validation") if split in data}, names


def column(row: dict, *names: str) -> Any:
    """Return the first of some columns that a row has.

    Raises:
        Missing: The row has none of them.
    """
    for name in names:
        if name in row:
            return row[name]
    raise Missing(f"this row has no {' or '.join(map(repr, names))}")


def filled(texts: dict[str, Any]) -> list[str]:
    """Return texts, of which one at least must have a visible character; None becomes an empty text.

    Args:
        texts: Texts by name.

    Raises:
        Missing: All of them are empty.
        ValueError: One of them is not a string.
    """
    found = [checked_text("" if text is None else text, repr(name), is_strict=True) for name, text in texts.items()]
    if not any(text.strip() for text in found):
        raise Missing(f"{' and '.join(map(repr, texts))} {'is' if len(texts) == 1 else 'are'} empty")
    return found


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


def is_missing(value: Any) -> bool:
    """Return whether a value is None, an empty text, or NaN, which pandas writes to Parquet."""
    if isinstance(value, str):
        return not trimmed(value)
    return value is None or (isinstance(value, float) and value != value)


def label_text(value: Any) -> str:
    """Return a label as a text without white space and invisible characters at its ends.

    Raises:
        Missing: It is missing.
        ValueError: It is neither a string nor a number.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if is_missing(value):
        raise Missing("the label is missing")
    if not isinstance(value, str | int | float):
        raise ValueError(f"the label {value!r:.80} is a {type(value).__name__}, not a string or a number")
    return trimmed(str(value))


def class_names(labels: Sequence[str], names: Sequence[str] | None = None, hint: str = "") -> list[str]:
    """Return the given names of the classes, or the different labels, numbers before texts.

    One line names classes that differ only by case or spaces, and one line rare classes.

    Args:
        labels: Labels of all training rows.
        names: Names of the classes, if they are known.
        hint: What to do about a label for almost every row, for the message.

    Raises:
        ValueError: There is one label only, or more than half as many as rows.
    """
    if not labels:
        raise ValueError("no training row has a class; name the column of the classes (label_column)")
    counts = dict.fromkeys(names or (), 0) | Counter(labels)
    if not names:
        names = sorted(counts, key=_number_or_text)
        if len(names) > max(2, len(labels) / 2):
            shown = f"{len(names)} classes for {len(labels)} labels, such as {names[0]!r} and {names[-1]!r}"
            raise ValueError(f"{shown}; a class needs several rows; {hint}")
        if len(names) < 2:
            raise ValueError(f"all training rows have the label {names[0]!r}; a classifier needs at least two classes")
    alike = defaultdict(list)
    for name in counts:
        alike[" ".join(normalize("NFC", name).casefold().split())].append(f"{name!r} ({counts[name]})")
    same = [" and ".join(group) for group in alike.values() if len(group) > 1]
    few = [f"{name} ({counts[name]})" for name in counts if counts[name] < FEW_ROWS]
    warn("classes that differ only by upper and lower case or spaces", same, "write each in one way in all rows")
    warn(f"classes with fewer than {FEW_ROWS} training rows, hard to learn", few)
    return list(names)


def warn(what: str, examples: Sequence[str], remedy: str = "") -> None:
    """Print one line about the training rows, with the first of the examples, if there are any."""
    if examples:
        messages.warn(f"{what}: {_first_of(examples)}{remedy and '; '}{remedy}")


def _number_or_text(label: str) -> tuple:
    return (0, int(label), label) if label.removeprefix("-").isdecimal() else (1, 0, label)


def _first_of(names: Sequence[str], separator: str = ", ") -> str:
    return separator.join([*names[:SHOWN], *(["..."] if len(names) > SHOWN else [])])


def check_known(labels: Iterable[str], names: Mapping[str, Any], place: str = "") -> None:
    """Raise ValueError, which begins with the place, if a label is not one of the names, the keys of a mapping."""
    if unknown := [label for label in labels if label not in names]:
        raise ValueError(f"{place}unknown class {unknown[0]!r:.80}; the classes are {_first_of([*names])}")


def labels_of(label: Any) -> list:
    """Return a label as a list, also if it is one class, a number, or missing."""
    return label if isinstance(label, list) else [] if label is None else [label]


def settle(splits: dict[str, list[Row]], of_label: Callable[[Any], Any]) -> None:
    """Replace each label by what a function returns of it, if not None; of a ValueError, a label of a test row does not count."""
    for split, rows in splits.items():
        for i, (place, row, inputs, label) in enumerate(rows):
            try:
                found = None if label is None or isinstance(label, ValueError) else of_label(label)
                label = label if found is None else found
            except ValueError as error:
                if split != "test":
                    raise ValueError(f"{place}: {error}") from error
                label = ValueError(str(error).partition("; ")[0])
            rows[i] = (place, row, inputs, label)


def hold_out(splits: dict[str, list[Row]], seed: int, keep_rare: bool = True) -> bool:
    """Move a tenth of the training rows to `validation`, if there is no such split.

    The rows are sorted by their labels, at random within a label, and every tenth is held out. So each class, and each range of
    numbers, has its share in both parts, to within one row.

    Args:
        splits: Rows by split.
        seed: Seed of the choice.
        keep_rare: A row with a label that no other row has stays in training. False for numbers, which are rarely equal.

    Returns:
        Whether rows were moved.
    """
    if "train" not in splits or "validation" in splits:
        return False
    labels = [labels_of(label) for *_, label in splits["train"]]
    counts = Counter(label for of_row in labels for label in set(of_row)) if keep_rare else {}
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    order = [i for i in shuffled if not any(counts.get(label) == 1 for label in labels[i])]
    order = sorted(order or range(len(labels)), key=labels.__getitem__)
    move_to_validation(splits, set(order[min(5, len(order) // 2) :: 10]))
    return True


def move_to_validation(splits: dict[str, list[Row]], numbers: set[int]) -> None:
    """Move the training rows of some numbers to `validation`."""
    rows = [*enumerate(splits["train"])]
    splits["train"] = [row for i, row in rows if i not in numbers]
    splits["validation"] = [row for i, row in rows if i in numbers]


def as_lists(arguments: LabelledDataArguments, splits: dict[str, list[Row]], **more) -> LabelledRows:
    """Return the rows of all splits as plain lists; `more` are further fields of `LabelledRows`."""

    def columns(split: str) -> tuple | None:
        rows = [(*inputs, label) for _, _, inputs, label in splits.get(split, ()) if inputs]
        if not rows:
            return None
        *inputs, labels = map(list, zip(*rows))
        labels = [None if isinstance(label, ValueError) else label for label in labels]  # of test rows, for `evaluate`
        return (*inputs, labels if any(label is not None for label in labels) else None)

    hub: str | None = arguments.dataset_name
    hub = None if hub and Path(hub).exists() else hub  # a folder of rows is a dataset too
    trained_on = hub or Path(arguments.train_file or arguments.dataset_name or "").name
    names = {"train": trained_on, "validation": Path(arguments.validation_file or "").name or trained_on}
    names["test"] = Path(arguments.test_file or "").name
    test, file = splits.get("test", ()), f"{arguments.test_file}, "
    more["test_places"] = [i for i, (_, _, inputs, _) in enumerate(test) if inputs]
    more["test_faults"] = [(place.removeprefix(file), str(y)) for place, _, _, y in test if isinstance(y, ValueError)]
    parts = columns("train"), columns("validation"), columns("test")
    return LabelledRows(*parts, [row for _, row, _, _ in test], names, hub, arguments.dataset_config, **more)
