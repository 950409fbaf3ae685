"""Packing plans: which documents lie in which row. A plan is made once, kept in memory or in files, and read by every process.

A plan on disk is a folder with `documents.bin` (numbers of documents, row after row), `row_ends.bin` (where each row ends in
it) and `plan.json`, written last: a folder without it holds no finished plan.
"""

import hashlib
import json
import os
import re
import shutil
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm
from transformers.utils import logging

from .files import file_hash, only_writer, sealed, unsealed, write_json, writing
from .permutation import Permutation, whole_number
from .shard_reader import Shards, ShardsSubset

logger = logging.get_logger(__name__)

PACKING = 2  # version of the order of documents and rows; 1 drew both with NumPy's permutation
ORDER = 0  # purpose of a random order, part of its seed
PLANS = "plans"
PLAN = "plan.json"
DOCUMENTS, ENDS = "documents.bin", "row_ends.bin"
LOCK = ".plan.lock"
CHUNK = 1 << 22  # documents whose lengths are read together, in one pass over the shards
BLOCK = 1 << 16  # documents that are placed together, as Python numbers
OPEN_ORDER = 40  # bits of a row's key below its number of tokens
STILL_GOOD = "the shards are unchanged: make room, and run the same again"


class NothingToPack(ValueError):
    """No document is left to pack."""


class BestFit:
    """Open rows: an item goes where it leaves the least room; when too many rows are open, the fullest is complete.

    Of equally full rows the one that was opened first is chosen.

    Args:
        max_tokens: Token budget of a row.
        max_open_rows: Number of rows that wait for an item that fits; more rows pack tighter and mix the order more.
        rows: Open rows to start with, each a list of items, in the order in which they were opened.

    Source: best-fit packing, arXiv 2404.10830.
    """

    def __init__(self, max_tokens: int, max_open_rows: int, rows: Iterable[list] = ()):
        self.max_open_rows = whole_number("max_open_rows", max_open_rows)
        self._full = whole_number("max_tokens", max_tokens) << OPEN_ORDER
        # A key is the row's number of tokens, then a number that falls from row to row: the largest key is the fullest row,
        # and of equally full ones the first.
        self._keys, self._items, self._next = [], {}, (1 << OPEN_ORDER) - 1
        for row in rows:
            self._items[self._next] = row
            insort(self._keys, sum(map(len, row)) << OPEN_ORDER | self._next)
            self._next -= 1

    @property
    def rows(self) -> list[list]:
        """Open rows, each a list of items, in the order in which they were opened."""
        return list(self._items.values())

    def place(self, item, length: int) -> list | None:
        """Put an item of `length` tokens, at most `max_tokens`, into a row; returns the row that is now complete, or None."""
        keys, length = self._keys, length << OPEN_ORDER
        place = bisect_left(keys, self._full - length + (1 << OPEN_ORDER)) - 1
        if place < 0:
            key = self._next
            self._next -= 1
            self._items[key] = [item]
            key += length
        else:
            key = keys.pop(place)
            self._items[key & (1 << OPEN_ORDER) - 1].append(item)
            key += length
        if key >= self._full:
            return self._items.pop(key & (1 << OPEN_ORDER) - 1)
        insort(keys, key)
        if len(keys) > self.max_open_rows:
            return self._items.pop(keys.pop() & (1 << OPEN_ORDER) - 1)
        return None

    def rest(self) -> list[list]:
        """Close all open rows; returns them, the fullest first."""
        rows = [self._items.pop(key & (1 << OPEN_ORDER) - 1) for key in reversed(self._keys)]
        self._keys.clear()
        return rows


@dataclass(frozen=True)
class PackingPlan:
    """Which documents lie in which row.

    Args:
        documents: (M,) numbers of the documents, row after row; M documents were packed.
        ends: (R,) where each row ends in `documents`.
        num_tokens: Tokens in all rows together.
        max_tokens: Token budget of a row.
        max_length: Longer documents are cut to this many tokens; None cuts none.
        seed: Seed of the order of the documents.
        folder: Folder of the plan; None for a plan in memory.
    """

    documents: np.ndarray
    ends: np.ndarray
    num_tokens: int
    max_tokens: int
    max_length: int | None
    seed: int
    folder: Path | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def row(self, number: int) -> list[int]:
        """Numbers of the documents in a row."""
        start = self.ends[number - 1] if number else 0
        return self.documents[int(start) : int(self.ends[number])].tolist()

    def __reduce__(self):
        if self.folder is not None:  # another process maps the files again instead of receiving their content
            return read_packing_plan, (self.folder,)
        return type(self), tuple(getattr(self, name) for name in self.__dataclass_fields__)


def make_packing_plan(
    lengths: np.ndarray, max_tokens: int, max_length: int | None = None, max_open_rows: int = 32, seed: int = 0
) -> PackingPlan:
    """Plan rows in memory.

    Args:
        lengths: (N,) numbers of tokens of the documents; 0 leaves a document out.
        max_tokens: Token budget of a row.
        max_length: Longer documents are cut to this many tokens; None cuts none.
        max_open_rows: As in `BestFit`.
        seed: Seed of the order of the documents.

    Raises:
        ValueError: A document is longer than a row.
    """
    documents, ends, num_tokens, num_placed = [], [], 0, 0
    options = _checked(max_tokens, max_length, max_open_rows, seed)
    for numbers, sizes, tokens in _full_rows(len(lengths), lengths.__getitem__, **options):
        documents.append(numbers)
        ends.append((num_placed + sizes.cumsum()).astype(numbers.dtype))
        num_placed, num_tokens = num_placed + len(numbers), num_tokens + tokens
    del options["max_open_rows"]
    return PackingPlan(np.concatenate(documents), np.concatenate(ends), num_tokens, **options)


def _checked(max_tokens, max_length, max_open_rows, seed):
    """The settings as Python integers within their bounds."""
    sizes = {"max_tokens": max_tokens, "max_length": max_length, "max_open_rows": max_open_rows}
    sizes = {
        name: None if name == "max_length" and size is None else whole_number(name, size)
        for name, size in sizes.items()
    }
    if any(size is not None and size < 1 for size in sizes.values()):
        raise ValueError(f"{', '.join(f'{name}={size}' for name, size in sizes.items())} must be at least 1")
    return sizes | {"seed": whole_number("seed", seed)}


def write_packing_plan(
    documents: Shards | ShardsSubset,
    max_tokens: int,
    max_length: int | None = None,
    max_open_rows: int = 32,
    seed: int = 0,
    folder: str | Path | None = None,
    spare_folder: str | Path | None = None,
    verify: bool = False,
    show_progress: bool = True,
) -> PackingPlan:
    """Plan rows in a folder beside the shards, or open the plan that is there; memory does not grow with the documents.

    Processes that start together make one plan: the first writes it, the others wait for it.

    Args:
        documents: Shards, or documents of shards.
        max_tokens: Token budget of a row.
        max_length: Longer documents are cut to this many tokens; None cuts none.
        max_open_rows: As in `BestFit`.
        seed: Seed of the order of the documents.
        folder: Folder of all plans, where each plan has a folder of its own; None is `plans` in the folder of the shards.
        spare_folder: Folder for a new plan if nothing can be written to `folder`; None raises an error then.
        verify: Compare the checksums of an existing plan, which reads all of it once.
        show_progress: Show a progress bar over documents.

    Raises:
        ValueError: An argument is out of bounds, a document is longer than a row, or the existing plan is damaged or belongs to
            other documents.
        TypeError: An argument is no whole number.
        NothingToPack: There is no document (a ValueError).
        OSError: The plan cannot be written.
    """
    settings = {
        "packing": PACKING,
        "documents": documents.identity,
        **_checked(max_tokens, max_length, max_open_rows, seed),
    }
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(folder or documents.shards.folder / PLANS)
    if spare_folder and not (folder / name / PLAN).exists() and not _is_writable(folder / name):
        logger.warning(f"nothing can be written to {folder}; the packing plan is kept in {spare_folder}")
        folder = Path(spare_folder)
    folder = folder / name
    if not (folder / PLAN).exists():  # an existing plan may lie where nothing can be written
        with only_writer(folder, LOCK, wait=True):
            if not (folder / PLAN).exists():
                _warn_of_others(folder, settings)
                _write_plan(folder, documents, settings, show_progress)
    return read_packing_plan(folder, settings, verify)


def _is_writable(folder):
    """Whether files can be written to a folder, which may have to be created."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    lock = folder / LOCK  # of another user, perhaps
    return os.access(existing, os.W_OK) and (not lock.exists() or os.access(lock, os.W_OK))


def _warn_of_others(folder, settings):
    """Warn if the same documents have a plan with other settings: a plan that was made in advance is then not used."""
    others = []
    for file in folder.parent.glob(f"*/{PLAN}"):
        try:
            there = _flat_settings(_read_manifest(file)["settings"])
        except (ValueError, OSError, TypeError, KeyError):  # damaged: reported when that plan is needed
            continue
        here = _flat_settings(settings)
        if any(there[name] != here[name] for name in ("shards", "longer_than")):  # a part of a mixture has its own plan
            continue
        others.append(
            [
                f"{name} is {there.get(name)} there and {here[name]} here"
                for name in here
                if there.get(name) != here[name]
            ]
        )
    if different := min(others, key=len, default=None):
        logger.warning(
            f"plans of these shards exist with other settings ({'; '.join(different)}); a new plan is made in {folder}"
        )


def _flat_settings(settings):
    """Settings of a plan under the names of the command line."""
    flat = {"longer_than": 0, "held_out": None, **settings["documents"], **settings}
    flat["held-out documents"] = (flat.pop("held_out") or "none")[:12]
    flat["row_tokens"] = flat.pop("max_tokens")
    return {name: value for name, value in flat.items() if name != "documents"}


def read_packing_plan(folder: str | Path, settings: dict | None = None, verify: bool = False) -> PackingPlan:
    """Open a plan that `write_packing_plan` wrote; its files are mapped into memory.

    Args:
        folder: Folder of this plan.
        settings: What the plan must have been made from; None takes any.
        verify: Compare the checksums of the files.

    Raises:
        FileNotFoundError: The folder holds no finished plan.
        ValueError: The plan is damaged, or was made from something else.
    """
    folder = Path(folder)
    content = _read_manifest(folder / PLAN)
    there, dtype = content["settings"], np.dtype(content["dtype"])
    if settings is not None and there != settings:
        different = [name for name in settings if there.get(name) != settings[name]]
        details = "; ".join(f"{name} is {there.get(name)} there and {settings[name]} here" for name in different)
        raise ValueError(f"{folder / PLAN} is the plan of something else: {details}; {_way_out(folder)}")
    arrays = []
    for name, count in ((DOCUMENTS, content["num_documents"]), (ENDS, content["num_rows"])):
        file = folder / name
        is_whole = file.is_file() and file.stat().st_size == count * dtype.itemsize
        if not is_whole or (verify and file_hash(file) != content["sha256"][name]):
            raise ValueError(f"{file} is damaged: it is not what {PLAN} says; {_way_out(folder)}")
        arrays.append(np.asarray(np.memmap(file, dtype, mode="r")))
    options = {name: there[name] for name in ("max_tokens", "max_length", "seed")}
    return PackingPlan(*arrays, content["num_tokens"], **options, folder=folder)


def _read_manifest(file):
    if not file.is_file():
        raise FileNotFoundError(f"{file.parent} holds no {PLAN}; make the plan with write_packing_plan")
    try:
        content = json.loads(file.read_text("utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        content = unsealed(content, must_be_sealed=True)
        if missing := sorted({"settings", "num_documents", "num_rows", "num_tokens", "dtype", "sha256"} - set(content)):
            raise ValueError(f"it has no {', '.join(missing)}")
        return content
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); {_way_out(file.parent)}") from error


def remove_plans_of_others(folder: Path, shards: str) -> None:
    """Remove the plans in a folder of plans that were made from other shards, and unfinished ones.

    Args:
        folder: Folder of all plans.
        shards: Checksum of the shards whose plans are kept.
    """
    for plan in folder.glob("*"):
        if not re.fullmatch("[0-9a-f]{16}", plan.name) or not plan.is_dir():
            continue
        try:
            is_kept = _read_manifest(plan / PLAN)["settings"]["documents"]["shards"] == shards
        except (ValueError, OSError, TypeError, KeyError):
            is_kept = False
        if not is_kept:
            shutil.rmtree(plan, ignore_errors=True)


def _way_out(folder):
    return f"remove {folder}, and the next run makes the plan again"


def _write_plan(folder, documents, settings, show_progress):
    for file in folder.glob("*.part"):  # of a process that was ended
        file.unlink()
    num_documents = len(documents.shards)
    options = {name: settings[name] for name in ("max_tokens", "max_length", "max_open_rows", "seed")}
    totals, dtype = {"num_documents": 0, "num_rows": 0, "num_tokens": 0}, _dtype(num_documents)
    with ExitStack() as files:
        numbers_file, ends_file = (
            files.enter_context(writing(folder / name, STILL_GOOD)) for name in (DOCUMENTS, ENDS)
        )
        progress = tqdm(
            total=num_documents, desc="planning rows", unit=" documents", unit_scale=True, disable=not show_progress
        )
        files.enter_context(progress)
        for numbers, sizes, tokens in _full_rows(
            num_documents, documents.lengths_of, **options, progress=progress.update
        ):
            numbers_file.write(numbers.tobytes())
            ends_file.write((totals["num_documents"] + sizes.cumsum()).astype(dtype).tobytes())
            for name, count in zip(totals, (len(numbers), len(sizes), tokens)):
                totals[name] += count
        if not totals["num_documents"]:
            raise NothingToPack(
                f"{documents.shards.folder} holds no document of more than {documents.num_tokens} tokens, the held-out ones "
                "aside; lower longer_than, or tokenize with a larger max_length"
            )
    hashes = {name: file_hash(folder / name) for name in (DOCUMENTS, ENDS)}
    content = {"settings": settings, **totals, "dtype": dtype.str, "sha256": hashes}
    write_json(folder / PLAN, sealed(content), STILL_GOOD)


def _full_rows(
    num_documents: int,
    lengths_of: Callable[[np.ndarray], np.ndarray],
    max_tokens: int,
    max_length: int | None,
    max_open_rows: int,
    seed: int,
    progress: Callable[[int], object] = lambda count: None,
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Rows as they become complete, a block of documents at a time.

    Args:
        num_documents: N, the documents and those that are left out.
        lengths_of: Gives the lengths of numbered documents; 0 leaves a document out.
        progress: Called with the number of documents that were passed.

    Yields:
        Numbers of the documents in the rows, number of documents in each row, and tokens that were placed.
    """
    order, open_rows, dtype = (
        Permutation(num_documents, seed, ORDER),
        BestFit(max_tokens, max_open_rows),
        _dtype(num_documents),
    )
    for start in range(0, num_documents, CHUNK):
        numbers = order(np.arange(start, min(start + CHUNK, num_documents)))
        lengths = np.asarray(lengths_of(numbers))
        if max_length is not None:
            lengths = np.minimum(lengths, max_length)
        if lengths.max() > max_tokens:
            place = int(lengths.argmax())
            raise ValueError(
                f"document {numbers[place]} has {lengths[place]} tokens, a row takes 1 to {max_tokens}; raise row_tokens "
                f"(max_tokens) or lower max_length={max_length}"
            )
        for first in range(0, len(numbers), BLOCK):
            block = slice(first, first + BLOCK)
            chosen = lengths[block] > 0
            placed, rows = lengths[block][chosen], []
            for number, length in zip(numbers[block][chosen].tolist(), placed.tolist()):
                row = open_rows.place(number, length)
                if row is not None:
                    rows.append(row)
            yield *_flat(rows, dtype), int(placed.sum())
            progress(len(chosen))
    yield *_flat(open_rows.rest(), dtype), 0


def _flat(rows, dtype):
    """Items of all rows (M,), and the number of items in each row (R,)."""
    return np.fromiter(chain.from_iterable(rows), dtype), np.fromiter(map(len, rows), np.int64, len(rows))


def _dtype(num_documents):
    return np.dtype("<u4" if num_documents < 1 << 32 else "<u8")
