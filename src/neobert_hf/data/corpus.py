"""Streaming text corpora for pretraining: local files or a dataset on the Hub.

This module reads files itself. The `datasets` library guesses column types: it turns a column of dates into timestamps and a
number into a string, and its errors name neither the file nor the line.
"""

import csv
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import IterableDataset, load_dataset
from fsspec.compression import compr
from fsspec.utils import infer_compression

BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
SAMPLES = ("line", "paragraph", "document")
HASHED_BYTES = 4 << 30  # in all files together, a few seconds of work; larger corpora are hashed by samples
SAMPLE_BYTES = 1 << 20
READ_AT_ONCE = 10 << 20  # characters
MOST_CHARACTERS = (1 << 31) - 1  # of a field of CSV: the largest limit that the csv module accepts on every system
UNREADABLE = (pa.ArrowException, OSError, EOFError, zlib.error, lzma.LZMAError)


class Corpus:
    """An iterable of text documents that can be read any number of times.

    `source` identifies the content, so that a resumed run can detect other data. For files it holds the name, the size and the
    SHA-256 of the content; the folder and the modification time do not count. If all files together exceed 4 GiB, the hash covers
    evenly spaced samples of 1 MiB: 4 GiB in all, and at least 4 samples of each file, the first and the last MiB included. An
    insertion or a deletion between two samples shifts the rest of the file and is detected; a change of equal length may not be.
    A dataset in a folder is identified by its files. A dataset on the Hub is identified by its name, so a change there is not
    detected.

    Args:
        files: Text (.txt), JSON (.jsonl, .json: one object a line, or one list of objects or strings), CSV (.csv, with a header
            line) or Parquet files, all of one kind; all but Parquet may be compressed (.gz, .bz2, .xz, .zst).
        dataset_name: Id of a dataset on the Hub, or a folder that `load_dataset` can read; give either this or `files`.
        dataset_config: Configuration of the dataset.
        split: Split of the dataset.
        text_column: The column that holds the text.
        sample_by: Unit of a document in a .txt file: "line", "paragraph" (blank lines separate documents, as in BERT's own
            format), or "document" for the whole file.
        is_strict: Refuse a missing text and a lone surrogate (half of a surrogate pair). Otherwise a missing text becomes an
            empty text, and a lone surrogate becomes a question mark.

    Raises:
        ValueError: A file is empty, damaged, not text, or of an unknown kind; or the column does not exist. While reading: a text
            is not a string, or a line is not JSON or CSV; the message names the file and the line.
        FileNotFoundError: A file does not exist.
    """

    def __init__(
        self,
        files: list[str] | None = None,
        dataset_name: str | None = None,
        dataset_config: str | None = None,
        split: str = "train",
        text_column: str = "text",
        sample_by: str = "paragraph",
        is_strict: bool = False,
    ):
        if (files is None) == (dataset_name is None):
            raise ValueError(f"files={files} and dataset_name={dataset_name!r}: give exactly one of them")
        if sample_by not in SAMPLES:
            raise ValueError(f"sample_by={sample_by!r} is not one of {', '.join(SAMPLES)}")
        self.text_column = text_column
        if files is None:
            self.source = {"dataset_name": dataset_name, "dataset_config": dataset_config, "split": split}
            if Path(dataset_name).is_dir():
                self.source["files"] = _describe(_visible_files(Path(dataset_name)))
            stream = load_dataset(dataset_name, dataset_config, split=split, streaming=True)
            first = next(iter(stream), {text_column: ""})
            if text_column not in first:
                raise ValueError(_no_column(text_column, dataset_name, first))
            options = {"place": dataset_name, "text_column": text_column, "is_strict": is_strict}
            stream = stream.select_columns([text_column])
            self._stream = stream.map(_checked_row, with_indices=True, fn_kwargs=options)
        else:
            files = [Path(file) for file in files]
            kind = _kind(files)
            self.source = {"files": _describe(files)}
            if kind == "text":
                self.source["sample_by"] = sample_by
                self.text_column = "text"
            self._stream = IterableDataset.from_generator(
                _read,
                gen_kwargs={
                    "files": [str(file.resolve()) for file in files],
                    "kind": kind,
                    "text_column": self.text_column,
                    "sample_by": sample_by,
                    "is_strict": is_strict,
                },
            )
        self.source["text_column"] = self.text_column
        if next(iter(self._stream), None) is None:
            raise ValueError(f"{dataset_name or ', '.join(map(str, files))} holds no document; give a source with text")

    def __iter__(self) -> Iterator[str]:
        """Texts, in the order of the source."""
        for row in self._stream:
            yield row[self.text_column]

    def stream(self) -> IterableDataset:
        """The same texts as a stream of the `datasets` library, in the column `text_column`."""
        return self._stream


def _kind(files: list[Path]) -> str:
    """Return the one kind of all files, after a check that each exists and begins as its suffix says."""
    if not files:
        raise ValueError("files=[] names no file; name at least one")
    kinds = set()
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist or is not a file; check the path")
        if not file.stat().st_size:
            raise ValueError(f"{file} is empty; remove it from files")
        is_compressed = file.suffix in COMPRESSIONS
        suffix = Path(file.stem).suffix if is_compressed else file.suffix
        if suffix not in BUILDERS or (is_compressed and suffix == ".parquet"):
            raise ValueError(
                f"{file} has an unknown suffix; choose {', '.join(BUILDERS)}; all but .parquet may be compressed"
            )
        if is_compressed and file.suffix != ".zst" and infer_compression(str(file)) is None:
            raise ValueError(f"{file} cannot be decompressed by this Python; decompress it first")
        kinds.add(BUILDERS[suffix])
        if suffix != ".parquet":
            _check_text(file)
    if len(kinds) > 1:
        raise ValueError(
            f"files of {len(kinds)} kinds ({', '.join(sorted(kinds))}) cannot form one corpus; give files of one kind"
        )
    return kinds.pop()


def _check_text(file):
    try:
        with _open(file) as handle:
            head = handle.read(1 << 16)
    except UNREADABLE as error:
        raise _unreadable(file, error) from error
    if b"\0" in head:
        raise ValueError(f"{file} is binary (it contains a zero byte); give a text file")
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4 or len(head) < 1 << 16:  # the end of the block may cut a character
            raise _not_utf8(file, head[: error.start].count(b"\n") + 1) from error


def _open(file: Path) -> BinaryIO:
    if file.suffix == ".zst":  # pyarrow is always installed and detects a truncated file
        return io.BufferedReader(pa.CompressedInputStream(file.open("rb"), "zstd"))
    return compr[infer_compression(str(file))](file.open("rb"), mode="rb")


def _visible_files(folder: Path) -> list[Path]:
    found = (file for file in folder.rglob("*") if file.is_file())
    return sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts))


def _describe(files: list[Path]) -> list[dict]:
    """Return name, size and hash of each file; the hash covers samples if the files together are large."""
    sizes = [file.stat().st_size for file in files]
    is_large = sum(sizes) > HASHED_BYTES
    num_samples = max(4, HASHED_BYTES // SAMPLE_BYTES // len(files)) if is_large else None
    return [
        {
            "name": file.name,
            "bytes": size,
            "sha256" if num_samples is None else f"sha256_of_{num_samples}_samples": _hash(file, size, num_samples),
        }
        for file, size in zip(files, sizes)
    ]


def _hash(file, size, num_samples):
    digest = hashlib.sha256()
    if num_samples is None or size <= num_samples * SAMPLE_BYTES:
        starts = range(0, size, SAMPLE_BYTES)
    else:
        starts = [i * (size - SAMPLE_BYTES) // (num_samples - 1) for i in range(num_samples)]
    with file.open("rb") as handle:
        for start in starts:
            handle.seek(start)
            digest.update(handle.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _read(files: list[str], kind: str, text_column: str, sample_by: str, is_strict: bool) -> Iterator[dict]:
    """Yield the rows of files; the `datasets` library passes each process its share of the files."""
    for file in map(Path, files):
        found = _read_text(file, sample_by) if kind == "text" else _READERS[kind](file, text_column)
        try:
            for place, text in found:
                yield {text_column: _checked(text, place, text_column, is_strict)}
        except UnicodeDecodeError as error:
            raise _not_utf8(file, _first_line_not_utf8(file)) from error
        except UNREADABLE as error:
            raise _unreadable(file, error) from error


def _read_text(file: Path, sample_by: str) -> Iterator[tuple[str, str]]:
    with io.TextIOWrapper(_open(file), encoding="utf-8-sig") as handle:
        if sample_by == "document":
            yield f"{file}", handle.read()
        elif sample_by == "line":
            for line in handle:
                yield f"{file}", line.removesuffix("\n")
        else:
            rest = ""
            while chunk := handle.read(READ_AT_ONCE):
                *whole, rest = (rest + chunk).split("\n\n")
                for text in filter(None, whole):
                    yield f"{file}", text
            if rest:
                yield f"{file}", rest


def _read_json(file: Path, text_column: str) -> Iterator[tuple[str, object]]:
    with _open(file) as handle:
        is_first = True
        for number, line in enumerate(handle, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            is_list = is_first and line.lstrip().startswith(b"[")
            place = f"{file} line {number}"
            rows = _parse(line + handle.read(), file) if is_list else [_parse(line, place)]
            if not isinstance(rows, list):
                raise ValueError(
                    f"{place} begins a list but does not end it; close it with ], or write one object on each line"
                )
            for item, row in enumerate(rows, 1):
                place = f"{file} item {item}" if is_list else place
                if is_list and isinstance(row, str):
                    yield place, row
                    continue
                if not isinstance(row, dict):
                    raise ValueError(
                        f"{place} has type {type(row).__name__}, not object; write one object on each line, such as "
                        f'{{"{text_column}": "..."}}'
                    )
                if is_first and text_column not in row:
                    raise ValueError(_no_column(text_column, file, row))
                is_first = False
                yield place, row.get(text_column)
            if is_list:
                return


def _parse(content: bytes, place: str | Path) -> object:
    text = content.decode("utf-8")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place} is not JSON: {getattr(error, 'msg', error)} at character {getattr(error, 'pos', 0) + 1}; write one object "
            "on each line, or one list of objects"
        ) from error


def _read_csv(file: Path, text_column: str) -> Iterator[tuple[str, object]]:
    csv.field_size_limit(MOST_CHARACTERS)  # the default, 131,072, is below the length of many documents
    with io.TextIOWrapper(_open(file), encoding="utf-8-sig", newline="") as handle:
        rows = csv.reader(handle, strict=True)
        try:
            names = next(rows, [])
            _check_column(text_column, file, names)
            column = names.index(text_column)
            for row in filter(None, rows):  # blank lines are empty rows
                place = f"{file} line {rows.line_num}"
                if len(row) != len(names):
                    raise ValueError(
                        f"{place} ends a row of {len(row)} fields where the header has {len(names)}; put fields that hold a "
                        "comma or a line break in double quotes"
                    )
                yield place, row[column]
        except csv.Error as error:
            raise ValueError(
                f"{file} line {rows.line_num} is not CSV: {error}; separate fields by commas, and double each quote inside a "
                "quoted field"
            ) from error


def _read_parquet(file: Path, text_column: str) -> Iterator[tuple[str, object]]:
    with pq.ParquetFile(file) as stored:
        _check_column(text_column, file, stored.schema_arrow.names)
        number = 0
        for batch in stored.iter_batches(batch_size=1000, columns=[text_column]):
            for number, text in enumerate(batch[text_column].to_pylist(), number + 1):  # noqa: B020
                yield f"{file} row {number}", text


_READERS = {"json": _read_json, "csv": _read_csv, "parquet": _read_parquet}


def _checked_row(row: dict, number: int, place: str, text_column: str, is_strict: bool) -> dict:
    return {text_column: _checked(row[text_column], f"{place} row {number + 1}", text_column, is_strict)}


def _checked(text: object, place: str, text_column: str, is_strict: bool) -> str:
    if text is None and not is_strict:
        return ""
    if not isinstance(text, str):
        raise ValueError(
            f"{place}: {text_column} is {text!r:.80}, a {type(text).__name__}; every text must be a string"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        if is_strict:
            raise ValueError(
                f"{place}: {text_column} has the lone surrogate {text[error.start]!r} at character {error.start}, which UTF-8 "
                "cannot store; remove it"
            ) from error
        return text.encode("utf-8", "replace").decode()
    return text


def _check_column(text_column: str, file: Path, names: list[str]) -> None:
    if text_column not in names:
        raise ValueError(_no_column(text_column, file, names))
    if names.count(text_column) > 1:
        raise ValueError(f"{file} has {names.count(text_column)} columns {text_column!r}; rename all but the text")


def _no_column(text_column: str, place: str | Path, names: Iterable[str]) -> str:
    return f"text_column={text_column!r} is not a column of {place}; it has {', '.join(sorted(names))}"


def _unreadable(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} cannot be read; it is damaged or not of the kind that its suffix says: {error}")


def _not_utf8(file: Path, line: int) -> ValueError:
    return ValueError(f"{file} is not UTF-8 in line {line}; convert it, for example with iconv")


def _first_line_not_utf8(file: Path) -> int:
    with _open(file) as handle:
        for number, line in enumerate(handle, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    raise AssertionError(f"{file} changed while it was read")
