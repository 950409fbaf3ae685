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
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
from transformers.utils import logging

from ..files.terminal import LONE_SURROGATES, printable
from .lengths import as_list

logger = logging.get_logger(__name__)

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
SAMPLES = ("line", "paragraph", "document")
SHOWN = 10  # rows in a message
LONGEST_FIELD = (1 << 31) - 1  # characters; Python's default is 131,072, and a C long has 32 bits on Windows
# Of CSV, the rarest inside texts first; spreadsheets write semicolons where the comma separates decimals.
SEPARATORS = ("\t", ";", ",")
# Of TSV whose quotation marks enclose fields: a field in them, where a mark inside is doubled, and a row.
ENCLOSED = r'"[^"]*(?:""[^"]*)*"'
FIELD = rf'(?:{ENCLOSED}|[^"\t]*)'
ROW = re.compile(rf"{FIELD}(?:\t{FIELD})*")
ENCLOSED_ROW = re.compile(rf"{ENCLOSED}(?:\t{ENCLOSED})*[\r\n]*$")

# White space and what nobody sees: NUL, characters without a width, marks of direction, byte order marks of joined files.
EDGES = "".join(filter(str.isspace, map(chr, range(0x3001)))) + "\0\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"
SWALLOWED = 3  # lines inside a field that look like rows, from which a quotation mark is taken for unclosed
ENCLOSING = "quotation marks enclose fields, as pandas, R and Excel write them, first in {}"
ORDINARY = "quotation marks are characters of the texts, as in GLUE, first in {}"
SWALLOWING = "rows with a field whose lines all look like rows: {}; if they are rows, close the quotation mark there"


class Fault(NamedTuple):
    """What is wrong with a row.

    Args:
        place: Where it stands, such as "a.csv, line 3".
        reason: What is wrong with it.
        num_lines: Lines of the file that it takes.
    """

    place: str
    reason: str
    num_lines: int = 1


Faults = list[Fault]
Rows = Iterator[tuple[str, Any]]  # each after its place


def read_rows(
    file: str | Path,
    columns: Sequence[str] | None = None,
    column_names: Sequence[str] | None = None,
    faults: Faults | None = None,
    encoding: str | None = None,
) -> Rows:
    """Yield the rows of a file, each after its place, such as "a.csv, line 3".

    The first line of a CSV file decides whether commas, semicolons or tabs separate its fields. Between tabs, as in TSV,
    quotation marks enclose fields if the whole file is as pandas, R or Excel write it. Otherwise they are ordinary characters, as
    in GLUE. A warning says which, if a field begins with one.

    Args:
        file: JSON lines or one JSON list (.jsonl, .json), one JSON object on several lines (.json), CSV, TSV or Parquet. All but
            Parquet are UTF-8, or UTF-16 with a byte order mark, and may be compressed (.gz, .bz2, .xz, .zst).
        columns: Columns to read from Parquet; None reads all.
        column_names: Names of the columns of CSV or TSV without a line of names; a row with another number of columns is a
            fault. None takes the names from the first line.
        faults: List to which a row that cannot be read is added instead of raising an error.
        encoding: Encoding of text; by default UTF-8, or UTF-16 with a byte order mark.

    Returns:
        Places and rows: dicts; of JSON, whatever the line or the item of the list holds. Rows of CSV and TSV that repeat the
        names of the columns are left out, and so are NUL characters. Warnings name the lines of both, and those of rows with a
        field whose lines all look like rows, as an unclosed quotation mark leaves them. If several columns of CSV or TSV have no
        name, their numbers name them, such as "column 3".

    Raises:
        ValueError: The file is not in the format of its suffix, the suffix is unknown, two columns have one name, or the line of
            their names has a NUL character.
        OSError: The file cannot be read.
    """
    file, suffix = Path(file), _suffix(Path(file))
    if suffix == ".parquet":
        rows = _parquet_rows(file, columns)
    elif suffix in (".json", ".jsonl"):
        rows = _json_rows(file, encoding)
    elif suffix in (".csv", ".tsv"):
        rows = _separated_rows(file, column_names, encoding)
    else:
        known = f"{', '.join(SUFFIXES)}, or .txt for a corpus"
        raise ValueError(f"{file} has the suffix {file.suffix!r}; choose {known}; {', '.join(COMPRESSIONS)} may follow")
    return _readable(file, rows, faults)


def read_texts(
    file: str | Path,
    column: str = "text",
    sample_by: str = "paragraph",
    is_strict: bool = False,
    encoding: str | None = None,
) -> Rows:
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
    if _suffix(Path(file)) == ".txt":
        yield from _readable(file, _text_documents(Path(file), sample_by, encoding))
        return
    for number, (place, row) in enumerate(read_rows(file, [column], encoding=encoding)):
        if not isinstance(row, dict | str):
            raise ValueError(f"{place} has type {type(row).__name__}, not object; write one object on each line")
        if isinstance(row, dict):
            if column not in row and (is_strict or number == 0):
                raise ValueError(f"{place}: no column {column!r}; name that of the texts, one of {', '.join(row)}")
            row = row.get(column)
        yield place, checked_text(row, f"{place}: {column}", is_strict)


def read_text_column(files: Iterable[str | Path], column: str) -> list[tuple[str, str]]:
    """Return the texts of files, in .txt those of the lines, each after its place.

    Raises:
        ValueError: A row has no text in this column, or all texts are white space.
        OSError: A file cannot be read.
    """
    files = as_list(files)
    texts = [text for file in files for text in read_texts(file, column, "line", is_strict=True)]
    if not any(text.strip() for _, text in texts):
        raise ValueError(f"{', '.join(map(str, files[:SHOWN]))}: no text; give a file with at least one text")
    return texts


def read_lines(file: str | Path, encoding: str | None = None) -> Rows:
    """Yield the lines of a text file, which may be compressed, each after its place; encoding and errors as of `read_rows`."""
    return _readable(file, _text_documents(Path(file), "line", encoding))


def checked_text(text: Any, place: str, is_strict: bool = False) -> str:
    """Return a text that UTF-8 can store; arguments and errors are those of `read_texts`."""
    if text is None and not is_strict:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"{place} is {text!r:.80}, a {type(text).__name__}; every text must be a string")
    storable = _storable(text)
    if is_strict and storable != text:
        raise ValueError(f"{place} has a lone surrogate, which UTF-8 cannot store; remove it")
    return storable


def trimmed(text: str) -> str:
    """Return the text without white space and invisible characters at its ends."""
    return text.strip(EDGES)


def _storable(text: str) -> str:
    """The text with question marks in place of lone surrogates, such as the escapes of bytes that are not UTF-8."""
    return text.encode(errors="replace").decode()


def _readable(file: str | Path, rows: Rows, faults: Faults | None = None) -> Rows:
    """The rows that have no fault; each error names the file."""
    try:
        for place, row in rows:
            fault = Fault(place, str(row)) if isinstance(row, ValueError) else row
            if not isinstance(fault, Fault):
                yield place, row
            elif faults is None:
                raise ValueError(f"{place}: {fault.reason}")
            else:
                faults.append(fault)
    except (pyarrow.ArrowException, lzma.LZMAError, EOFError, OSError, UnicodeDecodeError) as error:
        if number := getattr(error, "errno", None):  # of the operating system, in the words of Python, not of pyarrow
            raise OSError(number, os.strerror(number), str(file)) from error
        raise ValueError(f"{file} cannot be read; it is damaged, or its suffix is wrong: {error}") from error


def _suffix(file: Path) -> str:
    return (Path(file.stem) if file.suffix in COMPRESSIONS else file).suffix.lower()


def _opened(file: Path) -> io.BufferedReader:
    """The bytes of a file, without its compression."""
    open_stream = lzma.LZMAFile if file.suffix == ".xz" else pyarrow.input_stream  # detects the other compressions
    return io.BufferedReader(open_stream(str(file)))


def _lines(file: Path, encoding: str | None) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1; LF, CR LF and CR end a line, and nothing else."""
    with _opened(file) as stream:
        is_utf16 = stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        used = encoding or ("utf-16" if is_utf16 else "utf-8-sig")
        for number, line in enumerate(io.TextIOWrapper(stream, used, "surrogateescape", newline=""), 1):
            if _storable(line) != line:
                byte = ord(LONE_SURROGATES.findall(line)[0]) - 0xDC00  # as surrogateescape writes it
                remedy = "save it as UTF-8, for example: iconv -f CP1252 -t UTF-8 FILE > NEW_FILE"
                raise ValueError(f"{file}, line {number} is not {encoding or 'UTF-8'} (byte 0x{byte:X}); {remedy}")
            yield number, line


def _text_documents(file: Path, sample_by: str, encoding: str | None) -> Rows:
    if sample_by == "line":
        yield from ((f"{file}, line {number}", line.rstrip("\r\n")) for number, line in _lines(file, encoding))
    elif sample_by == "document":
        yield f"{file}", "".join(line for _, line in _lines(file, encoding))
    else:
        for is_blank, lines in itertools.groupby(_lines(file, encoding), lambda line: not line[1].strip("\r\n")):
            numbers, texts = zip(*lines)
            if not is_blank:
                yield f"{file}, line {numbers[0]}", "".join(texts)


def _json_rows(file: Path, encoding: str | None) -> Rows:
    lines = _lines(file, encoding)
    first = next((line for line in lines if line[1].strip()), None)
    if first is None:
        return
    # A list, or an object on several lines such as a file of SQuAD.
    if first[1].lstrip().startswith("[") or (_suffix(file) == ".json" and isinstance(_parsed(first[1]), ValueError)):
        content = _parsed("".join(line for _, line in (first, *lines)))
        if isinstance(content, ValueError):
            raise ValueError(f"{file}: {content}") from content
        items = content if isinstance(content, list) else [content]
        yield from ((f"{file}, item {number}", item) for number, item in enumerate(items, 1))
        return
    for number, line in itertools.chain([first], lines):
        if line.strip():
            yield f"{file}, line {number}", _parsed(line)


def _parsed(text: str) -> Any:
    """The value of JSON, or an error in its place."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return ValueError(f"this is not JSON ({error}); write one object on each line, or one list of objects")


def _separated_rows(file: Path, names: Sequence[str] | None, encoding: str | None) -> Rows:
    """Rows of CSV and TSV, or faults in their places; a blank line is no row, except that of an empty text in a single column."""
    lines = itertools.dropwhile(lambda line: names is None and not line[1].strip("\r\n"), _lines(file, encoding))
    start, first = next(lines, (1, ""))
    if first.lower().startswith("sep="):  # Excel's line about the separator
        start, first = next(lines, (2, ""))
    if not first:
        return
    separator = "\t" if _suffix(file) == ".tsv" else _separator(first, names)
    remark = ""
    if separator == "\t":
        remark = ENCLOSING if _is_enclosing(file, first, encoding) else ORDINARY
    quoting, remedy = (csv.QUOTE_NONE, "replace") if remark == ORDINARY else (csv.QUOTE_MINIMAL, "quote")
    has_header, odd = names is None, defaultdict(list)
    header: Sequence[str] = names or ()
    names = _filled(file, header)
    if has_header and "\0" in first:
        raise ValueError(f"{file}, line {start} has NUL characters, as UTF-16 without its mark; save it as UTF-8")

    texts = _texts(itertools.chain([(start, first)], lines), remark, odd)
    # mypy widens the two constants to int
    rows = csv.reader(texts, delimiter=separator, quoting=quoting, strict=True)  # type: ignore[arg-type]
    while True:
        num_before = rows.line_num
        place = f"{file}, line {start + num_before}"
        row = _next_row(rows)
        num_lines = rows.line_num - num_before
        taken = f" after {num_lines} lines" if num_lines > 1 else ""
        closing = "close the quotation mark that opens here, " if taken else ""
        if row is None:
            break
        if row == [] and len(names) == 1:
            row = [""]
        if not row:
            continue
        if isinstance(row, csv.Error):
            fault = f"this is not CSV ({row}{taken}); {closing}double each quotation mark inside a quoted field"
            if not names:
                raise ValueError(f"{place}: {fault}") from row
            yield place, Fault(place, fault, num_lines)
        elif not names:
            header = list(map(trimmed, row))
            names = _filled(file, header)
        elif _is_repeated(row, header):
            odd["rows that repeat the names of the columns are left out: {}"].append(f"line {start + num_before}")
        elif len(row) == len(names):
            if num_lines > SWALLOWED and any(_is_swallowing(field, separator, len(row)) for field in row):
                odd[SWALLOWING].append(f"line {start + num_before} ({num_lines} lines)")
            yield place, dict(zip(names, row))
        else:
            named = f"the first line names {len(names)}" if has_header else f"{len(names)} names are given"
            fault = f"{len(row)} columns{taken}, but {named} ({', '.join(names[:10])}); {closing}{remedy} each {separator!r}"
            yield place, Fault(place, f"{fault} inside a text, and correct a truncated line", num_lines)
    _report(file, odd)


def _report(file: Path, odd: dict[str, list[str]]) -> None:
    for what, places in odd.items():
        shown = ", ".join(places[:SHOWN]) + (f", ... ({len(places):,})" if places[SHOWN:] else "")
        logger.warning(printable(f"{file}: {what.format(shown)}"))


def _texts(lines: Iterable[tuple[int, str]], remark: str, odd: dict[str, list[str]]) -> Iterator[str]:
    """Lines without NUL characters; `odd` gets their places, and the first place of a remark about quotation marks of TSV."""
    for number, line in lines:
        if remark and '\t"' in f"\t{line}":
            odd.setdefault(remark, [f"line {number}"])
        if "\0" in line:  # `csv` of Python 3.10 refuses it
            odd["NUL characters are left out: {}"].append(f"line {number}")
        yield line.replace("\0", "")


def _is_enclosing(file: Path, first: str, encoding: str | None) -> bool:
    """Whether quotation marks of TSV enclose fields: each row fits, and so does a rule of pandas, R or Excel."""
    with _opened(file) as stream:  # most files have no mark, and are not read twice line by line
        if not any(b'"' in block for block in iter(partial(stream.read, 1 << 20), b"")):
            return False
    is_open, is_of_pandas, is_of_excel = False, True, True
    for _, line in _lines(file, encoding):
        # A field of several lines ends, and begins again, at each line end.
        row = '"\n' * is_open + line.strip("\r\n\ufeff")
        is_open = row.count('"') % 2 == 1
        row += '\n"' * is_open
        if not ROW.fullmatch(row):
            return False
        # pandas encloses a field with a mark, a tab or a line end; Excel also one with a comma, and each of these.
        others = re.findall(r'(?<!")"[^"\t\n]+"(?!")', row)
        is_of_pandas &= not others
        is_of_excel &= "," not in re.sub(ENCLOSED, "", row) and all("," in field for field in others)
    return not is_open and bool(is_of_pandas or is_of_excel or ENCLOSED_ROW.match(first))  # R encloses all names


def _is_repeated(row: list[str], names: Sequence[str]) -> bool:
    """Whether a row repeats the names of the columns; a byte order mark of joined files hides quotation marks from `csv`."""
    is_alike = len(row) >= len(names) and names[0].lower() in row[0].lower()  # fast, since it is asked for each row
    return is_alike and all(_plain(cell) == _plain(name) for cell, name in zip(row, names))


def _plain(cell: str) -> str:
    return trimmed(cell).strip('"').casefold()


def _is_swallowing(field: str, separator: str, num_columns: int) -> bool:
    """Whether the lines inside a field have as many columns as the rows; the first and the last may be parts of a row."""
    lines, num_separators = field.splitlines()[1:-1], num_columns - 1
    is_alike = {line.count(separator) for line in lines} == {num_separators}
    return len(lines) >= SWALLOWED and num_separators > 0 and is_alike


def _next_row(rows: Iterator[list[str]]) -> list[str] | csv.Error | None:
    """A row of any length, an error in its place, or None at the end; `csv` keeps the longest length for the whole process."""
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        return next(rows, None)
    except csv.Error as error:
        return error
    finally:
        csv.field_size_limit(before)


def _separator(first: str, names: Sequence[str] | None) -> str:
    """The separator of CSV: the first line has as many columns by it as there are names, or the most."""
    rows = {each: _next_row(csv.reader([first], delimiter=each)) for each in SEPARATORS}
    counts = {each: len(row) for each, row in rows.items() if isinstance(row, list) and len(row) > 1}
    wanted = len(names) if names else LONGEST_FIELD
    return min(counts, key=lambda each: abs(counts[each] - wanted), default=",")


def _parquet_rows(file: Path, columns: Sequence[str] | None) -> Rows:
    with pyarrow.parquet.ParquetFile(file) as stored:
        names = stored.schema_arrow.names
        _check_names(file, names)
        if missing := [name for name in columns or () if name not in names]:
            raise ValueError(f"{file}: no column {missing[0]!r}; name one of {', '.join(names)}")
        rows = (row for batch in stored.iter_batches(1000, columns=columns) for row in batch.to_pylist())
        yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, 1))


def _filled(file: Path, header: Sequence[str]) -> list[str]:
    """The names of columns; the number of a column names it if several have no name."""
    names = list(header)
    for i, name in enumerate(header):
        if not name and header.count("") > 1:
            names[i] = f"column {i + 1}"
            while names[i] in header:
                names[i] += "_"
    _check_names(file, names)
    return names


def _check_names(file: Path, names: Sequence[str]) -> None:
    if repeated := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"{file}: two columns have the name {repeated[0]!r}; rename one of them")
