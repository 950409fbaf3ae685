"""Rows and texts of files, each with its place (file and line), so that an error can name it.

The `datasets` library and pandas guess the types of columns: a column of dates becomes timestamps, a number becomes a string.
Their errors name neither the file nor the line. So this module parses with `csv`, `json` and pyarrow.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import lzma
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

LONGEST_FIELD = (1 << 31) - 1  # characters; Python's default is 131,072, and a C long has 32 bits on Windows
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
SAMPLES = ("line", "paragraph", "document")
# Of CSV, the rarest inside texts first; spreadsheets write semicolons where the comma separates decimals.
SEPARATORS = ("\t", ";", ",")

Faults = list[tuple[str, str]]  # where a row stands, and what is wrong with it


def read_rows(
    file: str | Path,
    columns: Sequence[str] | None = None,
    column_names: Sequence[str] | None = None,
    faults: Faults | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file, each after its place, such as "a.csv, line 3".

    The first line of a CSV file decides whether commas, semicolons or tabs separate its fields. Between tabs, as in TSV, a
    quotation mark is an ordinary character.

    Args:
        file: JSON lines or one JSON list (.jsonl, .json), one JSON object on several lines (.json), CSV, TSV or Parquet. All but
            Parquet are UTF-8, or UTF-16 with a byte order mark, and may be compressed (.gz, .bz2, .xz, .zst).
        columns: Columns to read from Parquet; None reads all.
        column_names: Names of the columns of CSV or TSV without a line of names; further columns of a row are left out. None
            takes the names from the first line.
        faults: List to which a row that cannot be read is added instead of raising an error.

    Returns:
        Places and rows: dicts; of JSON, whatever the line or the item of the list holds.

    Raises:
        ValueError: The file is not in the format of its suffix, the suffix is unknown, or two columns have one name.
        OSError: The file cannot be read.
    """
    file, suffix = Path(file), _suffix(file)
    if suffix == ".parquet":
        rows = _parquet_rows(file, columns)
    elif suffix in (".json", ".jsonl"):
        rows = _json_rows(file, faults)
    elif suffix in (".csv", ".tsv"):
        rows = _separated_rows(file, column_names, faults)
    else:
        raise ValueError(
            f"{file} has the suffix {file.suffix!r}; choose {', '.join(SUFFIXES)}, or .txt for a corpus; all but .parquet may be "
            f"compressed ({', '.join(COMPRESSIONS)})"
        )
    return _whole(file, rows)


def read_texts(
    file: str | Path, column: str = "text", sample_by: str = "paragraph", is_strict: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the texts of a file, each after its place.

    Args:
        file: A file that `read_rows` reads, or text (.txt, which may be compressed).
        column: Column of the text. JSON may also hold strings instead of objects: the texts themselves.
        sample_by: Unit of a document in a .txt file: "line", "paragraph" (blank lines separate documents, as in BERT's own
            format), or "document" for the whole file.
        is_strict: Refuse a missing text and a lone surrogate (half of a surrogate pair). Otherwise only
            the first row must have the column, a missing text is empty, and a lone surrogate becomes a question mark.

    Raises:
        ValueError: As of `read_rows`; or a text is not a string, or the file has no such column.
        OSError: The file cannot be read.
    """
    file = Path(file)
    if _suffix(file) == ".txt":
        yield from _whole(file, _text_documents(file, sample_by))
        return
    for number, (place, row) in enumerate(read_rows(file, [column])):
        if not isinstance(row, dict | str):
            raise ValueError(
                f"{place} has type {type(row).__name__}, not object; write one object on each line, such as "
                f'{{"{column}": "..."}}'
            )
        if isinstance(row, dict):
            if column not in row and (is_strict or number == 0):
                raise ValueError(
                    f"{place}: no column {column!r}; name the column of the texts, one of {', '.join(row)}"
                )
            row = row.get(column)
        yield place, checked_text(row, f"{place}: {column}", is_strict)


def read_text_column(files: Iterable[str | Path], column: str) -> list[tuple[str, str]]:
    """Return the texts of files, in .txt those of the lines, each after its place.

    Raises:
        ValueError: A row has no text in this column, or all texts are white space.
        OSError: A file cannot be read.
    """
    files = list(files)
    texts = [text for file in files for text in read_texts(file, column, "line", is_strict=True)]
    if not any(text.strip() for _, text in texts):
        others = f" and {len(files) - 1:,} other files" if len(files) > 1 else ""
        raise ValueError(f"{files[0]}{others}: no text; give a file with at least one text")
    return texts


def read_lines(file: str | Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a text file, which may be compressed, each after its place.

    Raises:
        ValueError: The file is not UTF-8.
        OSError: The file cannot be read.
    """
    return _whole(Path(file), _text_documents(Path(file), "line"))


def checked_text(text: Any, place: str, is_strict: bool = False) -> str:
    """Return a text that UTF-8 can store; the arguments are as in `read_texts`.

    Raises:
        ValueError: It is not a string; with `is_strict`, it is missing or has a lone surrogate.
    """
    if text is None and not is_strict:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"{place} is {text!r:.80}, a {type(text).__name__}; every text must be a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        if is_strict:
            raise ValueError(
                f"{place} has the lone surrogate {text[error.start]!r} at character {error.start}, which UTF-8 cannot store; "
                "remove it"
            ) from error
        return text.encode("utf-8", "replace").decode()
    return text


def _suffix(file: str | Path) -> str:
    file = Path(file)
    return (Path(file.stem) if file.suffix in COMPRESSIONS else file).suffix.lower()


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1; LF, CR LF and CR end a line, and nothing else."""
    open_stream = lzma.LZMAFile if file.suffix == ".xz" else pyarrow.input_stream  # detects the other compressions
    with io.BufferedReader(open_stream(str(file))) as stream:
        is_utf16 = stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        encoding = "utf-16" if is_utf16 else "utf-8-sig"
        lines = io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline="")
        for number, line in enumerate(lines, 1):
            try:
                line.encode("utf-8")  # which fails for the escapes of bytes that are no text
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{file}, line {number} is not UTF-8; convert the file, for example with iconv"
                ) from error
            yield number, line


def _text_documents(file: Path, sample_by: str) -> Iterator[tuple[str, str]]:
    if sample_by == "line":
        yield from ((f"{file}, line {number}", line.rstrip("\r\n")) for number, line in _lines(file))
    elif sample_by == "document":
        yield f"{file}", "".join(line for _, line in _lines(file))
    else:
        for is_blank, lines in itertools.groupby(_lines(file), lambda line: not line[1].strip("\r\n")):
            numbers, texts = zip(*lines)
            if not is_blank:
                yield f"{file}, line {numbers[0]}", "".join(texts)


def _json_rows(file: Path, faults: Faults | None) -> Iterator[tuple[str, Any]]:
    lines = ((number, line) for number, line in _lines(file) if line.strip())
    for start, first in lines:
        # JSON that is no list and needs more than one line is one object, such as the files of SQuAD.
        is_object = _suffix(file) == ".json" and _parse(first, "", []) is FAULTY
        if first.lstrip().startswith("[") or is_object:
            content = _parse(first + "".join(line for _, line in lines), f"{file}", None)
            items = content if isinstance(content, list) else [content]
            yield from ((f"{file}, item {number}", item) for number, item in enumerate(items, 1))
            return
        for number, line in itertools.chain([(start, first)], lines):
            place = f"{file}, line {number}"
            if (row := _parse(line, place, faults)) is not FAULTY:
                yield place, row


FAULTY = object()  # in the place of a row that cannot be read


def _parse(text: str, place: str, faults: Faults | None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"this is not JSON ({error}); write one object on each line, or one list of objects"
        _report(place, reason, faults, error)
        return FAULTY


def _report(place: str, reason: str, faults: Faults | None, cause: Exception | None = None) -> None:
    if faults is None:
        raise ValueError(f"{place}: {reason}") from cause
    faults.append((place, reason))


def _separated_rows(file: Path, names: Sequence[str] | None, faults: Faults | None) -> Iterator[tuple[str, dict]]:
    """Rows of CSV and TSV; a blank line is no row, except that of an empty text in TSV of one column."""
    lines = _lines(file)
    start, first = next(lines, (1, ""))
    if first.lower().startswith("sep="):  # Excel's line about the separator
        start, first = next(lines, (2, ""))
    if not first:
        return
    separator = "\t" if _suffix(file) == ".tsv" else _separator(first, names)
    quoting, hint = csv.QUOTE_MINIMAL, f"put a text that contains {separator!r} or a line break in quotation marks"
    if separator == "\t":
        quoting, hint = csv.QUOTE_NONE, "replace the tabs inside the texts, and correct or remove a truncated line"
    texts = itertools.chain([first], (line for _, line in lines))
    rows = csv.reader(texts, delimiter=separator, quoting=quoting, strict=True)
    has_header = names is None
    while True:
        num_before = rows.line_num
        place = f"{file}, line {start + num_before}"
        try:
            with _long_fields():
                row = next(rows, None)
        except csv.Error as error:
            num_lines = rows.line_num - num_before
            taken = f" after {num_lines} lines" if num_lines > 1 else ""
            reason = f"this is not CSV ({error}{taken}); double each quotation mark inside a quoted field"
            _report(place, reason, None if names is None else faults, error)
            continue
        if row is None:
            return
        if names is None:
            names = row
            _check_names(file, names)
            continue
        if not row and separator == "\t" and len(names) == 1:
            row = [""]
        if len(row) == len(names) or (len(row) > len(names) and not has_header):
            yield place, dict(zip(names, row))
        elif row:
            named = f"the first line names {len(names)}" if has_header else f"{len(names)} names are given"
            shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            _report(place, f"{len(row)} columns, but {named} ({shown}); {hint}", faults)


def _separator(first: str, names: Sequence[str] | None) -> str:
    """The separator of CSV: the first line has the most columns by it, or as many as there are names."""
    with _long_fields():
        counts = {each: len(next(csv.reader([first], delimiter=each), ())) for each in SEPARATORS}
    present = [separator for separator in SEPARATORS if counts[separator] > 1] or [","]
    if names is None:
        return max(present, key=counts.get)
    return min(present, key=lambda separator: abs(counts[separator] - len(names)))


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lift the limit of a field, which `csv` keeps for the whole process, for as long as one row is read."""
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _parquet_rows(file: Path, columns: Sequence[str] | None) -> Iterator[tuple[str, dict]]:
    with pyarrow.parquet.ParquetFile(file) as stored:
        names = stored.schema_arrow.names
        _check_names(file, names)
        if missing := [name for name in columns or () if name not in names]:
            raise ValueError(f"{file}: no column {missing[0]!r}; name one of {', '.join(names)}")
        rows = (row for batch in stored.iter_batches(1000, columns=columns) for row in batch.to_pylist())
        yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, 1))


def _check_names(file: Path, names: Sequence[str]) -> None:
    if repeated := [name for i, name in enumerate(names) if name and name in names[:i]]:
        raise ValueError(f"{file}: two columns have the name {repeated[0]!r}; rename one of them")


def _whole(file: Path, rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The same rows; an error names the file."""
    try:
        yield from rows
    except (pyarrow.ArrowException, lzma.LZMAError, EOFError, OSError, UnicodeDecodeError) as error:
        if number := getattr(error, "errno", None):  # of the operating system, in the words of Python, not of pyarrow
            raise OSError(number, os.strerror(number), str(file)) from error
        raise ValueError(
            f"{file} cannot be read; it is damaged or not of the kind that its suffix says: {error}"
        ) from error
