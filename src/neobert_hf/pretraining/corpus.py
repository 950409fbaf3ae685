"""Text for pretraining: local files or a dataset on the Hub, as a stream of texts."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import IterableDataset, load_dataset

from ..data.finding import find_files, find_texts
from ..data.lengths import as_list
from ..data.rows import SAMPLES, checked_text, read_texts
from ..files.messages import first_of
from .arguments import CorpusArguments
from .recipes import Recipe

SAMPLE_BYTES = 1 << 20
NUM_SAMPLES = 4096  # in all files together: 4 GiB, a few seconds of work
MIN_SAMPLES = 4  # of a file


@dataclass(frozen=True)
class Corpus:
    """Texts that can be read any number of times, in the same order.

    Args:
        files: Files, folders, and patterns, or one of them, of text, JSON, CSV, TSV or Parquet, compressed or not.
        dataset_name: Id of a dataset on the Hub, or a folder that `load_dataset` can read; give either this or `files`.
        dataset_config: Configuration of the dataset.
        split: Split of the dataset.
        text_column: The column that holds the text.
        sample_by: Unit of a document in a .txt file: "line", "paragraph" or "document".

    Raises:
        ValueError: `files` and `dataset_name` are both given, or neither; or `sample_by` is unknown. While reading: a text is not
            a string, or a line is not JSON or CSV; the message names the file and the line.
        FileNotFoundError: A file does not exist.
    """

    files: str | Path | Sequence[str | Path] | None = None
    dataset_name: str | None = None
    dataset_config: str | None = None
    split: str = "train"
    text_column: str = "text"
    sample_by: str = "paragraph"

    def __post_init__(self):
        object.__setattr__(self, "files", [str(file) for file in find_texts(self.files)[0]])
        if bool(self.files) == bool(self.dataset_name):
            raise ValueError(f"files={self.files} and dataset_name={self.dataset_name!r}: give exactly one of them")
        if self.sample_by not in SAMPLES:
            raise ValueError(f"sample_by={self.sample_by!r} is not one of {', '.join(SAMPLES)}")

    def __iter__(self) -> Iterator[str]:
        """Texts, in the order of the source."""
        for row in self.stream():
            yield row[self.text_column]

    @cached_property
    def source(self) -> dict:
        """What identifies the content, in plain types, so that a resumed run can detect other data.

        For files these are names, sizes and hashes; the folder and the modification time do not count. A hash covers evenly
        spaced samples of 1 MiB, the first and the last MiB included: all of the content if the files together have up to 4 GiB.
        A dataset in a folder is identified by its files. A dataset on the Hub is identified by its name, so a change there is not
        detected.
        """
        if self.files:
            files = [Path(file) for file in as_list(self.files)]
            return {"text_column": self.text_column, "files": _describe(files), "sample_by": self.sample_by}
        source: dict[str, Any] = {
            "text_column": self.text_column,
            "dataset_name": self.dataset_name,
            "dataset_config": self.dataset_config,
            "split": self.split,
        }
        folder = Path(str(self.dataset_name))
        if folder.is_dir():
            source["files"] = _describe(sorted(find_files([str(folder)], Path.is_file)[0]))
        return source

    def stream(self, num_parts: int = 1) -> IterableDataset:
        """The texts as a stream of the `datasets` library, with the column `text_column`.

        Args:
            num_parts: Number of shards of the stream that each file gives, so that several processes read one file. Every process
                parses the whole file and takes each `num_parts`-th text. The files of a dataset are not divided.

        Raises:
            ValueError: The dataset has no such column, or there is no text.
        """
        name, column = self.dataset_name, self.text_column
        if self.files:
            name = first_of(as_list(self.files))
            files = [str(Path(file).resolve()) for file in as_list(self.files)]
            parts = list(itertools.product(files, range(num_parts)))
            options = {"num_parts": num_parts, "text_column": column, "sample_by": self.sample_by}
            stream = IterableDataset.from_generator(_read, gen_kwargs={"parts": parts, **options})
        else:
            stream = load_dataset(name, self.dataset_config, split=self.split, streaming=True)
        first = next(iter(stream), None)
        if first is None:
            raise ValueError(f"{name} holds no document; give a source with text")
        if column not in first:
            raise ValueError(f"text_column={column!r} is not a column of {name}; it has {first_of(first)}")
        if self.files:
            return stream
        options = {"place": name, "text_column": column}
        return stream.select_columns([column]).map(_checked_row, with_indices=True, fn_kwargs=options)


def open_corpus(data: CorpusArguments, recipe: Recipe, files: Sequence[str] | None) -> Corpus:
    """Open the text of the files; without files, of the named dataset; without a name, of the recipe's dataset."""
    name = None
    if not files:
        name = data.dataset_name or recipe.corpus
    default = recipe.text_column if name == recipe.corpus else "text"
    column = data.text_column or default
    return Corpus(files, name, data.dataset_config, text_column=column, sample_by=data.sample_by)


def _read(parts: list[tuple[str, int]], num_parts: int, text_column: str, sample_by: str) -> Iterator[dict]:
    """Yield the rows of files; the `datasets` library passes each process its share of the parts."""
    for file, part in parts:
        for number, (_, text) in enumerate(read_texts(file, text_column, sample_by)):
            if number % num_parts == part:
                yield {text_column: text}


def _checked_row(row: dict, number: int, place: str, text_column: str) -> dict:
    return {text_column: checked_text(row[text_column], f"{place}, row {number + 1}: {text_column}")}


def _describe(files: list[Path]) -> list[dict]:
    """Name, size and hash of each file."""
    sizes = [file.stat().st_size for file in files]
    share = min(1, NUM_SAMPLES * SAMPLE_BYTES / max(1, sum(sizes)))
    return [
        {"name": file.name, "bytes": size, "sha256_of_samples": _hash(file, size, share)}
        for file, size in zip(files, sizes)
    ]


def _hash(file: Path, size: int, share: float) -> str:
    """Hash this share of the content, as evenly spaced samples."""
    digest = hashlib.sha256()
    starts = list(range(0, size, SAMPLE_BYTES))
    num_samples = max(MIN_SAMPLES, math.ceil(share * len(starts)))
    if len(starts) > num_samples:
        starts = [i * (size - SAMPLE_BYTES) // (num_samples - 1) for i in range(num_samples)]
    with file.open("rb") as handle:
        for start in starts:
            handle.seek(start)
            digest.update(handle.read(SAMPLE_BYTES))
    return digest.hexdigest()
