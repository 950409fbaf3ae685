"""Documents of a folder of shards by number, and subsets of them, in memory that does not grow with their number.

Documents are read from the files, not from a mapping of them: every page that a mapping has touched counts as memory of the
process, and a pass in random order touches all pages.
"""

import hashlib
import json
import os
import struct
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from .files import ReadError, file_hash, sealed, unsealed
from .permutation import Permutation, whole_number
from .wordpiece import tokenizer_hash

MANIFEST = "manifest.json"
COLUMN = "input_ids"
NUM_HELD_OUT = 1000  # documents that training holds out unless it is given validation files or another number
HELD_OUT = 1  # purpose of a random order, part of its seed
CHUNK = 1 << 20  # documents whose lengths are read together
OFFSETS_BYTES = 64 << 20  # memory for the offsets of all open files
PAIR = struct.Struct("=2i")  # where a document begins and ends in a shard


def _most_open() -> int:
    """Number of shards that the process keeps open: half of the files that it may open, at most 1,024."""
    try:
        import resource
    except ImportError:  # Windows
        return 128
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if limit == resource.RLIM_INFINITY else min(max(limit // 2, 1), 1024)


MOST_OPEN = _most_open()
# (open files of a `Shards`, number of a shard) in the order of opening; all `Shards` of the process share this queue.
_opened = deque()
_opening = threading.RLock()
if hasattr(os, "register_at_fork"):  # a forked process must not begin with the lock of another thread
    os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_opening.release)


def read_shards_json(file: Path) -> dict:
    """Content of a JSON file in a folder of shards.

    Raises:
        ValueError: The file does not hold one JSON object with the right checksum.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        return unsealed(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); restore it, or remove the folder and tokenize again") from error


class Shards:
    """Documents of a folder of shards, by number.

    Args:
        folder: Folder that `tokenize_corpus` wrote.
        verify: Compare the checksum of every shard, which reads all of them once.

    Raises:
        FileNotFoundError: The folder holds no finished shards.
        ValueError: A shard is missing or damaged. Without `verify`, damage that leaves the size of a file unchanged is found
            when the file is first read, if at all.
    """

    def __init__(self, folder: str | Path, verify: bool = False):
        self.folder = Path(folder)
        manifest = self.folder / MANIFEST
        if not manifest.is_file():
            raise FileNotFoundError(
                f"{self.folder} holds no {MANIFEST}; tokenize into it first, or again if that was interrupted"
            )
        self.manifest = read_shards_json(manifest)
        try:
            self._records = self.manifest["shards"]
            for record in self._records:
                self._check(record, verify)
            self._first = np.cumsum([0, *(record["documents"] for record in self._records)])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{manifest} is not a manifest of shards: {error!r} in it") from error
        self._first_list = self._first.tolist()  # bisect on a list is faster than searchsorted for one number
        self._open, self._layouts = {}, {}  # by number of a shard; a layout is kept for the next time

    def _check(self, record, verify):
        name = record["file"]
        if Path(name).name != name:
            raise ValueError(f"{self.folder / MANIFEST} names {name!r}, which is not a file of its own folder")
        file = self.folder / name
        if not file.is_file():
            raise ValueError(f"{file} is missing; restore it, or remove the folder and tokenize again")
        if file.stat().st_size != record["bytes"] or (verify and file_hash(file) != record["sha256"]):
            raise _damage(file)

    def __len__(self) -> int:
        return self._first_list[-1]

    def __getitem__(self, number: int) -> np.ndarray:
        """Token ids of a document, (T,)."""
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        shard = bisect_right(self._first_list, number) - 1
        return (self._open.get(shard) or self._file(shard)).document(number - self._first_list[shard])

    def _file(self, shard):
        """Open a shard, or return the open one; the file that was opened first is closed if too many are open."""
        with _opening:
            file = self._open.get(shard)
            if file is None:
                record = self._records[shard]
                name = os.path.join(self.folder, record["file"])
                if shard not in self._layouts:
                    self._layouts[shard] = _layout(Path(name), record)
                while len(_opened) >= MOST_OPEN:
                    files, number = _opened.popleft()
                    files.pop(number, None)
                file = self._open[shard] = _OpenFile(name, *self._layouts[shard], record["documents"])
                _opened.append((self._open, shard))
            return file

    def __del__(self):
        getattr(self, "_open", {}).clear()  # the queue of open files refers to it

    def __reduce__(self):
        return type(self), (self.folder,)  # a worker opens the files again

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of every document, (N,) int32; all shards are read at each use, so keep the result."""
        return self.lengths_of(np.arange(len(self)))

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of tokens of some documents.

        Args:
            numbers: (n,) of documents, in any order; a shard's offsets are read once in a call.

        Returns:
            (n,) int32.
        """
        order = np.argsort(numbers)
        numbers, lengths = numbers[order], np.empty(len(numbers), np.int32)
        bounds = np.searchsorted(numbers, self._first)
        for shard in np.flatnonzero(np.diff(bounds)).tolist():
            chosen = slice(bounds[shard], bounds[shard + 1])
            offsets = self._file(shard).offsets()
            places = numbers[chosen] - self._first[shard]
            lengths[order[chosen]] = offsets[places + 1] - offsets[places]
        return lengths

    @cached_property
    def identity(self) -> dict:
        """The manifest with the checksum of each shard, on which a packing plan depends."""
        return {"shards": sealed(self.manifest)["checksum"], "num_documents": len(self)}

    @property
    def shards(self) -> "Shards":
        """Itself; the collection that holds the documents of a subset by the same numbers."""
        return self

    def longer_than(self, num_tokens: int) -> "ShardsSubset":
        """Documents of more than `num_tokens` tokens.

        Source: paper, section 3.2, RefinedWeb 1024+ and 2048+.
        """
        return ShardsSubset(self, whole_number("num_tokens", num_tokens))

    def split(self, num_held_out: int, seed: int = 0) -> tuple["ShardsSubset", "ShardsView"]:
        """Hold documents out at random.

        Returns:
            Documents to train on, and those held out.

        Raises:
            ValueError: No document would be left to train on, or none would be held out.
        """
        if not 0 < num_held_out < len(self):
            raise ValueError(
                f"num_held_out={num_held_out} of {len(self)} documents; hold out at least one, and not all"
            )
        held_out = np.sort(Permutation(len(self), seed, HELD_OUT)(np.arange(num_held_out)))
        return ShardsSubset(self, held_out=held_out), ShardsView(self, held_out)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raise ValueError unless this tokenizer made the shards."""
        here, there = tokenizer_hash(tokenizer), self.manifest["tokenizer"]["sha256"]
        if here != there:
            raise ValueError(
                f"the shards in {self.folder} come from another tokenizer (sha256 {there[:12]}, given: {here[:12]}, "
                f"{self.manifest['tokenizer']['vocab_size']} and {len(tokenizer)} tokens); give the one that made them, "
                "or tokenize again"
            )


def _damage(file):
    return ValueError(
        f"{file} is damaged: it is not what the manifest says; remove the folder and tokenize again, or restore the file"
    )


def _unreadable(file, error):
    return ReadError(error.errno, f"{error.strerror}: {os.path.basename(file)} could not be read", str(file))


def _layout(file, record):
    """Where token ids and offsets begin in a shard, in bytes, and the dtype of the ids."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as source:
            whole = source.read_buffer()
            column = pa.ipc.open_stream(whole).read_all()[COLUMN].chunk(0)
        ids, offsets = column.values.to_numpy(), column.offsets.to_numpy()
        starts = [buffer.address - whole.address for buffer in (column.values.buffers()[1], column.buffers()[1])]
    except (pa.ArrowInvalid, OSError, KeyError, IndexError, AttributeError) as error:
        if getattr(error, "errno", None):  # of the operating system; pyarrow's own errors have no number
            raise _unreadable(file, error) from error
        raise _damage(file) from error
    is_in_order = len(offsets) and offsets[0] == 0 and offsets[-1] == len(ids) and (np.diff(offsets) > 0).all()
    is_in_file = all(0 <= start < record["bytes"] for start in starts)
    if not is_in_order or not is_in_file or (len(offsets) - 1, len(ids)) != (record["documents"], record["tokens"]):
        raise _damage(file)
    return (*starts, ids.dtype)


class _OpenFile:
    """A shard that is open for reading, by several threads and forked processes at once."""

    def __init__(self, file, ids_start, offsets_start, dtype, num_documents):
        self._path, self._ids_start, self._offsets_start, self._dtype = file, ids_start, offsets_start, dtype
        self._num_documents = num_documents
        # A pass over more shards than may be open reads each open file once or twice: all offsets are read at the second use.
        self._is_first_use, self._offsets = True, None
        try:
            self._descriptor = os.open(file, os.O_RDONLY) if hasattr(os, "pread") else None
        except OSError as error:
            raise _unreadable(file, error) from error

    def document(self, place: int) -> np.ndarray:
        """Token ids of a document, by its place in the shard."""
        offsets = self._offsets
        if offsets is not None:
            start, end = offsets[place], offsets[place + 1]
        elif self._is_first_use or (self._num_documents + 1) * 4 > OFFSETS_BYTES // MOST_OPEN:
            self._is_first_use = False
            start, end = PAIR.unpack(self._read(self._offsets_start + 4 * place, 8))
        else:
            offsets = self._offsets = memoryview(self._read(self._offsets_start, (self._num_documents + 1) * 4)).cast(
                "i"
            )
            start, end = offsets[place], offsets[place + 1]
        size = self._dtype.itemsize
        return np.frombuffer(self._read(self._ids_start + start * size, (end - start) * size), self._dtype)

    def offsets(self) -> np.ndarray:
        """Where each document begins, and where the last document ends, in token ids."""
        return np.frombuffer(self._read(self._offsets_start, (self._num_documents + 1) * 4), np.int32)

    def _read(self, place, size):
        try:
            if self._descriptor is not None:
                content = os.pread(self._descriptor, size, place)
            else:  # Windows can read from a place only after it has moved there, which other threads do too
                with open(self._path, "rb", buffering=0) as file:
                    file.seek(place)
                    content = file.read(size)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        if len(content) != size:
            raise _damage(self._path)
        return content

    def __del__(self, close=os.close):  # a default argument is still there when the interpreter ends
        if getattr(self, "_descriptor", None) is not None:
            close(self._descriptor)


class ShardsSubset:
    """Documents of `Shards` above a length, without the held-out ones; no list of them is kept.

    Args:
        shards: Collection that holds the documents.
        num_tokens: Documents of more than this many tokens belong to the subset.
        held_out: (k,) numbers of the held-out documents, sorted; None holds none out.
    """

    def __init__(self, shards: Shards, num_tokens: int = 0, held_out: np.ndarray | None = None):
        self.shards, self.num_tokens = shards, num_tokens
        self.held_out = np.zeros(0, np.int64) if held_out is None else held_out
        self._last_chunk = (None, None)  # number of a chunk, and the numbers of the documents in it

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[np.ndarray]:
        """Token ids of each document, in the order of their numbers."""
        return (self.shards[number] for chunk in self._chunks() for number in chunk.tolist())

    def __getitem__(self, place: int) -> np.ndarray:
        """Token ids of a document, (T,), by its place in the subset.

        Slow in random order: the lengths of up to `CHUNK` documents are read whenever the place is in another chunk than the last
        one. Read `shards` by the `numbers` instead.
        """
        if not 0 <= place < len(self):
            raise IndexError(f"document {place} of {len(self)}")
        chunk = bisect_right(self._ends, place) - 1
        if self._last_chunk[0] != chunk:
            self._last_chunk = (chunk, self._chunk(chunk * CHUNK))
        return self.shards[int(self._last_chunk[1][place - self._ends[chunk]])]

    @property
    def numbers(self) -> np.ndarray:
        """Numbers of the documents in `shards`, (n,) int64; all shards are read for it at each use."""
        return np.concatenate([*self._chunks(), np.zeros(0, np.int64)])

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document, (n,) int32; all shards are read for it at each use."""
        return self.shards.lengths_of(self.numbers)

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of tokens of some documents of `shards`, (n,) int32; 0 for a document outside of the subset."""
        lengths = self.shards.lengths_of(numbers)
        lengths[lengths <= self.num_tokens] = 0
        if len(self.held_out):
            places = np.searchsorted(self.held_out, numbers).clip(max=len(self.held_out) - 1)
            lengths[self.held_out[places] == numbers] = 0
        return lengths

    def longer_than(self, num_tokens: int) -> "ShardsSubset":
        """Documents of more than `num_tokens` tokens."""
        return ShardsSubset(self.shards, max(whole_number("num_tokens", num_tokens), self.num_tokens), self.held_out)

    @cached_property
    def identity(self) -> dict:
        """What a packing plan of these documents depends on."""
        held_out = hashlib.sha256(self.held_out.astype("<i8").tobytes()).hexdigest() if len(self.held_out) else None
        return {**self.shards.identity, "longer_than": self.num_tokens, "held_out": held_out}

    @cached_property
    def _ends(self):
        """Number of documents before each chunk, and in all chunks."""
        return [0, *np.cumsum([len(chunk) for chunk in self._chunks()]).tolist()]

    def _chunks(self):
        return map(self._chunk, range(0, len(self.shards), CHUNK))

    def _chunk(self, start):
        numbers = np.arange(start, min(start + CHUNK, len(self.shards)))
        return numbers[self.lengths_of(numbers) > 0]


class ShardsView:
    """A few documents of another collection, by a list of their numbers.

    Args:
        documents: Collection with `lengths_of`.
        numbers: (n,) of the documents.
    """

    def __init__(self, documents: Shards, numbers: np.ndarray):
        self.documents, self.numbers = documents, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> np.ndarray:
        """Token ids of a document, (T,)."""
        return self.documents[int(self.numbers[number])]

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document, (n,) int32."""
        return self.documents.lengths_of(self.numbers)
