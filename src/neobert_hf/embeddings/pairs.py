"""Pairs and triplets for contrastive training, from files of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from datasets import Dataset, DatasetDict

from ..data.lengths import as_list
from ..data.rows import checked_text, read_rows

Sets: TypeAlias = Mapping[str, Dataset] | Dataset  # by name, or one
MOST_HELD_OUT = 1000  # rows of a set; more rows cost time and hardly change the metrics


def read_pairs(file: str | Path) -> Dataset:
    """Read pairs or triplets from a file of rows.

    The order of the columns decides: anchor, positive, then negatives. Their names are ignored.

    Returns:
        Columns `anchor`, `positive`, and `negative_1` to `negative_n`.

    Raises:
        ValueError: A line has other columns than the first one, or an empty text; the message names the line.
        OSError: The file cannot be read.
    """
    rows: list[dict] = []
    for row in read_rows(file):
        values = row.values
        if not isinstance(values, dict) or len(values) < 2 or (rows and list(values) != list(rows[0])):
            raise ValueError(f"{row.place}: {values!r} is not a row of at least two columns, the same in all lines")
        for name, text in values.items():
            place = f"{row.place}: {name}"
            if not checked_text(text, place, is_strict=True).strip():
                raise ValueError(f"{place} is empty, which is neither positive nor negative; remove the line")
        rows.append(values)
    if not rows:
        raise ValueError(f"{file} is empty; give at least one row")
    names = ["anchor", "positive", *(f"negative_{i}" for i in range(1, len(rows[0]) - 1))]
    return Dataset.from_list([dict(zip(names, values.values())) for values in rows])


def texts_of(rows: Dataset, query_prompt: str = "", document_prompt: str = "") -> list[str]:
    """Return the texts of all columns, with a prompt before those of the first column, and another before the others."""
    question, *documents = rows.column_names
    prompts = {question: query_prompt} | dict.fromkeys(documents, document_prompt)
    return [prompts[name] + text for name in prompts for text in rows[name] if isinstance(text, str)]


def read_sets_of_pairs(files: Iterable[str | Path]) -> DatasetDict:
    """Return `read_pairs` of each file by its name without suffix.

    Raises:
        ValueError: Two files have one name, or as of `read_pairs`.
    """
    sets = DatasetDict()
    for file in as_list(files):
        name = Path(file).stem
        if name in sets:
            raise ValueError(f"two files have the name {name}, which identifies the set; rename one of them")
        sets[name] = read_pairs(file)
    return sets


def as_sets(sets: Sets, name: str) -> DatasetDict:
    """Return sets by name; a single set gets this name.

    Raises:
        ValueError: A set is no Dataset.
    """
    named = {name: sets} if isinstance(sets, Dataset) else sets
    if not isinstance(named, Mapping) or not all(isinstance(rows, Dataset) for rows in named.values()):
        raise ValueError(f"the sets are {sets!r:.80}; give a Dataset, or a dict of Datasets by name")
    return DatasetDict(named)


def hold_out(sets: Sets, share: float, seed: int) -> tuple[DatasetDict, DatasetDict]:
    """Divide each set at random into rows to train on and rows to evaluate on.

    Args:
        sets: Sets by name.
        share: Share of the rows to evaluate on, at most `MOST_HELD_OUT` rows of a set. A single row is not held out, since a
            ranking of one document says nothing.
        seed: Seed of the choice.

    Returns:
        The sets to train on, and the held-out rows of those sets that have some.
    """
    training = as_sets(sets, "train")
    held_out = DatasetDict()
    for name, rows in list(training.items()):
        number = min(int(share * len(rows)), MOST_HELD_OUT)
        if number > 1:
            parts = rows.train_test_split(number, seed=seed)
            training[name] = parts["train"]
            held_out[name] = parts["test"]
    return training, held_out
