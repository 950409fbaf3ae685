"""Tokenized documents on disk, by number: `Documents` maps the files that `tokenize` wrote into memory.

A folder of documents holds `ids/00000_unshuffled.ds` and `.ds.index` for each task of datatrove: token ids, and where each
document ends in them. `manifest.json` is written last: a folder without it is not finished.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
from torch.utils.data import Subset
from transformers import PreTrainedTokenizerFast

from ..data.wordpiece import tokenizer_hash
from ..files.json_files import read_json
from ..files.output import content_hash
from .permutation import Permutation

MANIFEST = "manifest.json"
HELD_OUT = 1  # purpose of a random order, part of its seed
MAX_MAPPED = 256  # files at a time: each map keeps a file open, and a process may open 1,024 on many systems
ENDS_DTYPE = np.dtype("<u8")


def task_files(folder: Path, task: int) -> dict[str, Path]:
    """Files that a task writes: token `ids`, and the `ends` of the documents in them."""
    ids = folder / "ids" / f"{task:05d}_unshuffled.ds"
    return {"ids": ids, "ends": ids.with_name(f"{ids.name}.index")}


def _map(folder, dtype, task):
    files = task_files(folder, task)
    return np.memmap(files["ids"], dtype, mode="r"), np.memmap(files["ends"], ENDS_DTYPE, mode="r")


def is_whole(folder: Path, task: dict) -> bool:
    """Whether the files of a task have the sizes that its record says."""
    sizes = {
        "ids": task["tokens"] * np.dtype(task["dtype"]).itemsize,
        "ends": task["documents"] * ENDS_DTYPE.itemsize,
    }
    for name, file in task_files(folder, task["task"]).items():
        if not file.is_file() or file.stat().st_size != sizes[name]:
            return False
    return True


class Documents(Sequence):
    """Documents of a folder, by number.

    Args:
        folder: Folder that `tokenize` wrote.

    Raises:
        FileNotFoundError: The folder holds no finished documents.
        ValueError: A file is missing or has another size than the manifest says.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).is_file():
            raise FileNotFoundError(
                f"{self.folder} holds no {MANIFEST}; tokenize into it first, or again if that was interrupted"
            )
        self.manifest = read_json(self.folder / MANIFEST)
        self.special_tokens = tuple(self.manifest["special_tokens"])
        self._dtype = np.dtype(self.manifest["dtype"])
        self._tasks = [task for task in self.manifest["tasks"] if task["documents"]]
        for task in self._tasks:
            if not is_whole(self.folder, task):
                files = " or ".join(map(str, task_files(self.folder, task["task"]).values()))
                raise ValueError(
                    f"{files} is missing or has another size than {MANIFEST} says; restore it, or remove the folder and tokenize "
                    "again"
                )
        self._first = np.cumsum([0, *(task["documents"] for task in self._tasks)]).tolist()
        self._map = lru_cache(MAX_MAPPED)(partial(_map, self.folder, self._dtype))

    def __reduce__(self):
        return type(self), (self.folder,)  # another process maps the files again

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, number: int) -> np.ndarray:  # type: ignore[override]  # no slices
        """Token ids of a document, (T,)."""
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        place = bisect_right(self._first, number) - 1
        ids, ends = self._map(self._tasks[place]["task"])
        number -= self._first[place]
        start = int(ends[number - 1]) if number else 0
        return np.array(ids[start : int(ends[number])])

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of every document, (N,) int32; all indexes are read at each use, so keep the result."""
        lengths = np.empty(len(self), np.int32)
        for task, first in zip(self._tasks, self._first):
            ends = np.fromfile(task_files(self.folder, task["task"])["ends"], ENDS_DTYPE)
            lengths[first : first + len(ends)] = np.diff(ends, prepend=ENDS_DTYPE.type(0))
        return lengths

    @cached_property
    def identity(self) -> dict:
        """What a packing plan of these documents depends on."""
        return {"documents": content_hash(self.manifest), "num_documents": len(self)}

    def longer_than(self, num_tokens: int) -> "Selection":
        """Documents of more than `num_tokens` tokens.

        Source: paper, section 3.2, RefinedWeb 1024+ and 2048+.
        """
        return Selection(self, num_tokens)

    def split(self, num_held_out: int, seed: int = 0) -> tuple["Selection", Subset]:
        """Hold documents out at random; return the documents to train on, and those held out.

        Raises:
            ValueError: No document would be left to train on, or none would be held out.
        """
        if not 0 < num_held_out < len(self):
            remedy = "choose a smaller num_held_out, or give more documents; in .txt, blank lines or sample_by=line divide them"
            raise ValueError(f"num_held_out={num_held_out} of {len(self)} documents; {remedy}")
        numbers = np.sort(Permutation(len(self), seed, HELD_OUT)(np.arange(num_held_out)))
        return Selection(self, 0, numbers), Subset(self, numbers)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raise ValueError unless this tokenizer made the documents."""
        given, stored = tokenizer_hash(tokenizer), self.manifest["tokenizer"]["sha256"]
        if given != stored:
            raise ValueError(
                f"the documents in {self.folder} come from another tokenizer (sha256 {stored[:12]}, given: {given[:12]}, "
                f"{self.manifest['tokenizer']['vocab_size']} and {len(tokenizer)} tokens); give the one that made them, or "
                "tokenize again"
            )


@dataclass(frozen=True)
class Selection:
    """Documents above a length, without the held-out ones: what a packing plan takes. Documents keep their numbers.

    Args:
        documents: Collection that holds the documents.
        num_tokens: Documents of more than this many tokens belong to the selection.
        held_out: (k,) numbers of the held-out documents.
    """

    documents: Documents
    num_tokens: int = 0
    held_out: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return int(np.count_nonzero(self.lengths))

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of every document of the collection, (N,) int32; 0 for those outside of the selection.

        A document of special tokens alone, such as that of a zero-width space, is outside.
        """
        lengths = self.documents.lengths
        lengths[lengths <= max(self.num_tokens, sum(self.documents.special_tokens))] = 0
        lengths[self.held_out] = 0
        return lengths

    def longer_than(self, num_tokens: int) -> "Selection":
        """Documents of more than `num_tokens` tokens."""
        return Selection(self.documents, max(num_tokens, self.num_tokens), self.held_out)

    @property
    def identity(self) -> dict:
        """What a packing plan of these documents depends on."""
        held_out = hashlib.sha256(self.held_out.astype("<i8").tobytes()).hexdigest()
        return {**self.documents.identity, "longer_than": int(self.num_tokens), "held_out": held_out}
