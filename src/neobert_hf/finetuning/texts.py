"""Texts, or pairs of texts, with a class, several classes, or a number."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..data.rows import BY_NAME, trimmed
from ..files.messages import say
from .rows import (
    Columns,
    LabelledRows,
    Missing,
    add_validation,
    as_lists,
    check_known,
    class_names,
    column,
    filled,
    given_names,
    is_missing,
    label_text,
    labels_of,
    listed,
    read_splits,
    settle,
    warn,
)

if TYPE_CHECKING:
    from .arguments import LabelledTextArguments

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d+)?")  # 007 is a name
# Numbers as people write them: 3.8 €, EUR 1 000,50, 4/5, 10 %, 5 stars
AMOUNT = re.compile(r"([^\w\s]{1,2}|[A-Z]{3})?\s*(0|[1-9]\d*)([.,'\s]\d+)*\s*(/\s*\d+|\D{0,10})")
AS_NUMBERS = "to predict numbers, write them as 3.5, without a unit, and choose problem_type=regression"
OR_COLUMNS = ", or give columns of 0 and 1 by label_columns"
TRUTHS = {"true": "1", "false": "0"}


def read_labelled_texts(arguments: LabelledTextArguments, seed: int, trained: Any = None) -> LabelledRows:
    """Read texts, or pairs of texts, with a class, several classes or a number each.

    Args:
        arguments: Where the rows are, and what their columns mean.
        seed: Seed of the choice of validation rows, if no others are given.
        trained: If there are no training rows, what has the `classes_` and the `problem_type`, such as a trained `Classifier`.

    Returns:
        Rows as (texts, labels): a pair of texts is a tuple, of which one may be empty, a label is a string, a list of strings, or
        a float. The classes are those of the Hub's dataset, of `label_columns`, or the sorted labels of the training rows.

    Raises:
        ValueError: Rows have faults, or a validation row has a label that no training row has; the message names files and
            lines. Or as of `class_names`, or without training rows the model is not trained.
        OSError: A file cannot be read.
    """
    label_columns = arguments.label_columns or [arguments.label_column]
    kind: str = arguments.problem_type
    names = arguments.label_columns
    if not arguments.has_training:
        names, kind = given_names(trained.classes_), trained.problem_type
    elif kind == "auto" and (names or arguments.label_separator):
        kind = MULTI

    splits, hub_names = read_splits(arguments, _columns_of(arguments, kind), seed)
    if kind == "auto":
        kind = kind_of([row.label for row in splits["train"]])
    settle(splits, lambda label: of_kind(label, kind))
    if kind == REGRESSION:
        names = [label_columns[0]]
    else:
        if "train" in splits:
            texts = [row.inputs[0] for row in splits["train"] if row.inputs]
            labels = [row.label for row in splits["train"]]
            names = text_classes(texts, labels, names or hub_names)
        known = dict.fromkeys(names)
        settle(splits, lambda label: check_known(labels_of(label), known))
    is_held_out = add_validation(splits, seed, keep_rare=kind != REGRESSION)
    return as_lists(arguments, splits, classes=list(names), problem_type=kind, is_held_out=is_held_out)


def _columns_of(arguments: LabelledTextArguments, kind: str) -> Columns:
    """What the arguments say of the columns of a row."""

    def check(row: dict) -> list:
        column(row, *arguments.text_columns)  # one of them is enough
        return [one_or_pair({name: row.get(name) for name in arguments.text_columns})]

    texts = [(name,) for name in arguments.text_columns]
    labels = [(name,) for name in arguments.label_columns or [arguments.label_column]]
    return Columns(texts, labels, BY_NAME, check, lambda row, _: _label(row, arguments, kind))


def one_or_pair(texts: dict[str, Any]) -> str | tuple[str, str]:
    """Return a text, or a pair of texts as a tuple; arguments and errors are those of `filled`."""
    found = filled(texts)
    if len(found) == 1:
        return found[0]
    return found[0], found[1]


def _label(row: dict, arguments: LabelledTextArguments, kind: str) -> Any:
    """The label of a row: a string, a list of strings, or a float."""
    names = arguments.label_columns
    if names:
        if all(is_missing(row.get(name)) for name in names):
            raise Missing("the labels are missing")
        return [name for name in names if _is_set(column(row, name), name)]
    label = column(row, arguments.label_column)
    separator = arguments.label_separator
    if separator and isinstance(label, str):
        label = [part for part in label.split(separator) if trimmed(part)]
    return clean_label(label, kind)


def _is_set(value: Any, name: str) -> bool:
    number = as_number(str(value))
    if number not in (0, 1):
        raise ValueError(f"the column {name!r} has {value!r:.80}; give 0 or 1")
    return number == 1


def as_number(text: str) -> float | None:
    """Return the number that a text is, also 1 or 0 for true or false; None if it is none."""
    text = TRUTHS.get(trimmed(text).lower(), trimmed(text))
    return float(text) if NUMBER.fullmatch(text) else None


def clean_label(label: Any, kind: str) -> str | list[str] | float:
    """Return a label as the kind demands it: a text, a list of texts, or a number; "auto" takes lists and texts.

    Raises:
        Missing: The label is missing.
        ValueError: It is of another kind.
    """
    label = listed(label)
    if not isinstance(label, list):
        label = label_text(label)
    label = of_kind(label, kind)
    if not isinstance(label, list):
        return label
    labels = [label_text(one) for one in label]
    if len({*labels}) < len(labels):
        raise ValueError(f"the label {label!r:.80} has a class twice; list the names of its classes{OR_COLUMNS}")
    return labels


def of_kind(label: Any, kind: str) -> Any:
    """Return a label as a number if the kind demands it, and another one as it is; the errors are those of `clean_label`."""
    is_list = isinstance(label, list)
    if kind not in ("auto", REGRESSION) and is_list != (kind == MULTI):
        which = ("no list", "a list")[is_list]
        raise ValueError(f"the label {label!r:.80} is {which}; a label is a list if rows have several classes")
    if kind != REGRESSION:
        return label
    text = label_text(label)
    try:
        number = float(text.replace("_", "?"))  # Python reads 1_000, and no table means it
    except ValueError as error:
        raise ValueError(f"the label {label!r:.80} is not a number, such as 3.5") from error
    if not math.isfinite(number):
        raise ValueError(f"the label {label!r} is not finite")
    return number


def kind_of(labels: Sequence[str | list[str]]) -> str:
    """Return the kind of labels: lists are several classes, and numbers of which one has a fraction are a regression.

    Args:
        labels: Labels of all training rows, as `clean_label` returns them for "auto".

    Raises:
        ValueError: The labels are numbers with a decimal comma.
    """
    texts = [label for label in labels if isinstance(label, str)]
    if len(texts) < len(labels):
        return MULTI
    commas = [text for text in texts if "," in text]
    if commas and all(re.fullmatch(r"-?\d+(,\d+)?", text) for text in texts):
        found = f"the labels are numbers with a decimal comma, such as {commas[0]!r}"
        raise ValueError(f"{found}; write points, and no commas of thousands")
    counts = Counter(texts)
    numbers = [number for number in map(as_number, texts) if number is not None]
    if len(numbers) < len(texts):
        amounts = [f"{label!r} ({count})" for label, count in counts.most_common() if AMOUNT.fullmatch(label)]
        if len(amounts) > max(2, len(counts) / 2):
            warn("labels that look like numbers are taken as classes", amounts, AS_NUMBERS)
        return SINGLE
    found = f"labels: numbers from {min(numbers):g} to {max(numbers):g}"
    if not all(number.is_integer() for number in numbers):
        say(f"{found} with fractions, so this is a regression; problem_type={SINGLE} makes classes")
        return REGRESSION
    if len(counts) > 2:
        say(f"{found}, taken as {len(counts)} classes; problem_type={REGRESSION} predicts numbers")
    return SINGLE


def text_classes(texts: Sequence, labels: Sequence[str | list[str]], names: Sequence[str] | None = None) -> list[str]:
    """Return the names of the classes of training rows, as `class_names` does; a line names texts with several labels.

    Args:
        texts: Texts, or pairs of texts.
        labels: The class, or the list of classes, of each text.
        names: Names of the classes, if they are known.

    Raises:
        ValueError: As of `class_names`; or two classes are one number, such as 1 and 1.0; or the lists of classes are zeros and
            ones, one for each class.
    """
    rows = [[label] if isinstance(label, str) else sorted(label) for label in labels]
    every = [name for row in rows for name in row]
    if not names and isinstance(labels[0], list) and every and all(as_number(name) in (0, 1) for name in every):
        raise ValueError(
            f"the lists of classes have 0 and 1 only; list the names of the classes of each row{OR_COLUMNS}"
        )
    names = class_names(every, names, AS_NUMBERS)
    by_number: dict[Any, str] = {}
    for name in names:
        number = as_number(name)
        first = by_number.setdefault(name if number is None else number, name)
        if first != name:
            raise ValueError(f"the classes {first!r} and {name!r} are one number; write it in one way in all rows")
    found: dict[str, Counter] = defaultdict(Counter)
    for text, row in zip(texts, rows):
        if not isinstance(text, str):
            text = " | ".join(text)
        found[" ".join(text.split())][", ".join(row)] += 1
    several = [f"{text!r:.60} {dict(counts)}" for text, counts in found.items() if len(counts) > 1]
    remedy = "give each text one label, or a list of its classes in one row"
    warn(f"texts with several labels ({len(several):,})", several, remedy)
    return names
