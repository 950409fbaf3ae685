"""Texts, or pairs of texts, with a class, several classes, or a number."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from .labelled import (
    LabelledDataArguments,
    Row,
    check_filled,
    check_known,
    class_names,
    column,
    label_text,
    read_splits,
    report_few_rows,
    with_validation,
)

SINGLE, MULTI, REGRESSION = PROBLEM_TYPES = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d+)?")  # 007 is a name
TRUTHS = {"true": "1", "false": "0"}


@dataclass
class LabelledTextArguments(LabelledDataArguments):
    """Data."""

    text_columns: list[str] = field(default_factory=lambda: ["text"], metadata={"help": "One or two columns of text."})
    label_column: str = field(
        default="label", metadata={"help": "Column of the class, the list of classes, or the number."}
    )
    label_columns: list[str] = field(
        default=None, metadata={"help": "Columns of 0 and 1, one for each class, instead of --label_column."}
    )
    label_separator: str = field(
        default=None, metadata={"help": "What separates the classes of a row in --label_column, such as ';'."}
    )
    problem_type: Literal["auto", "single_label_classification", "multi_label_classification", "regression"] = field(
        default="auto", metadata={"help": "auto: by the labels of the training rows."}
    )

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= len(self.text_columns) <= 2:
            raise ValueError(
                f"text_columns={' '.join(self.text_columns)} are {len(self.text_columns)} columns; name one or two"
            )
        labels = self.label_columns or [self.label_column]
        if {*labels, "label"} & {*self.text_columns}:
            raise ValueError(
                f"text_columns={' '.join(self.text_columns)} and label_column={' '.join(labels)}: a column of texts cannot be "
                "that of the labels, nor have the name label, which the labels get; rename it"
            )
        if self.label_columns and self.label_separator:
            raise ValueError("give one of --label_columns and --label_separator")
        if (self.label_columns or self.label_separator) and self.problem_type not in ("auto", MULTI):
            raise ValueError(
                f"--label_columns and --label_separator give several classes, not problem_type={self.problem_type}; remove them"
            )


@dataclass
class LabelledTexts:
    """Texts with encoded labels.

    Args:
        data: Columns of the texts and `label`: a ClassLabel, a list with 0 or 1 for each class, or a number. The splits are
            `train` and `validation`, and `test` if it was given, whose `label` may be absent.
        problem_type: As in the config of a model.
        names: Names of the classes; for numbers, the name of their column.
        test_rows: All columns of the test rows, unchanged.
    """

    data: DatasetDict
    problem_type: str
    names: list[str]
    test_rows: list[dict]


def read_texts(
    arguments: LabelledTextArguments, seed: int, problem_type: str | None = None, names: Sequence[str] | None = None
) -> LabelledTexts:
    """Read texts, or pairs of texts, with a class, several classes or a number each.

    Args:
        arguments: Where the rows are, and what their columns mean.
        seed: Seed of the choice of validation rows, if no others are given.
        problem_type: Of a trained model, if there are no training rows; otherwise it follows from the labels.
        names: Names of the classes of that model.

    Returns:
        The rows. The names of the classes are those of the Hub's dataset, of `label_columns`, or the sorted labels of the
        training rows.

    Raises:
        ValueError: Rows have no text or no label, or a row has a label that no training row has; the message names files and
            lines. Or there are more classes than half of the training rows, or fewer than two.
        OSError: A file cannot be read.
    """
    label_columns = arguments.label_columns or [arguments.label_column]
    kind = problem_type or arguments.problem_type
    if kind == "auto" and (arguments.label_columns or arguments.label_separator):
        kind = MULTI

    def check(row: dict, has_labels: bool) -> dict:
        texts = {name: column(row, name) for name in arguments.text_columns}
        check_filled(texts)
        return {**texts, "label": _label(row, arguments, kind)} if has_labels else texts

    splits, hub_names = read_splits(arguments, check, label_columns, seed)
    for rows in splits.values():
        _check_texts(rows, arguments.text_columns)
    if kind == "auto":
        kind = _kind_of([row.values["label"] for row in splits["train"]], arguments.label_column)
        for row in _labelled(splits):
            try:
                row.values["label"] = _as_kind(row.values["label"], kind)
            except ValueError as error:
                raise ValueError(f"{row.place}: {error}") from error
    if kind == REGRESSION:
        names = [label_columns[0]]
        if "train" in splits and len({row.values["label"] for row in splits["train"]}) == 1:
            raise ValueError(
                f"all training rows have the number {splits['train'][0].values['label']}; nothing can be learned"
            )
    else:
        names = _spell_alike(splits, names or hub_names or arguments.label_columns)
        check_known(_labelled(splits), _labels, names)
    splits = with_validation(splits, _labels, seed, keep_rare=kind != REGRESSION)
    if kind == SINGLE and "train" in splits and len({row.values["label"] for row in splits["train"]}) < 2:
        raise ValueError(
            "all training rows have one class when the validation rows are held out; give more rows, or --validation_file"
        )
    return LabelledTexts(
        _encode(splits, arguments, kind, names), kind, list(names), [row.original for row in splits.get("test", ())]
    )


def _label(row: dict, arguments: LabelledTextArguments, kind: str) -> Any:
    """The label of a row: a string, a list of strings, or a float."""
    if arguments.label_columns:
        return [name for name in arguments.label_columns if _is_set(column(row, name), name)]
    label = column(row, arguments.label_column)
    if arguments.label_separator:
        if not isinstance(label, str):
            raise ValueError(
                f"the label {label!r:.80} is a {type(label).__name__}, not a text with {arguments.label_separator!r}"
            )
        return [part.strip() for part in label.split(arguments.label_separator) if part.strip()]
    return _as_kind(label, kind)


def _as_kind(label: Any, kind: str) -> Any:
    if kind == REGRESSION:
        return _number(label)
    is_list = isinstance(label, list)
    if kind != "auto" and is_list != (kind == MULTI):
        which = "a list" if is_list else "no list"
        raise ValueError(
            f"the label {label!r:.80} is {which}; labels of one class are no lists, those of several are lists in all rows"
        )
    if not is_list:
        return label_text(label)
    labels = [label_text(one) for one in label]
    if len({*labels}) < len(labels):
        raise ValueError(
            f"the label {label!r:.80} has a class twice; list the names of the classes of the row, or give columns of 0 and 1 by "
            "--label_columns"
        )
    return labels


def _number(label: Any) -> float:
    try:
        number = float(label_text(label))
    except ValueError as error:
        missing = str(error) if "missing" in str(error) else f"the label {label!r:.80} is not a number, such as 3.5"
        raise ValueError(missing) from error
    if not math.isfinite(number):
        raise ValueError(f"the label {label!r} is not finite")
    return number


def _is_set(value: Any, name: str) -> bool:
    text = str(value).strip().lower()
    text = TRUTHS.get(text, text)
    if not NUMBER.fullmatch(text) or float(text) not in (0, 1):
        raise ValueError(f"the column {name!r} has {value!r:.80}; give 0 or 1")
    return float(text) == 1


def _labelled(splits: dict[str, list[Row]]) -> Iterable[Row]:
    return (row for rows in splits.values() for row in rows if "label" in row.values)


def _labels(row: Row) -> list:
    label = row.values["label"]
    return label if isinstance(label, list) else [label]


def _check_texts(rows: Sequence[Row], columns: Sequence[str]) -> None:
    for name in columns:
        if all(NUMBER.fullmatch(row.values[name].strip()) for row in rows):
            raise ValueError(
                f"the column {name!r} has numbers only, such as {rows[0].values[name]!r} ({rows[0].place}); name the column of "
                "texts by --text_columns"
            )


def _kind_of(labels: Sequence, label_column: str) -> str:
    """The kind of labels without a hint: numbers of which one has a fraction are no classes."""
    if any(isinstance(label, list) for label in labels):
        return MULTI
    if all(re.fullmatch(r"-?\d+(,\d+)?", label) for label in labels) and (commas := [x for x in labels if "," in x]):
        raise ValueError(f"{label_column} has numbers with a decimal comma, such as {commas[0]!r}; write points")
    numbers = [float(label) for label in labels if NUMBER.fullmatch(label)]
    if len(numbers) < len(labels) or all(number.is_integer() for number in numbers):
        return SINGLE
    print(
        f"{label_column}: numbers from {min(numbers):g} to {max(numbers):g} with fractions, so this is a regression; "
        f"--problem_type {SINGLE} makes classes of them",
        flush=True,
    )
    return REGRESSION


def _spell_alike(splits: dict[str, list[Row]], names: Sequence[str] | None) -> list[str]:
    """Replace the spellings of one number, such as 1, 1.0 and True, by one of them; return the names of the classes."""
    spellings: dict[Any, set[str]] = {}
    for label in names or [label for row in splits["train"] for label in _labels(row)]:
        spellings.setdefault(_identity(label), set()).add(label)
    chosen = {identity: min(group, key=lambda label: (len(label), label)) for identity, group in spellings.items()}
    for identity, group in spellings.items():
        if len(group) > 1:
            print(f"the labels {', '.join(map(repr, sorted(group)))} are one class: {chosen[identity]!r}", flush=True)
    for row in _labelled(splits):
        new = [chosen.get(_identity(label), label) for label in _labels(row)]
        row.values["label"] = new if isinstance(row.values["label"], list) else new[0]
    if "train" in splits:
        counts = [label for row in splits["train"] for label in _labels(row)]
        if names is None:
            return class_names(counts)
        report_few_rows({**dict.fromkeys(names, 0), **Counter(counts)})
    return list(names)


def _identity(label: str) -> str | float:
    text = TRUTHS.get(label.strip().lower(), label.strip())
    return float(text) if NUMBER.fullmatch(text) else text


def _encode(
    splits: dict[str, list[Row]], arguments: LabelledTextArguments, kind: str, names: Sequence[str]
) -> DatasetDict:
    feature = {SINGLE: ClassLabel(names=list(names)), MULTI: List(Value("float32")), REGRESSION: Value("float32")}[kind]
    features = {**dict.fromkeys(arguments.text_columns, Value("string")), "label": feature}
    data = {}
    for split, rows in splits.items():
        columns = {name: [row.values[name] for row in rows] for name in features if name in rows[0].values}
        if kind == MULTI and "label" in columns:
            columns["label"] = [[float(name in labels) for name in names] for labels in columns["label"]]
        data[split] = Dataset.from_dict(columns, Features({name: features[name] for name in columns}))
    return DatasetDict(data)
