"""Text to pretrain on: a dataset of the Hub, or files of one's own, read as a stream with the `datasets` library."""

from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, IterableDataset, load_dataset

BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
SAMPLES = ("line", "paragraph", "document")


class Corpus:
    """Documents of text, one after the other, as often as they are asked for.

    Args:
        files: Text (.txt), JSON lines (.jsonl, .json) or Parquet files, all of one kind, compressed or not.
        dataset_name: Id of a dataset on the Hub, or a folder that `load_dataset` knows; either this or `files`.
        dataset_config: Its configuration.
        split: Its split.
        text_column: The column that holds the text.
        sample_by: What is a document in a .txt file: a "line", a "paragraph" (blank lines stand between documents, as in
            BERT's own format), or the whole "document".

    Raises:
        ValueError: A file is empty, not text, or of an unknown kind; a column is not there.
        FileNotFoundError: A file is not there.
    """

    def __init__(
        self,
        files: list[str] | None = None,
        dataset_name: str | None = None,
        dataset_config: str | None = None,
        split: str = "train",
        text_column: str = "text",
        sample_by: str = "paragraph",
    ):
        if (files is None) == (dataset_name is None):
            raise ValueError(f"files={files} and dataset_name={dataset_name!r}: give exactly one of them")
        self.text_column = text_column
        if files is None:
            self.source = {"dataset_name": dataset_name, "dataset_config": dataset_config, "split": split}
            self._stream = load_dataset(dataset_name, dataset_config, split=split, streaming=True)
        else:
            builder = _builder(files, sample_by)
            self.source = {"files": [_describe(Path(file)) for file in files]}
            if builder == "text":
                self.source["sample_by"] = sample_by
                self.text_column = "text"
            options = {"sample_by": sample_by} if builder == "text" else {}
            self._stream = load_dataset(
                builder,
                data_files=[str(Path(file).resolve()) for file in files],
                split="train",
                streaming=True,
                **options,
            )
        self.source["text_column"] = self.text_column
        self._check_column()

    def _check_column(self):
        first = next(iter(self._stream), None)
        if first is None:
            raise ValueError(f"{self.source} holds no document")
        if self.text_column not in first:
            raise ValueError(
                f"text_column={self.text_column!r} is not a column of {self.source}; it has {', '.join(sorted(first))}"
            )

    def __iter__(self) -> Iterator[str]:
        """Texts, in the order of the source; an empty string where the column holds nothing."""
        for row in self._stream:
            yield row[self.text_column] or ""

    def stream(self) -> Dataset | IterableDataset:
        """The same documents as a stream of the `datasets` library."""
        return self._stream


def _builder(files, sample_by):
    if sample_by not in SAMPLES:
        raise ValueError(f"sample_by={sample_by!r} is not one of {', '.join(SAMPLES)}")
    kinds = set()
    for file in map(Path, files):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is not a file; check the path")
        if not file.stat().st_size:
            raise ValueError(f"{file} is empty; leave it out")
        suffix = next((part for part in reversed(file.suffixes) if part not in COMPRESSIONS), None)
        if suffix not in BUILDERS:
            raise ValueError(f"{file} is of no known kind; choose {', '.join(BUILDERS)}, compressed or not")
        kinds.add(BUILDERS[suffix])
        if suffix != ".parquet" and file.suffix not in COMPRESSIONS:
            _check_text(file)
    if len(kinds) > 1:
        raise ValueError(
            f"files of {len(kinds)} kinds ({', '.join(sorted(kinds))}) cannot be read as one; give one kind"
        )
    return kinds.pop()


def _check_text(file):
    with file.open("rb") as handle:
        head = handle.read(1 << 16)
    if b"\0" in head:
        raise ValueError(f"{file} is binary (it holds a zero byte); give text")
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # a character may be cut at the end of what was read
            raise ValueError(
                f"{file} is not UTF-8 at byte {error.start}; convert it, with iconv for instance"
            ) from error


def _describe(file):
    return {"name": file.name, "bytes": file.stat().st_size}
