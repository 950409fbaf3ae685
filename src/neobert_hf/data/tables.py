"""Rows of JSON lines, CSV, TSV and Parquet, each with its line number, so that an error can name it."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet

from .texts import check_texts

LONGEST_FIELD = (1 << 31) - 1  # characters; Python's default is 131,072, and a C long has 32 bits on Windows
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def numbered_rows(file: str | Path) -> Iterator[tuple[int, dict]]:
    """Yield the rows of a file as dicts, with their line numbers (row numbers in Parquet), both from 1.

    The first line of CSV and TSV has the names of the columns. A TSV file has no quotes: a quotation mark is a character.

    Raises:
        ValueError: The file is not in the format of its suffix, the suffix is unknown, or two columns have one name; the message
            names the line.
        OSError: The file cannot be read.
    """
    file = Path(file)
    if file.suffix == ".parquet":
        return _parquet_rows(file)
    if file.suffix in (".jsonl", ".json"):
        return _json_lines(file)
    if file.suffix == ".csv":
        return _csv_lines(file)
    if file.suffix == ".tsv":
        return tab_separated(file)
    raise ValueError(f"{file} has the suffix {file.suffix!r}; choose {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")


def read_text_column(files: Iterable[str | Path], column: str) -> list[tuple[str, str]]:
    """Return the texts in a column of files in the formats of `numbered_rows`, each after its file and line.

    Raises:
        ValueError: A row has no text in this column, or there are no rows; the message names the line.
        OSError: A file cannot be read.
    """
    texts = []
    for file in files:
        for number, row in numbered_rows(file):
            where = f"{file}, line {number}"
            if not isinstance(row, dict) or column not in row:
                raise ValueError(f"{where}: no column {column!r}; name the column of the texts")
            try:
                check_texts([row[column]])
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            texts.append((where, row[column]))
    if not texts:
        raise ValueError(f"{', '.join(map(str, files))}: no rows; give a file with at least one text")
    return texts


def tab_separated(
    file: str | Path, names: Sequence[str] | None = None, truncated: list[int] | None = None
) -> Iterator[tuple[int, dict]]:
    """Yield the rows of a file whose columns are separated by tabs, without quotes, with their line numbers from 1.

    Args:
        file: The file, UTF-8 with or without a byte order mark.
        names: Names of the columns of a file whose first line is a row, which may have further columns; they are ignored. None
            reads the names from the first line.
        truncated: A list that receives the numbers of lines with too few columns, which are then left out. None: such a line
            is an error.

    Raises:
        ValueError: A line has fewer columns than there are names, or more than the first line, or the file is not UTF-8.
        OSError: The file cannot be read.
    """
    has_header = names is None
    with Path(file).open(encoding="utf-8-sig", newline="\n") as stream:
        try:
            for number, line in enumerate(stream, 1):
                values = line.rstrip("\r\n").split("\t")
                if names is None:
                    names = values
                    _check_names(file, names)
                elif has_header and len(values) > len(names):
                    raise ValueError(
                        f"{file}, line {number}: {len(values)} columns, but the first line names {len(names)} "
                        f"({', '.join(names)}); replace the tabs inside the texts"
                    )
                elif len(values) >= len(names):
                    yield number, dict(zip(names, values))
                elif truncated is not None:
                    truncated.append(number)
                else:
                    raise ValueError(
                        f"{file}, line {number}: {len(values)} columns instead of {len(names)} ({', '.join(names)}); the line "
                        "is truncated or not separated by tabs; correct or remove it"
                    )
        except UnicodeDecodeError as error:
            raise _not_utf8(file, error) from error


def _check_names(file, names):
    if repeated := [name for i, name in enumerate(names) if name and name in names[:i]]:
        raise ValueError(f"{file}: two columns have the name {repeated[0]!r}; rename one of them")


def _not_utf8(file, error):
    return ValueError(f"{file} is not UTF-8 ({error}); convert it, for example with iconv")


def _parquet_rows(file):
    try:
        rows = pyarrow.parquet.ParquetFile(file)
        _check_names(file, rows.schema_arrow.names)
        batches = rows.iter_batches()
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} is not a readable Parquet file: {error}") from error


def _json_lines(file):
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{file}, line {number}: not JSON ({error})") from error


def _csv_lines(file):
    csv.field_size_limit(LONGEST_FIELD)
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            _check_names(file, reader.fieldnames or [])
            for row in reader:
                if None in row:
                    raise ValueError(
                        f"{file}, line {reader.line_num}: {len(row) - 1 + len(row[None])} columns, but the first line names "
                        f"{len(row) - 1}; put a text that contains a comma in quotation marks"
                    )
                yield reader.line_num, row
        except UnicodeDecodeError as error:  # raised when a block is read, before its line
            raise _not_utf8(file, error) from error
        except csv.Error as error:
            raise ValueError(f"{file}, line {reader.line_num + 1}: {error}") from error
