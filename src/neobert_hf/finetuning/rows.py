"""Rows with labels from files or the Hub, as plain lists: all faults in one message, and a tenth of the rows held out."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

import numpy as np

from ..data.rows import Row, check_columns, checked_text, read_rows, trimmed
from ..files import messages
from ..files.messages import first_of
from .predictions import PREDICTION_COLUMNS

if TYPE_CHECKING:
    from .arguments import LabelledDataArguments

EXAMPLE_CHARACTERS = 300
RARE = 5  # a class with fewer training rows is reported


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
        rows = self.validation or self.test
        if not rows:
            return None
        parts = [column[0] for column in rows[:-1]]
        if isinstance(parts[0], tuple):
            parts = list(parts[0])
        texts = [part if isinstance(part, str) else " ".join(part) for part in parts]
        return [shorten(text, EXAMPLE_CHARACTERS, placeholder=" ...") for text in texts]

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
        if num_counted == num_rows or (num_texts == num_rows and not has_labels):
            return ""
        line = f"test: {num_rows} rows, {num_texts} with a text"
        if has_labels:
            line += f", {num_counted} with a label that counts in the metrics"
        if self.test_faults:
            line += f"; {first_of((f'{place}: {reason}' for place, reason in self.test_faults), '; ')}"
        return line


class Missing(ValueError):
    """A row has no text, or no label; a test row may lack both."""


@dataclass
class Columns:
    """What a reader takes of a row.

    Args:
        texts: Columns of texts: the names that each may have.
        labels: The same of labels.
        remedy: What to do if no row has one of them.
        check: Function from a row to its inputs. `Missing` says that it has no text, another ValueError is its fault.
        check_label: Function from a row and its inputs to the label, with the same errors.
    """

    texts: Sequence[Sequence[str]]
    labels: Sequence[Sequence[str]]
    remedy: str
    check: Callable[[dict], list]
    check_label: Callable[[dict, list], Any]


def read_splits(
    arguments: LabelledDataArguments, columns: Columns, seed: int, read: Callable[[str], Iterable[Row]] | None = None
) -> tuple[dict[str, list[Row]], list[str]]:
    """Read and check the rows of all files, or of a dataset of the Hub.

    A test row without a text, without a label, or with a label that does not count keeps its place. In the other splits each is a
    fault.

    Args:
        arguments: Where the rows are.
        columns: What their columns mean.
        seed: Seed of the choice of `max_train_rows`.
        read: Function from a file to its rows; None takes `read_rows`.

    Returns:
        Rows by split, and the names of the classes in the order of a ClassLabel of the Hub; none without one.

    Raises:
        ValueError: Rows have faults; one message has the first ten with file and line. Or a split has too few rows, or no row has
            a column.
        OSError: A file cannot be read.
    """
    splits: dict[str, list[Row]] = {}
    hub_names: list[str] = []
    if arguments.dataset_name:
        splits, hub_names = _hub_rows(arguments, columns)
    for split in ("train", "validation", "test"):
        file = getattr(arguments, f"{split}_file")
        if file and read:
            splits[split] = list(read(file))
        elif file:
            splits[split] = list(read_rows(file, column_names=arguments.column_names, is_strict=False))
    for split, rows in splits.items():
        _check_rows(rows, columns, split == "test")
    _leave_out(splits, arguments.skip_bad_rows)
    for split, rows in splits.items():
        needed = 1 if split == "test" else 2
        num_texts = sum(row.inputs is not None for row in rows)
        if num_texts < needed:
            name = getattr(arguments, f"{split}_file") or arguments.dataset_name
            raise ValueError(f"{name}: {num_texts} {split} rows with a text; give at least {needed}")
    wanted = arguments.max_train_rows
    if "train" in splits and wanted and wanted < len(splits["train"]):
        chosen = np.random.default_rng(seed).choice(len(splits["train"]), wanted, replace=False)
        splits["train"] = [splits["train"][i] for i in sorted(chosen)]
    return splits, hub_names


def _check_rows(rows: list[Row], columns: Columns, is_test: bool) -> None:
    """Give each row its inputs, and its label or a fault."""
    objects = [row for row in rows if isinstance(row.values, dict)]
    of_labels = list(itertools.chain(*columns.labels))
    has_labels = not is_test or any(not is_missing(row.values.get(name)) for row in objects for name in of_labels)
    if objects:
        wanted = [*columns.texts]
        if has_labels:
            wanted += columns.labels
        names = dict.fromkeys(itertools.chain(*(row.values for row in objects)))
        check_columns(objects[0].place, names, wanted, columns.remedy)
        if is_test:
            _check_free(objects[0].place, names)
    for row in rows:
        if row.fault:
            continue
        try:
            if not isinstance(row.values, dict):
                kind = type(row.values).__name__
                raise ValueError(f"the row is a {kind}, not an object; write one JSON object on each line")
            row.inputs = columns.check(row.values)
            if has_labels:
                row.label = columns.check_label(row.values, row.inputs)
        except ValueError as error:
            if not (is_test and isinstance(error, Missing)):
                row.fault = str(error)


def _check_free(place: str, names: Iterable[str]) -> None:
    for name in names:
        if name in PREDICTION_COLUMNS or name.startswith("probability_"):
            raise ValueError(f"{place}: the column {name!r} has the name of what is predicted; rename it")


def _leave_out(splits: dict[str, list[Row]], skip: bool) -> None:
    """Remove the rows with a fault, except test rows of which only the label has one; ValueError if none may be left out."""
    faults = []
    num_rows = 0
    for split, rows in splits.items():
        num_rows += len(rows)
        splits[split] = []
        for row in rows:
            if row.fault and (split != "test" or row.inputs is None):
                faults.append(f"{row.place}: {row.fault}")
            else:
                splits[split].append(row)
    if not faults:
        return
    count = f"{len(faults)} of {num_rows} rows"
    shown = first_of(faults, "; ")
    if not skip:
        raise ValueError(f"faults in {count}: {shown}; correct or remove them, or leave them out by skip_bad_rows")
    messages.say(f"left out {count}: {shown}")


def _hub_rows(arguments: LabelledDataArguments, columns: Columns) -> tuple[dict[str, list[Row]], list[str]]:
    """Rows of the splits of a dataset, and the names of its classes."""
    from datasets import ClassLabel, load_dataset

    data = load_dataset(arguments.dataset_name, arguments.dataset_config)
    if "train" not in data:
        found = f"{arguments.dataset_name} has the splits {first_of(data)}"
        raise ValueError(f"{found} and no train; give its rows as files")
    splits = {}
    for split in ("train", "validation"):
        if split in data:
            splits[split] = [Row(f"{split}, row {number}", values) for number, values in enumerate(data[split])]
    features = data["train"].features
    column_of_labels = next((name for name in itertools.chain(*columns.labels) if name in features), None)
    feature = features.get(column_of_labels)
    feature = getattr(feature, "feature", feature)  # of a list
    if not isinstance(feature, ClassLabel):
        return splits, []
    names = list(map(trimmed, feature.names))
    for row in itertools.chain(*splits.values()):
        row.values[column_of_labels] = _named(row.values[column_of_labels], names)
    return splits, names


def _named(label: Any, names: Sequence[str]) -> Any:
    if isinstance(label, list):
        return [_named(one, names) for one in label]
    if label is None or label < 0:  # -1 stands for no label
        return None
    return names[label]


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


def listed(value: Any) -> Any:
    """Return a tuple or an array as a list, and any other value as it is."""
    if isinstance(value, tuple | np.ndarray):
        return list(value)
    return value


def given_names(classes: Iterable[Any] | None) -> list[str]:
    """Return the names of classes that a user gives, as texts; none for None.

    Raises:
        ValueError: A name is given twice, or is neither a string nor a number.
    """
    if classes is None:
        return []
    names = list(map(label_text, classes))
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
    if isinstance(value, np.generic):
        value = value.item()
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
    few = [f"{name} ({counts[name]})" for name in counts if counts[name] < RARE]
    warn("classes that differ only by upper and lower case or spaces", same, "write each in one way in all rows")
    warn(f"classes with fewer than {RARE} training rows, hard to learn", few)
    return list(names)


def warn(what: str, examples: Sequence[str], remedy: str = "") -> None:
    """Print one line about the training rows, with the first of the examples, if there are any."""
    if examples:
        parts = [f"{what}: {first_of(examples)}", remedy]
        messages.warn("; ".join(filter(None, parts)))


def _number_or_text(label: str) -> tuple:
    if label.removeprefix("-").isdecimal():
        return (0, int(label), label)
    return (1, 0, label)


def check_known(labels: Iterable[str], names: Mapping[str, Any], place: str = "") -> None:
    """Raise ValueError, which begins with the place, if a label is not one of the names, the keys of a mapping."""
    for label in labels:
        if label not in names:
            raise ValueError(f"{place}unknown class {label!r:.80}; the classes are {first_of(names)}")


def labels_of(label: Any) -> list:
    """Return a label as a list, also if it is one class, a number, or missing."""
    if label is None:
        return []
    if isinstance(label, list):
        return label
    return [label]


def settle(splits: dict[str, list[Row]], of_label: Callable[[Any], Any]) -> None:
    """Replace each label by what a function returns of it, if not None; of a ValueError, a label of a test row does not count."""
    for split, rows in splits.items():
        for row in rows:
            if row.label is None:
                continue
            try:
                found = of_label(row.label)
            except ValueError as error:
                if split != "test":
                    raise ValueError(f"{row.place}: {error}") from error
                row.label, row.fault = None, str(error).partition("; ")[0]
                continue
            if found is not None:
                row.label = found


def add_validation(splits: dict[str, list[Row]], seed: int, keep_rare: bool = True) -> bool:
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
    labels = [labels_of(row.label) for row in splits["train"]]
    counts: Counter = Counter()
    if keep_rare:
        counts.update(label for of_row in labels for label in set(of_row))
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
    hub: str | None = arguments.dataset_name
    if hub and Path(hub).exists():  # a folder of rows is a dataset too
        hub = None
    trained_on = hub or Path(arguments.train_file or arguments.dataset_name or "").name
    names = {
        "train": trained_on,
        "validation": Path(arguments.validation_file or "").name or trained_on,
        "test": Path(arguments.test_file or "").name,
    }
    test = splits.get("test", [])
    more["test_places"] = [i for i, row in enumerate(test) if row.inputs]
    start = f"{arguments.test_file}, "
    more["test_faults"] = [(row.place.removeprefix(start), row.fault) for row in test if row.fault]
    train, validation = (_columns_of(splits.get(split, [])) for split in ("train", "validation"))
    test_rows = [row.values for row in test]
    config = arguments.dataset_config
    return LabelledRows(train, validation, _columns_of(test), test_rows, names, hub, config, **more)


def _columns_of(rows: list[Row]) -> tuple | None:
    """The inputs and the labels of rows as lists; None for the labels if there is none."""
    rows = [row for row in rows if row.inputs]
    if not rows:
        return None
    inputs = map(list, zip(*(row.inputs or () for row in rows)))
    labels = [row.label for row in rows]
    if all(label is None for label in labels):
        return (*inputs, None)
    return (*inputs, labels)
