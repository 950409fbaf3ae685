"""Words with a tag each: from CoNLL files, JSON lines, Parquet, or datasets of the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from ..files.rows import COMPRESSIONS, Faults, read_lines, read_rows
from .labelled import (
    LabelledDataArguments,
    MissingColumn,
    Row,
    check_filled,
    check_known,
    class_names,
    label_text,
    read_splits,
    with_validation,
)

CONLL_SUFFIXES = (".conll", ".txt", ".iob", ".bio", ".tsv")
LIST_SUFFIXES = (".jsonl", ".json", ".parquet")
WORD_COLUMNS = ("words", "tokens")
TAG_COLUMNS = ("tags", "ner_tags")
# Prefixes for the last word of an entity and for one of a single word, which pipelines of transformers do not know
IOB2 = {"B": "B", "I": "I", "E": "I", "L": "I", "S": "B", "U": "B"}


@dataclass
class TaggedWordArguments(LabelledDataArguments):
    """Data."""

    train_file: str = field(
        default=None,
        metadata={"help": f"{', '.join((*CONLL_SUFFIXES, *LIST_SUFFIXES))} with words and tags, compressed or not."},
    )
    max_seq_length: int = field(default=512, metadata={"help": "Length in tokens of the windows of a long row."})
    word_column: str = field(
        default=None,
        metadata={
            "help": "Column of the lists of words. Default: words or tokens. In CoNLL files a number; default: 1."
        },
    )
    tag_column: str = field(
        default=None,
        metadata={
            "help": "Column of the lists of tags. Default: tags or ner_tags. In CoNLL files a number; default: the last."
        },
    )


@dataclass
class TaggedWords:
    """Rows of words with encoded tags.

    Args:
        data: Columns `words` and `tags`, a list of class ids. The splits are `train` and `validation`, and `test` if it was
            given, which may have no `tags`.
        names: Names of the classes. A kind of entity with a tag B- has one with I- too, also if all its entities are one word.
        test_rows: All columns of the test rows, unchanged.
    """

    data: DatasetDict
    names: list[str]
    test_rows: list[dict]


def is_iob(names: Iterable[str]) -> bool:
    """Return whether all tags are O, or begin with B- or I-: the first word of an entity, and its other words."""
    return all(name == "O" or name.startswith(("B-", "I-")) for name in names)


def read_tagged_words(arguments: TaggedWordArguments, seed: int, names: Sequence[str] | None = None) -> TaggedWords:
    """Read lists of words with one tag for each word.

    CoNLL files (.conll, .txt, .iob, .bio, .tsv) have a word and its tag on each line, and an empty line after each sentence. Tags
    with E- or L- (last word) and S- or U- (single word) become I- and B-.

    Args:
        arguments: Where the rows are, and what their columns mean.
        seed: Seed of the choice of validation rows, if no others are given.
        names: Names of the tags of a trained model, if there are no training rows.

    Returns:
        The rows. The names of the tags are those of the Hub's dataset, or the sorted tags of the training rows.

    Raises:
        ValueError: A row has no words, or not as many tags as words, or a tag that no training row has; the message names file
            and line. Or there is one tag only.
        OSError: A file cannot be read.
    """
    word_columns = (arguments.word_column,) if arguments.word_column else WORD_COLUMNS
    tag_columns = (arguments.tag_column,) if arguments.tag_column else TAG_COLUMNS

    check = partial(_checked_row, word_columns=word_columns, tag_columns=tag_columns)
    read = partial(_rows, arguments=arguments, names=(word_columns[0], tag_columns[0]))
    splits, hub_names = read_splits(arguments, check, tag_columns, seed, read)
    _use_iob2([row for rows in splits.values() for row in rows])
    if "train" in splits:
        names = hub_names or class_names(
            (tag for row in splits["train"] for tag in _tags(row)),
            "name the column of the tags by --tag_column",
        )
        if is_iob(names):
            inside = [f"I-{name[2:]}" for name in names if name.startswith("B-")]
            names = [*names, *(name for name in inside if name not in names)]
    splits = with_validation(splits, _tags, seed)
    check_known((row for rows in splits.values() for row in rows), _tags, names)
    features = {"words": List(Value("string")), "tags": List(ClassLabel(names=list(names)))}
    data = {}
    for name, rows in splits.items():
        kept = Features({column: feature for column, feature in features.items() if column in rows[0].values})
        data[name] = Dataset.from_list([row.values for row in rows], features=kept)
    return TaggedWords(DatasetDict(data), list(names), [row.original for row in splits.get("test", ())])


def _checked_row(row: dict, has_tags: bool, word_columns: Sequence[str], tag_columns: Sequence[str]) -> dict:
    words = _column(row, word_columns, "--word_column")
    if not isinstance(words, list) or not words:
        raise ValueError(f"the words are {words!r:.80}; give a list of words")
    check_filled({f"word {i}": word for i, word in enumerate(words, 1)})
    if not has_tags:
        return {"words": words}
    tags = _column(row, tag_columns, "--tag_column")
    if not isinstance(tags, list):
        raise ValueError(f"the tags are {tags!r:.80}; give a list of tags")
    if len(words) != len(tags):
        raise ValueError(f"{len(words)} words and {len(tags)} tags; every word needs one tag")
    return {"words": words, "tags": [label_text(tag) for tag in tags]}


def _rows(
    file: str, faults: Faults, arguments: TaggedWordArguments, names: tuple[str, str]
) -> Iterable[tuple[str, Any]]:
    """Rows of a file, each after its place; those of CoNLL have columns of these names."""
    path = Path(file)
    suffix = Path(path.stem if path.suffix in COMPRESSIONS else path).suffix
    if suffix in CONLL_SUFFIXES:
        return _conll_rows(file, arguments, names, faults)
    if suffix in LIST_SUFFIXES:
        return read_rows(file, faults=faults)
    raise ValueError(
        f"{file} has the suffix {suffix!r}; choose {', '.join(CONLL_SUFFIXES)} for CoNLL, or {', '.join(LIST_SUFFIXES)}; all but "
        f".parquet may be compressed ({', '.join(COMPRESSIONS)})"
    )


def _column(row: dict, names: Sequence[str], option: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise MissingColumn(f"no column {' or '.join(map(repr, names))} among {', '.join(row)}; name it by {option}")


def _tags(row: Row) -> list[str]:
    return row.values.get("tags", [])


def _use_iob2(rows: Sequence[Row]) -> None:
    """Replace the tags of the scheme that marks last and single words, if all tags are of it."""
    tags = {tag for row in rows for tag in _tags(row)}
    kinds = tags - {"O"}
    if kinds < tags and all(re.match("[BIELSU]-.", tag) for tag in kinds) and not is_iob(kinds):
        print("the tags E- or L- become I-, and S- or U- become B-; pipelines know B- and I- only", flush=True)
        for row in rows:
            if "tags" in row.values:
                row.values["tags"] = [tag if tag == "O" else IOB2[tag[0]] + tag[1:] for tag in _tags(row)]


def _conll_rows(
    file: str, arguments: TaggedWordArguments, names: tuple[str, str], faults: Faults
) -> Iterator[tuple[str, dict]]:
    """Rows of a CoNLL file: each sentence with the place of its first line; without tags if its lines have one column.

    A line that begins with "#" and has another number of columns than the lines of words is a comment.
    """
    lines = list(read_lines(file))
    first = next((line for _, line in lines if line.strip() and not line.startswith(("#", "-DOCSTART-"))), "")
    separator = "\t" if "\t" in first else " +"
    lines = [(place, _columns(line, separator)) for place, line in lines]
    num_columns = len(_columns(first, separator)) or 1
    if first and num_columns == 1 and file != arguments.test_file:
        raise ValueError(f"{file} has one column; write on each line a word, a tab or a blank, and its tag")
    chosen = ((arguments.word_column, 0), (arguments.tag_column, -1))
    try:
        word, tag = (int(number) - 1 if number else default for number, default in chosen)
    except ValueError as error:
        raise ValueError(f"{file}: --word_column and --tag_column of a CoNLL file are numbers, from 1") from error
    if max(word, tag) >= num_columns:
        raise ValueError(f"{file}: column {max(word, tag) + 1} of {num_columns}; choose an existing one")
    start, sentence, reason = "", [], ""
    for place, columns in [*lines, ("", [])]:
        if columns and columns[0].startswith("#") and len(columns) != num_columns:
            continue
        if columns and not columns[0].startswith("-DOCSTART-"):
            start = start or place
            if len(columns) != num_columns and not reason:
                reason = f"{place}: {len(columns)} columns, but the first word has {num_columns}"
            sentence.append(columns)
        elif sentence:
            if reason:
                faults.append(tuple(reason.split(": ", 1)))
            else:
                values = {names[0]: [columns[word] for columns in sentence]}
                yield start, values | ({names[1]: [columns[tag] for columns in sentence]} if num_columns > 1 else {})
            start, sentence, reason = "", [], ""


def _columns(line: str, separator: str) -> list[str]:
    """Columns of a line; none of an empty one."""
    return re.split(separator, line.strip(" ")) if line.strip() else []
