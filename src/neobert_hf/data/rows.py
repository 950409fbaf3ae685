"""Rows and texts of files, each with its place (file and line), so that an error can name it.

The `datasets` library and pandas guess the types of columns: a column of dates becomes timestamps, a number becomes a string.
Their errors name neither the file nor the line. So `csv`, `json` and pyarrow parse here. The parser of pyarrow for CSV is no
choice: it joins rows without a word where a quotation mark is not closed.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ..files.messages import first_of
from ..files.terminal import LONE_SURROGATES
from .lengths import as_list

CONVERT = "save it as UTF-8, for example: iconv -f CP1252 -t UTF-8 FILE > NEW_FILE"
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
BY_NAME = "name it by text_columns, label_column or label_columns"
SPREADSHEETS = (".xlsx", ".xls", ".ods")
SAMPLES = ("line", "paragraph", "document")
LONGEST_FIELD = (1 << 31) - 1  # characters; Python's default is 131,072, and a C long has 32 bits on Windows
# Of CSV, the rarest inside texts first; spreadsheets write semicolons where the comma separates decimals.
SEPARATORS = ("\t", ";", ",")
# Of TSV whose quotation marks enclose fields: a field in them, where a mark inside is doubled, and a row.
ENCLOSED = r'"[^"]*(?:""[^"]*)*"'
FIELD = rf'(?:{ENCLOSED}|[^"\t]*)'
ROW = re.compile(rf"{FIELD}(?:\t{FIELD})*")
ENCLOSED_ROW = re.compile(rf"{ENCLOSED}(?:\t{ENCLOSED})*[\r\n]*$")
NOT_DOUBLED = re.compile(r'(?<!")"[^"\t\n]+"(?!")')  # a field in marks without a mark, a tab or a line end inside

# White space and what nobody sees: NUL, characters without a width, marks of direction, byte order marks of joined files.
EDGES = "".join(filter(str.isspace, map(chr, range(0x3001)))) + "\0\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"


@dataclass
class Row:
    """A row of a file.

    Args:
        place: Where it stands, such as "a.csv, line 3".
        values: A dict of its columns; of JSON, whatever the line or the item of the list holds.
        fault: What is wrong with the row, or with its label; empty if nothing is.
        inputs: What a training takes of it beside the label; None if it has no text.
        label: Its label; None if it is missing or has a fault.
    """

    place: str
    values: Any
    fault: str = ""
    inputs: list | None = None
    label: Any = None


def read_rows(
    file: str | Path,
    columns: Sequence[str] | None = None,
    column_names: Sequence[str] | None = None,
    encoding: str | None = None,
    is_strict: bool = True,
) -> Iterator[Row]:
    """Yield the rows of a file.

    The first line of a CSV file decides whether commas, semicolons or tabs separate its fields. Between tabs, as in TSV,
    quotation marks enclose fields if the whole file is as pandas, R or Excel write it. Otherwise they are ordinary characters, as
    in GLUE.

    Args:
        file: JSON lines or one JSON list (.jsonl, .json), one JSON object on several lines (.json), CSV, TSV or Parquet. All but
            Parquet are UTF-8, or UTF-16 with a byte order mark, and may be compressed (.gz, .bz2, .xz, .zst).
        columns: Columns to read from Parquet; None reads all.
        column_names: Names of the columns of CSV or TSV without a line of names. None takes the names from the first line.
        encoding: Encoding of text; by default UTF-8, or UTF-16 with a byte order mark.
        is_strict: Raise ValueError for a row that cannot be read, such as one with another number of columns. Otherwise the row
            says its fault, and the next one follows.

    Raises:
        ValueError: The file is not in the format of its suffix, the suffix is unknown, or two columns have one name.
        OSError: The file cannot be read.
    """
    file = Path(file)
    suffix = suffix_of(file)
    if suffix == ".parquet":
        rows = _parquet_rows(file, columns)
    elif suffix in (".json", ".jsonl"):
        rows = _json_rows(file, encoding)
    elif suffix in (".csv", ".tsv"):
        rows = _separated_rows(file, column_names, encoding)
    else:
        remedy = "save it as CSV" if suffix in SPREADSHEETS else f"choose one of {', '.join(SUFFIXES)}"
        raise ValueError(f"{file} has the suffix {file.suffix!r}; {remedy}")
    with _naming(file):
        for row in rows:
            if row.fault and is_strict:
                raise ValueError(f"{row.place}: {row.fault}")
            yield row


def read_texts(
    file: str | Path,
    column: str = "text",
    sample_by: str = "paragraph",
    is_strict: bool = False,
    encoding: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield the texts of a file, each after its place.

    Args:
        file: A file that `read_rows` reads, or text (.txt, which may be compressed).
        column: Column of the text. JSON may also hold strings instead of objects: the texts themselves.
        sample_by: Unit of a document in a .txt file: "line", "paragraph" (blank lines separate documents, as in BERT's own
            format), or "document" for the whole file.
        is_strict: Refuse a missing text and a lone surrogate (half of a surrogate pair). Otherwise only the first row must have
            the column, a missing text is empty, and a lone surrogate becomes a question mark.
        encoding: As of `read_rows`.

    Raises:
        ValueError: As of `read_rows`; or a text is not a string, or the file has no such column.
        OSError: The file cannot be read.
    """
    file = Path(file)
    if suffix_of(file) == ".txt":
        with _naming(file):
            yield from _text_documents(file, sample_by, encoding)
        return
    must_have = True
    for row in read_rows(file, [column], encoding=encoding):
        text = row.values
        if not isinstance(text, dict | str):
            raise ValueError(f"{row.place} has type {type(text).__name__}, not object; write one object on each line")
        if isinstance(text, dict):
            if must_have and column not in text:
                raise ValueError(f"{row.place}: no column {column!r}; name that of the texts, one of {first_of(text)}")
            text = text.get(column)
        must_have = is_strict
        yield row.place, checked_text(text, f"{row.place}: {column}", is_strict)


def read_text_column(files: Iterable[str | Path], column: str) -> list[tuple[str, str]]:
    """Return the texts of files, in .txt those of the lines, each after its place.

    Raises:
        ValueError: A row has no text in this column, or all texts are white space.
        OSError: A file cannot be read.
    """
    files = as_list(files)
    texts = [text for file in files for text in read_texts(file, column, "line", is_strict=True)]
    if not any(text.strip() for _, text in texts):
        raise ValueError(f"{first_of(files)}: no text; give a file with at least one text")
    return texts


def read_lines(file: str | Path, encoding: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield the lines of a text file, which may be compressed, each after its place; encoding and errors as of `read_rows`."""
    with _naming(file):
        yield from _text_documents(Path(file), "line", encoding)


def check_columns(place: str, names: Iterable[str], wanted: Iterable[Sequence[str]], remedy: str = BY_NAME) -> None:
    """Raise ValueError if rows lack a column.

    Args:
        place: Place of the first row.
        names: Names of their columns.
        wanted: Of each column the names that it may have.
        remedy: What to do.
    """
    names = list(names)
    for of_column in wanted:
        if not {*of_column}.intersection(names):
            lacking = f"no column {' or '.join(map(repr, of_column))} among {first_of(names)}"
            raise ValueError(f"{place}: {lacking}; {remedy}")


def checked_text(text: Any, place: str, is_strict: bool = False) -> str:
    """Return a text that UTF-8 can store; arguments and errors are those of `read_texts`."""
    if text is None and not is_strict:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"{place} is {text!r:.80}, a {type(text).__name__}; every text must be a string")
    if is_strict and LONE_SURROGATES.search(text):
        raise ValueError(f"{place} has a lone surrogate, which UTF-8 cannot store; remove it")
    return LONE_SURROGATES.sub("?", text)


def trimmed(text: str) -> str:
    """Return the text without white space and invisible characters at its ends."""
    return text.strip(EDGES)


def suffix_of(file: Path) -> str:
    """Return the suffix of a file in lower case, without that of a compression."""
    if file.suffix in COMPRESSIONS:
        file = Path(file.stem)
    return file.suffix.lower()


@contextmanager
def _naming(file: str | Path) -> Iterator[None]:
    """Name the file in errors of decoders and of pyarrow; those of the operating system name it themselves."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not {error.encoding} ({error}); {CONVERT}") from error
    except (pyarrow.ArrowException, csv.Error, lzma.LZMAError, EOFError, OSError) as error:
        if getattr(error, "errno", None):
            raise
        raise ValueError(f"{file} cannot be read; it is damaged, or its suffix is wrong: {error}") from error


def _opened(file: Path) -> io.BufferedReader:
    """The bytes of a file, without its compression."""
    open_stream = lzma.LZMAFile if file.suffix == ".xz" else pyarrow.input_stream  # detects the other compressions
    return io.BufferedReader(open_stream(str(file)))


def _encoding_of(stream: io.BufferedReader) -> str:
    """UTF-16 with a byte order mark, or else UTF-8, which may have one."""
    has_mark = stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return "utf-16" if has_mark else "utf-8-sig"


def _lines(file: Path, encoding: str | None) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1; LF, CR LF and CR end a line, and nothing else."""
    with _opened(file) as stream:
        used = encoding or _encoding_of(stream)
        for number, line in enumerate(io.TextIOWrapper(stream, used, "surrogateescape", newline=""), 1):
            if LONE_SURROGATES.search(line):  # as surrogateescape writes a byte that is none of the encoding
                raise ValueError(f"{file}, line {number} is not {encoding or 'UTF-8'}; {CONVERT}")
            yield number, line


def _text_documents(file: Path, sample_by: str, encoding: str | None) -> Iterator[tuple[str, str]]:
    lines = _lines(file, encoding)
    if sample_by == "line":
        for number, line in lines:
            yield f"{file}, line {number}", line.rstrip("\r\n")
    elif sample_by == "document":
        yield f"{file}", "".join(line for _, line in lines)
    else:
        for is_blank, group in itertools.groupby(lines, lambda line: not line[1].strip("\r\n")):
            numbers, texts = zip(*group)
            if not is_blank:
                yield f"{file}, line {numbers[0]}", "".join(texts)


def _json_rows(file: Path, encoding: str | None) -> Iterator[Row]:
    lines = _lines(file, encoding)
    start, first = next((line for line in lines if line[1].strip()), (1, ""))
    is_whole = first.lstrip().startswith("[")
    if suffix_of(file) == ".json":  # an object on several lines, such as a file of SQuAD
        is_whole = is_whole or bool(_json_row("", first).fault)
    if first and is_whole:
        whole = _json_row(f"{file}", first + "".join(line for _, line in lines))
        if whole.fault:
            yield whole
            return
        items = whole.values if isinstance(whole.values, list) else [whole.values]
        for number, item in enumerate(items, 1):
            yield Row(f"{file}, item {number}", item)
        return
    for number, line in itertools.chain([(start, first)], lines):
        if line.strip():
            yield _json_row(f"{file}, line {number}", line)


def _json_row(place: str, text: str) -> Row:
    try:
        return Row(place, json.loads(text))
    except (ValueError, RecursionError) as error:
        return Row(place, None, f"this is not JSON ({error}); write one object on each line, or one list of objects")


def _parquet_rows(file: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    with pyarrow.parquet.ParquetFile(file) as stored:
        names = stored.schema_arrow.names
        _check_names(file, names)
        chosen = [name for name in columns or () if name in names]
        number = 0
        for batch in stored.iter_batches(1000, columns=chosen or None):
            for values in batch.to_pylist():
                number += 1
                yield Row(f"{file}, row {number}", values)


def _separated_rows(file: Path, names: Sequence[str] | None, encoding: str | None) -> Iterator[Row]:
    """Rows of CSV and TSV; a blank line is no row, except that of an empty text in a single column."""
    csv.field_size_limit(LONGEST_FIELD)  # of the whole process
    lines = _lines(file, encoding)
    start, first = next((line for line in lines if line[1].strip("\r\n")), (1, ""))
    if first.lower().startswith("sep="):  # Excel's line about the separator
        start, first = next(lines, (1, ""))
    if not first:
        return
    separator = "\t" if suffix_of(file) == ".tsv" else _separator(first, names)
    quoting: Any = csv.QUOTE_MINIMAL
    if separator == "\t" and not _is_enclosing(file, first, encoding):
        quoting = csv.QUOTE_NONE
    texts = itertools.chain([first], (line for _, line in lines))
    rows = csv.reader(texts, delimiter=separator, quoting=quoting, strict=True)
    if names is None:
        names = _named(next(rows))
    _check_names(file, names)
    remedy = f"quote or replace each {separator!r} inside a text, and close each quotation mark"
    for before, fields in _parsed(rows):
        row = Row(f"{file}, line {start + before}", None)
        lines_of_row = f"in {rows.line_num - before} lines"
        if isinstance(fields, csv.Error):
            row.fault = f"this is not CSV ({fields} {lines_of_row}); {remedy}"
        elif len(fields) == len(names):
            row.values = dict(zip(names, fields))
        elif not fields and len(names) == 1:
            row.values = {names[0]: ""}
        elif not fields:
            continue
        else:
            found = f"{len(fields)} columns {lines_of_row}, but {len(names)} columns have a name"
            row.fault = f"{found} ({first_of(names)}); {remedy}"
        yield row


def _parsed(rows: Any) -> Iterator[tuple[int, list[str] | csv.Error]]:
    """Rows of a reader of `csv`, and its errors in their places, each after the number of lines before it."""
    while True:
        before = rows.line_num
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield before, error
        else:
            yield before, fields


def _is_enclosing(file: Path, first: str, encoding: str | None) -> bool:
    """Whether quotation marks of TSV enclose fields: each row fits, and so does a rule of pandas, R or Excel."""
    is_open = False
    is_of_pandas = True
    is_of_excel = True
    for _, line in _lines(file, encoding):
        row = line.strip("\r\n")
        # A field of several lines ends, and begins again, at each line end.
        if is_open:
            row = f'"\n{row}'
        is_open = row.count('"') % 2 == 1
        if is_open:
            row = f'{row}\n"'
        if not ROW.fullmatch(row):
            return False
        # pandas encloses a field with a mark, a tab or a line end; Excel also one with a comma, and each of these.
        others = NOT_DOUBLED.findall(row)
        if others:
            is_of_pandas = False
        if "," in re.sub(ENCLOSED, "", row) or not all("," in field for field in others):
            is_of_excel = False
    return not is_open and bool(is_of_pandas or is_of_excel or ENCLOSED_ROW.match(first))  # R encloses all names


def _separator(first: str, names: Sequence[str] | None) -> str:
    """The separator of CSV: the first line has as many columns by it as there are names, or the most."""
    bare = re.sub(ENCLOSED, "", first)
    wanted = len(names) - 1 if names else len(first)
    found = [each for each in SEPARATORS if each in bare]
    return min(found, key=lambda each: abs(bare.count(each) - wanted), default=",")


def _named(header: Sequence[str]) -> list[str]:
    names = [trimmed(name) for name in header]
    if names.count("") == 1:  # that of an index
        return names
    return [name or f"column {number}" for number, name in enumerate(names, 1)]


def _check_names(file: Path, names: Sequence[str]) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"{file}: two columns have the name {name!r}; rename one of them")
