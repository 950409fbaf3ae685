"""Texts with a label each, and words with a tag each, from files or the Hub: checked, with the names of the classes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value, load_dataset

from .rows import checked_text, read_rows
from .texts import check_leaves_tokens

Rows = Iterable[tuple[str, dict]]  # where a row stands, for error messages, and the row


@dataclass
class LabelledDataArguments:
    """Data."""

    train_file: str = field(
        default=None, metadata={"help": ".csv, .tsv, .jsonl, .json or .parquet with labels, compressed or not."}
    )
    validation_file: str = field(
        default=None, metadata={"help": "The same for evaluation. Default: a tenth of the training rows, at random."}
    )
    dataset_name: str = field(
        default=None,
        metadata={"help": "Dataset of the Hub, instead of files; validation as above if it has no such split."},
    )
    dataset_config: str = field(default=None, metadata={"help": "Configuration of the dataset."})
    max_seq_length: int = field(default=512, metadata={"help": "Length in tokens at which texts are truncated."})

    def __post_init__(self):
        if bool(self.train_file) == bool(self.dataset_name):
            raise ValueError("give exactly one of --train_file and --dataset_name")
        if self.validation_file and self.dataset_name:
            raise ValueError("--validation_file belongs to --train_file; the dataset has its own validation rows")
        check_leaves_tokens(self.max_seq_length)


def read_texts(
    arguments: LabelledDataArguments, text_columns: Sequence[str], label_column: str, seed: int
) -> DatasetDict:
    """Read texts, or pairs of texts, with one label each.

    Args:
        arguments: Where the rows are.
        text_columns: Names of one or two columns of texts.
        label_column: Name of the column of labels: strings, integers or booleans.
        seed: Seed of the choice of validation rows, if no others are given.

    Returns:
        `train` and `validation` with the columns of texts and `label`, a ClassLabel. The names of the classes are those of the
        Hub's dataset, or the sorted labels of the training rows.

    Raises:
        ValueError: A row has no text or no label, or a validation row has a label that no training row has; the message names
            file and line. Or there are more classes than half of the training rows.
        OSError: A file cannot be read.
    """
    if not 1 <= len(text_columns) <= 2:
        raise ValueError(f"text_columns={' '.join(text_columns)} are {len(text_columns)} columns; name one or two")

    if label_column in text_columns or "label" in text_columns:
        raise ValueError(
            f"text_columns={' '.join(text_columns)} and label_column={label_column}: a column of texts cannot be that of the "
            "labels, nor have the name label, which the labels get; rename it"
        )

    def check(row):
        texts = {name: _column(row, name) for name in text_columns}
        _check_filled(texts)
        return {**texts, "label": _label(_column(row, label_column))}

    return _encode(*_read(arguments, check, label_column), "label", dict.fromkeys(text_columns, Value("string")), seed)


def read_tagged_words(arguments: LabelledDataArguments, word_column: str, tag_column: str, seed: int) -> DatasetDict:
    """Read lists of words with one tag for each word, from JSON lines, Parquet or the Hub.

    Returns:
        `train` and `validation` with the columns `words` and `tags`, a list of ClassLabel; the names of the classes as in
        `read_texts`.

    Raises:
        ValueError: A row has no words, or not as many tags as words, or a validation row has a tag that no training row has;
            the message names file and line.
        OSError: A file cannot be read.
    """

    def check(row):
        words, tags = _column(row, word_column), _column(row, tag_column)
        if not (isinstance(words, list) and isinstance(tags, list)):
            raise ValueError(f"{word_column!r} and {tag_column!r} are {words!r} and {tags!r}; both must be lists")
        if not words:
            raise ValueError(f"{word_column!r} has no words; remove this row")
        if len(words) != len(tags):
            raise ValueError(f"{len(words)} words and {len(tags)} tags; every word needs one tag")
        _check_filled({f"{word_column}[{i}]": word for i, word in enumerate(words)})
        return {"words": words, "tags": [_label(tag) for tag in tags]}

    return _encode(*_read(arguments, check, tag_column), "tags", {"words": List(Value("string"))}, seed)


def _column(row: Any, name: str) -> Any:
    if not isinstance(row, dict):
        raise ValueError(f"the row is a {type(row).__name__}, not an object; write one JSON object on each line")
    if name not in row:
        raise ValueError(f"no column {name!r} among {', '.join(row)}; name the columns of texts and labels")
    return row[name]


def _check_filled(texts: dict[str, str]) -> None:
    for name, text in texts.items():
        if not checked_text(text, repr(name), is_strict=True).strip():
            raise ValueError(f"{name!r} is empty; remove this row, or give it a text")


def _label(value: Any) -> str:
    if not isinstance(value, str | int) or not str(value).strip():
        raise ValueError(f"the label {value!r} is not a string or an integer; correct or remove this row")
    return str(value)


def _read(arguments, check: Callable[[dict], dict], label_column: str):
    """Checked rows of training and, if given, validation, each with where it stands; names of the classes of a Hub dataset."""
    names = None
    if arguments.dataset_name:
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
        feature = data["train"].features.get(label_column)
        feature = getattr(feature, "feature", feature)  # of a list
        names = feature.names if isinstance(feature, ClassLabel) else None
        parts = [split for split in ("train", "validation") if split in data]
        splits = [_hub_rows(data[split], split, label_column, names) for split in parts]
    else:
        files = filter(None, (arguments.train_file, arguments.validation_file))
        splits = [read_rows(file) for file in files]
    checked = [list(_checked(rows, check)) for rows in splits]
    sources = filter(None, (arguments.train_file or arguments.dataset_name, arguments.validation_file))
    for rows, name, source in zip(checked, ("training", "validation"), itertools.cycle(sources)):
        if len(rows) < 2:
            raise ValueError(f"{source}: {len(rows)} {name} rows; give at least two")
    return checked, names


def _hub_rows(split: Dataset, name: str, label_column: str, names: list[str] | None) -> Iterator[tuple[str, dict]]:
    def named(label):
        if isinstance(label, list):
            return [named(one) for one in label]
        return names[label] if label is not None and 0 <= label < len(names) else None

    for number, row in enumerate(split):
        yield f"{name}, row {number}", row if names is None else {**row, label_column: named(row[label_column])}


def _checked(rows: Rows, check: Callable[[dict], dict]) -> Iterator[tuple[str, dict]]:
    for where, row in rows:
        try:
            yield where, check(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def _encode(
    splits: list[list[tuple[str, dict]]], names: list[str] | None, column: str, features: dict, seed: int
) -> DatasetDict:
    """Replace labels by class ids, and hold out a tenth of the rows if there are no others for validation."""

    def labels(row):
        return row[column] if isinstance(row[column], list) else [row[column]]

    if names is None:
        every = [label for _, row in splits[0] for label in labels(row)]
        names = sorted(set(every), key=_number_or_text)
        if len(names) > max(2, len(every) / 2):
            raise ValueError(
                f"{len(names)} classes for {len(every)} labels, such as {names[0]!r} and {names[-1]!r}; a class needs several "
                'rows. To predict numbers, train with num_labels=1 and problem_type="regression" (docs/finetuning.md)'
            )
    if len(names) < 2:
        raise ValueError(f"all training rows have the label {names[0]!r}; a classifier needs at least two classes")
    if len(splits) == 1:
        rows = Dataset.from_dict({"row": range(len(splits[0]))}).train_test_split(0.1, seed=seed)
        splits = [[splits[0][row] for row in sorted(rows[part]["row"])] for part in ("train", "test")]
    for where, row in splits[1]:
        if unknown := [label for label in labels(row) if label not in names]:
            shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            raise ValueError(f"{where}: the label {unknown[0]!r} is in no training row; they have {shown}")
    kind = ClassLabel(names=names)
    features = Features({**features, column: List(kind) if isinstance(splits[0][0][1][column], list) else kind})
    return DatasetDict(
        {
            name: Dataset.from_list([row for _, row in rows], features=features)
            for name, rows in zip(("train", "validation"), splits)
        }
    )


def _number_or_text(label: str) -> tuple:
    return (0, int(label), label) if label.removeprefix("-").isdecimal() else (1, 0, label)
