"""Rows and texts of files, each with its place (file and line), so that an error can name it.

The `datasets` library and pandas guess the types of columns: a column of dates becomes timestamps, a number becomes a string.
Their errors name neither the file nor the line. So this module parses with `csv`, `json` and pyarrow.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import lzma
import os
from collections.abc import Iterable, Iterator, Sequence
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

    The first line of a CSV file decides whether commas, semicolons or tabs separate its fields. A file with tabs is read as TSV,
    in which a quotation mark is an ordinary character.

    Args:
        file: JSON lines or one JSON list (.jsonl, .json), one JSON object on several lines (.json), CSV, TSV or Parquet. All but
            Parquet may be compressed (.gz, .bz2, .xz, .zst).
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
    elif suffix == ".csv":
        rows = _csv_rows(file, column_names, faults)
    elif suffix == ".tsv":
        rows = _tsv_rows(file, _lines(file), column_names, faults)
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
    lines = _lines(Path(file))
    return _whole(Path(file), ((f"{file}, line {number}", line.rstrip("\r\n")) for number, line in lines))


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
    """Lines with their numbers from 1; only a line feed ends a line."""
    open_stream = (
        lzma.LZMAFile if file.suffix == ".xz" else pyarrow.input_stream
    )  # which detects the other compressions
    with io.BufferedReader(open_stream(str(file))) as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{file}, line {number} is not UTF-8; convert the file, for example with iconv"
                ) from error


def _text_documents(file: Path, sample_by: str) -> Iterator[tuple[str, str]]:
    if sample_by == "document":
        yield f"{file}", "".join(line for _, line in _lines(file))
        return
    document, start = [], 1
    for number, line in _lines(file):
        if sample_by == "line":
            yield f"{file}, line {number}", line.rstrip("\r\n")
        elif line.strip("\r\n"):
            document.append(line)
        else:
            if document:
                yield f"{file}, line {start}", "".join(document)
            document, start = [], number + 1
    if document:
        yield f"{file}, line {start}", "".join(document)


def _json_rows(file: Path, faults: Faults | None) -> Iterator[tuple[str, Any]]:
    lines, is_first = _lines(file), True
    for number, line in lines:
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        if is_first and (line.lstrip().startswith("[") or (_suffix(file) == ".json" and _is_begun(line))):
            content = _parse(line + "".join(rest for _, rest in lines), f"{file}", None)
            rows = content if isinstance(content, list) else [content]
            yield from ((f"{file}, item {item}", row) for item, row in enumerate(rows, 1))
            return
        is_first = False
        if (row := _parse(line, place, faults)) is not FAULTY:
            yield place, row


def _is_begun(line: str) -> bool:
    """Whether JSON continues on the next line."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(line.rstrip())
    except (ValueError, RecursionError):
        pass
    return False


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


def _csv_rows(file: Path, names: Sequence[str] | None, faults: Faults | None) -> Iterator[tuple[str, dict]]:
    csv.field_size_limit(LONGEST_FIELD)
    lines = _lines(file)
    start = list(itertools.islice(lines, 1))
    num_before = int(bool(start) and start[0][1].lower().startswith("sep="))  # Excel's line about the separator
    if num_before:
        start = list(itertools.islice(lines, 1))
    separator = _separator(start[0][1] if start else "", names)
    lines = itertools.chain(start, lines)
    if separator == "\t":
        yield from _tsv_rows(file, lines, names, faults)
        return
    rows = csv.reader((line for _, line in lines), delimiter=separator, strict=True)
    has_header = names is None
    while True:
        place = f"{file}, line {num_before + rows.line_num + 1}"
        try:
            row = next(rows, None)
        except csv.Error as error:
            reason = f"this is not CSV ({error}); double each quotation mark inside a quoted field"
            _report(place, reason, None if names is None else faults, error)
            continue
        if row is None:
            return
        if names is None:
            names = row
            _check_names(file, names)
        elif row:  # a blank line is an empty row
            hint = f"put a text that contains {separator!r} or a line break in quotation marks"
            yield from _named(place, row, names, has_header, hint, faults)


def _separator(first: str, names: Sequence[str] | None) -> str:
    """The separator of CSV: the first line has the most columns by it, or as many as there are names."""
    counts = {separator: len(next(csv.reader([first], delimiter=separator), ())) for separator in SEPARATORS}
    present = [separator for separator in SEPARATORS if counts[separator] > 1] or [","]
    if names is None:
        return max(present, key=counts.get)
    return min(present, key=lambda separator: abs(counts[separator] - len(names)))


def _tsv_rows(
    file: Path, lines: Iterable[tuple[int, str]], names: Sequence[str] | None, faults: Faults | None
) -> Iterator[tuple[str, dict]]:
    has_header = names is None
    for number, line in lines:
        values = line.rstrip("\r\n").split("\t")
        if names is None:
            names = values
            _check_names(file, names)
        elif values != [""] or len(names) == 1:  # not a blank line
            hint = "replace the tabs inside the texts, and correct or remove a truncated line"
            yield from _named(f"{file}, line {number}", values, names, has_header, hint, faults)


def _named(
    place: str, values: list[str], names: Sequence[str], has_header: bool, hint: str, faults: Faults | None
) -> Iterator[tuple[str, dict]]:
    """The row, unless the number of its columns is wrong."""
    if len(values) == len(names) or (len(values) > len(names) and not has_header):
        yield place, dict(zip(names, values))
    else:
        named = f"the first line names {len(names)}" if has_header else f"{len(names)} names are given"
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        _report(place, f"{len(values)} columns, but {named} ({shown}); {hint}", faults)


def _parquet_rows(file: Path, columns: Sequence[str] | None) -> Iterator[tuple[str, dict]]:
    with pyarrow.parquet.ParquetFile(file) as stored:
        names = stored.schema_arrow.names
        _check_names(file, names)
        if missing := [name for name in columns or () if name not in names]:
            raise ValueError(f"{file}: no column {missing[0]!r}; name one of {', '.join(names)}")
        number = 0
        for batch in stored.iter_batches(batch_size=1000, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", row


def _check_names(file: str | Path, names: Sequence[str]) -> None:
    if repeated := [name for i, name in enumerate(names) if name and name in names[:i]]:
        raise ValueError(f"{file}: two columns have the name {repeated[0]!r}; rename one of them")


def _whole(file: Path, rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The same rows; an error names the file."""
    try:
        yield from rows
    except (pyarrow.ArrowException, lzma.LZMAError, EOFError, OSError) as error:
        if number := getattr(error, "errno", None):  # of the operating system, in the words of Python, not of pyarrow
            raise OSError(number, os.strerror(number), str(file)) from error
        raise ValueError(
            f"{file} cannot be read; it is damaged or not of the kind that its suffix says: {error}"
        ) from error
