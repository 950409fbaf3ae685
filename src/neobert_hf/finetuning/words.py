"""Words with a tag each: from CoNLL files, JSON lines, Parquet, or datasets of the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.rows import Row, checked_text, read_lines, read_rows, suffix_of
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
    label_text,
    listed,
    read_splits,
    settle,
)
from .schemes import iob2_names, iob2_tag, is_iob, tag_scheme, to_iob2

if TYPE_CHECKING:
    from .arguments import TaggedWordArguments

CONLL_SUFFIXES = (".conll", ".txt", ".iob", ".bio", ".tsv")
WORD_COLUMNS = ("words", "tokens")
TAG_COLUMNS = ("tags", "ner_tags")


def read_tagged_words(arguments: TaggedWordArguments, seed: int, trained: Any = None) -> LabelledRows:
    """Read lists of words with one tag for each word.

    CoNLL files (.conll, .txt, .iob, .bio, .tsv) have a word and its tag on each line, and an empty line after each sentence.

    Args:
        arguments: Where the rows are, and what their columns mean.
        seed: Seed of the choice of validation rows, if no others are given.
        trained: If there are no training rows, what has the tags as `classes_`, such as a trained `Tagger`.

    Returns:
        Rows as (words, tags), lists for each row. The classes are those of the Hub's dataset, or the sorted tags of the training
        rows; see `tag_names`.

    Raises:
        ValueError: A row of training or validation has no words, or not as many tags as words, or a tag that no training row has;
            the message names file and line. Or there is one tag only.
        OSError: A file cannot be read.
    """
    names = []
    if not arguments.has_training:
        names = list(map(str, trained.classes_))
    word_columns: tuple[str, ...] = WORD_COLUMNS
    if arguments.word_column:
        word_columns = (arguments.word_column,)
    tag_columns: tuple[str, ...] = TAG_COLUMNS
    if arguments.tag_column:
        tag_columns = (arguments.tag_column,)

    columns = Columns(
        [word_columns],
        [tag_columns],
        "name it by word_column or tag_column",
        lambda row: [checked_words(column(row, *word_columns))],
        lambda row, inputs: checked_tags(inputs[0], column(row, *tag_columns)),
    )
    read = partial(_rows, arguments=arguments, names=(word_columns[0], tag_columns[0]))
    splits, hub_names = read_splits(arguments, columns, seed, read)
    if "train" in splits:
        tags = list(chain.from_iterable(row.label for row in splits["train"]))
        names = tag_names(tags, hub_names)
        if scheme := tag_scheme(tags):
            say(f"tags of {scheme}: the model learns B- and I-, for pipelines; predictions are {scheme}")
    known = dict.fromkeys(names)
    settle(splits, lambda tags: check_known(to_iob2([tags], known)[0], known))
    add_validation(splits, seed)
    return as_lists(arguments, splits, classes=list(names))


def checked_words(words: Any) -> list[str]:
    """Return the words of a row as a list.

    Raises:
        Missing: There are none, or all of them are empty.
        ValueError: They are no list, or a word is no text.
    """
    words = listed(words)
    if not isinstance(words, list | None):
        raise ValueError(f"the words are {words!r:.80}; give a list of words")
    texts = [checked_text(word, f"word {i}", is_strict=True) for i, word in enumerate(words or (), 1)]
    if not words or not any(text.strip() for text in texts):
        raise Missing(f"the words are {words!r:.80}; give one at least")
    return words


def checked_tags(words: Sequence[str], tags: Any) -> list[str]:
    """Return the tags of the words of a row as texts.

    Raises:
        Missing: There are none, or one is missing.
        ValueError: They are no list, or not as many as the words.
    """
    tags = listed(tags)
    if tags is None:
        raise Missing("the tags are None; give a list of tags")
    if not isinstance(tags, list):
        raise ValueError(f"the tags are {tags!r:.80}; give a list of tags")
    if len(words) != len(tags):
        raise ValueError(f"{len(words)} words and {len(tags)} tags; every word needs one tag")
    return [label_text(tag) for tag in tags]


def tag_names(tags: Sequence[str], names: Sequence[str] | None = None) -> list[str]:
    """Return the tags of a model: those given, or the different tags, as `iob2_names`; a kind with B- has I- too.

    Raises:
        ValueError: As of `class_names`.
    """
    if tag_scheme(names or tags):
        tags = list(map(iob2_tag, tags))
    names = class_names(tags, iob2_names(names or ()), "give tags (tag_column)")
    if is_iob(names):
        inside = [f"I-{name[2:]}" for name in names if name.startswith("B-")]
        names = list(dict.fromkeys(names + inside))
    return names


def _rows(file: str, arguments: TaggedWordArguments, names: tuple[str, str]) -> Iterator[Row]:
    """Rows of a file; those of CoNLL have columns of these names."""
    if suffix_of(Path(file)) in CONLL_SUFFIXES:
        return _conll_rows(file, arguments, names)
    return read_rows(file, is_strict=False)


def _conll_rows(file: str, arguments: TaggedWordArguments, names: tuple[str, str]) -> Iterator[Row]:
    """Rows of a CoNLL file: each sentence with the place of its first line; without tags if its lines have one column.

    A line that begins with "#" and has another number of columns than the lines of words is a comment.
    """
    lines = list(read_lines(file))
    first = next((line for _, line in lines if line.strip() and not line.startswith(("#", "-DOCSTART-"))), "")
    separator = "\t" if "\t" in first else " +"
    num_columns = len(_columns(first, separator)) or 1
    if first and num_columns == 1 and file != arguments.test_file:
        raise ValueError(f"{file} has one column; write on each line a word, a tab or a blank, and its tag")
    word = _number_of(arguments.word_column, file, num_columns, 0)
    tag = _number_of(arguments.tag_column, file, num_columns, -1)
    parts = []
    for place, line in lines:
        columns = _columns(line, separator)
        if len(columns) == num_columns or not line.lstrip(" ").startswith("#"):
            parts.append((place, columns))
    for is_sentence, group in groupby(parts, lambda part: bool(part[1]) and not part[1][0].startswith("-DOCSTART-")):
        if not is_sentence:
            continue
        sentence = list(group)
        bad = next((part for part in sentence if len(part[1]) != num_columns), None)
        if bad:
            yield Row(bad[0], None, f"{len(bad[1])} columns, but the first word has {num_columns}")
            continue
        values = {names[0]: [columns[word] for _, columns in sentence]}
        if num_columns > 1:
            values[names[1]] = [columns[tag] for _, columns in sentence]
        yield Row(sentence[0][0], values)


def _number_of(name: str | None, file: str, num_columns: int, default: int) -> int:
    """The index of the column that an option names by its number from 1."""
    if not name:
        return default
    if name not in map(str, range(1, num_columns + 1)):
        raise ValueError(f"{file}: word_column and tag_column of CoNLL are numbers from 1 to {num_columns}, not {name}")
    return int(name) - 1


def _columns(line: str, separator: str) -> list[str]:
    """Columns of a line; none of an empty one."""
    if not line.strip():
        return []
    return re.split(separator, line.strip(" "))
