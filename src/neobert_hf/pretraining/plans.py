"""Packing plans: which documents lie in which row. A plan is made once, kept in memory or in files, and read by every process.

A plan on disk is a folder with `items.npy` (what lies in the rows, row after row), `ends.npy` (where each row ends in it) and
`plan.json`, written last: a folder without it holds no finished plan.
"""

import os
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from ..files.json_files import read_json
from ..files.output import content_hash, only_writer, write_json, writing
from .documents import Documents, Selection
from .permutation import Permutation

ORDER = 0  # purpose of a random order, part of its seed
PLANS, PLAN, LOCK = "plans", "plan.json", ".plan.lock"
ARRAYS = ("items", "ends")
BLOCK = 1 << 18  # documents that are placed together, as Python numbers
OPEN_ORDER = 40  # bits of a row's key below its number of tokens
LAST_ROW = (1 << OPEN_ORDER) - 1


class BestFit:
    """Open rows: an item goes where it leaves the least room; when too many rows are open, the fullest is complete.

    Of equally full rows the one that was opened first is chosen.

    Args:
        max_tokens: Token budget of a row.
        max_open_rows: Number of rows that wait for an item that fits; more rows pack tighter and mix the order more.

    Source: best-fit packing, arXiv 2404.10830.
    """

    def __init__(self, max_tokens: int, max_open_rows: int):
        self.max_open_rows = max_open_rows
        self._full = max_tokens << OPEN_ORDER
        # A key is the row's number of tokens, then a number that falls from row to row: the largest key is the fullest row,
        # and of equally full ones the first.
        self._keys: list[int] = []
        self._items: dict[int, list] = {}
        self._next = LAST_ROW

    def place(self, item, length: int) -> list | None:
        """Put an item of `length` tokens, at most `max_tokens`, into a row; returns the row that is now complete, or None."""
        added = length << OPEN_ORDER
        place = bisect_left(self._keys, self._full - added + LAST_ROW + 1) - 1
        if place < 0:
            key = self._next
            self._next -= 1
            self._items[key] = []
        else:
            key = self._keys.pop(place)
        self._items[key & LAST_ROW].append(item)
        key += added
        if key >= self._full:
            return self._close(key)
        insort(self._keys, key)
        if len(self._keys) > self.max_open_rows:
            return self._close(self._keys.pop())
        return None

    def rest(self) -> list[list]:
        """Close all open rows; returns them, the fullest first."""
        rows = [self._close(key) for key in reversed(self._keys)]
        self._keys.clear()
        return rows

    def _close(self, key):
        return self._items.pop(key & LAST_ROW)


@dataclass(frozen=True)
class PackingSettings:
    """Everything besides the documents that a plan depends on.

    Args:
        max_tokens: Token budget of a row.
        max_length: Longer documents are cut at this many tokens, special tokens included; None cuts none.
        long_documents: Treatment of the rest of a document above `max_length`: "truncate" drops it, as in the paper, "chunk"
            makes further pieces of it, each with the special tokens of the document.
        special_tokens: Numbers of special tokens at the beginning and at the end of each document, as in `Documents`.
        max_open_rows: As in `BestFit`.
        seed: Seed of the order of the documents.

    Raises:
        ValueError: `max_length` leaves no room for a token.
    """

    max_tokens: int
    max_length: int | None = None
    long_documents: str = "truncate"
    special_tokens: tuple[int, int] = (0, 0)
    max_open_rows: int = 32
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "special_tokens", tuple(self.special_tokens))  # JSON has a list
        if self.max_length is not None and self.max_length <= sum(self.special_tokens):
            raise ValueError(
                f"max_length={self.max_length} leaves no token beside the {sum(self.special_tokens)} special tokens of a "
                "document; raise it"
            )


@dataclass(frozen=True)
class PackingPlan:
    """Which pieces of which documents lie in which row.

    Args:
        items: (M,) what lies in the rows, row after row: number of the document x `num_pieces` + number of the piece.
        ends: (R,) where each row ends in `items`.
        num_pieces: Most pieces of a document; 1 unless long documents are chunked.
        num_tokens: Tokens in all rows together.
        settings: What the plan was made with.
        folder: Folder of the plan; None for a plan in memory.
    """

    items: np.ndarray
    ends: np.ndarray
    num_pieces: int
    num_tokens: int
    settings: PackingSettings
    folder: Path | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def row(self, number: int) -> list[tuple[int, int]]:
        """Documents in a row, each with the number of its piece."""
        start = int(self.ends[number - 1]) if number else 0
        return [divmod(item, self.num_pieces) for item in self.items[start : int(self.ends[number])].tolist()]

    def cut(self, ids: np.ndarray, piece: int = 0) -> np.ndarray:
        """Return a piece of a document, as the tokenizer truncates the document or returns what overflows."""
        ids = np.asarray(ids)
        max_length = self.settings.max_length
        if max_length is None or len(ids) <= max_length:
            return ids
        before, after = self.settings.special_tokens
        room = max_length - before - after
        end = len(ids) - after
        start = before + piece * room
        stop = min(start + room, end)
        return np.concatenate([ids[:before], ids[start:stop], ids[end:]])

    def __reduce_ex__(self, protocol):
        if self.folder is None:
            return super().__reduce_ex__(protocol)
        return read_packing_plan, (self.folder,)  # another process maps the files again


def make_packing_plan(lengths: np.ndarray, settings: PackingSettings, show_progress: bool = False) -> PackingPlan:
    """Plan rows in memory.

    Args:
        lengths: (N,) numbers of tokens of the documents; 0 leaves a document out.
        settings: How to cut, order and pack.
        show_progress: Show a progress bar over documents.

    Raises:
        ValueError: A piece is longer than a row, or there is no document.
    """
    lengths = np.asarray(lengths)
    num_pieces = int(_num_pieces(lengths.max(initial=0), settings))
    dtype = np.dtype("<u4" if len(lengths) * num_pieces < 1 << 32 else "<u8")
    open_rows = BestFit(settings.max_tokens, settings.max_open_rows)
    rows: list[np.ndarray] = []
    ends = array("q", [0])
    num_tokens = 0

    def close(complete):
        rows.append(np.fromiter(chain.from_iterable(complete), dtype))
        for row in complete:
            ends.append(ends[-1] + len(row))

    with tqdm(desc="planning rows", unit=" documents", unit_scale=True, disable=not show_progress) as progress:
        for documents, pieces, sizes in _pieces_in_order(lengths, settings):
            if sizes.max(initial=0) > settings.max_tokens:
                raise ValueError(
                    f"document {documents[sizes.argmax()]} has {sizes.max()} tokens, a row takes 1 to {settings.max_tokens}; "
                    f"raise row_tokens (max_tokens) or lower max_length={settings.max_length}"
                )
            items = (documents * num_pieces + pieces).tolist()
            placed = map(open_rows.place, items, sizes.tolist())
            close([row for row in placed if row is not None])
            num_tokens += int(sizes.sum())
            progress.update(len(sizes))
    close(open_rows.rest())
    if not ends[-1]:
        raise ValueError(f"none of the {len(lengths)} documents is left to pack; lower longer_than, or give more text")
    return PackingPlan(np.concatenate(rows), np.array(ends[1:], dtype), num_pieces, num_tokens, settings)


def _num_pieces(lengths, settings):
    """Number of pieces of documents of these lengths; 0 for a document that is left out."""
    if settings.long_documents == "truncate" or settings.max_length is None:
        return np.minimum(lengths, 1)
    num_special = sum(settings.special_tokens)
    pieces = -(-(lengths - num_special) // (settings.max_length - num_special))
    return np.where(lengths > 0, np.maximum(pieces, 1), 0)


def _pieces_in_order(
    lengths: np.ndarray, settings: PackingSettings
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """All pieces in random order, a block at a time: their documents, their numbers, and their lengths."""
    is_chunked = settings.long_documents == "chunk" and settings.max_length is not None
    num_places = len(lengths)
    if is_chunked:
        first = np.concatenate([[0], _num_pieces(lengths, settings).cumsum()])
        num_places = int(first[-1])
    if not num_places:
        return
    order = Permutation(num_places, settings.seed, ORDER)
    room = (settings.max_length or 0) - sum(settings.special_tokens)
    for start in range(0, num_places, BLOCK):
        documents = order(np.arange(start, min(start + BLOCK, num_places)))
        pieces = np.zeros_like(documents)
        if is_chunked:
            places = documents
            documents = np.searchsorted(first, places, "right") - 1
            pieces = places - first[documents]
        sizes = lengths[documents] - pieces * room
        if settings.max_length is not None:
            sizes = np.minimum(sizes, settings.max_length)
        is_taken = sizes > 0
        yield documents[is_taken], pieces[is_taken], sizes[is_taken]


def write_packing_plan(
    documents: Documents | Selection,
    max_tokens: int,
    max_length: int | None = None,
    fallback_folder: str | Path | None = None,
    show_progress: bool = True,
    **settings,
) -> PackingPlan:
    """Plan rows in a folder beside the documents, or open the plan that is there.

    Processes that start together make one plan: the first writes it, the others wait for it.

    Args:
        documents: What to pack.
        max_tokens: Token budget of a row.
        max_length: As in `PackingSettings`.
        fallback_folder: Folder for a new plan if the folder of the documents is read-only.
        show_progress: Show a progress bar over documents.
        **settings: Further fields of `PackingSettings`; the special tokens are those of the documents.

    Raises:
        ValueError: A piece is longer than a row, there is no document, or the existing plan is damaged.
        OSError: The plan cannot be written.
    """
    if isinstance(documents, Documents):
        documents = Selection(documents)
    beside = documents.documents.folder
    packing = PackingSettings(max_tokens, max_length, special_tokens=documents.documents.special_tokens, **settings)
    made_from = {"documents": documents.identity, "settings": vars(packing)}
    name = content_hash(made_from)[:16]
    folder = beside / PLANS / name
    if not (folder / PLAN).exists():
        if fallback_folder is not None and not os.access(beside, os.W_OK):
            folder = Path(fallback_folder, name)
        with only_writer(folder, LOCK, wait=True):
            if not (folder / PLAN).exists():  # of another process, meanwhile
                _write(folder, make_packing_plan(documents.lengths, packing, show_progress), made_from)
    return read_packing_plan(folder)


def _write(folder, plan, made_from):
    for file in folder.glob("*.part"):  # of a process that was killed
        file.unlink()
    for name in ARRAYS:
        with writing(folder / f"{name}.npy") as file:
            np.save(file, getattr(plan, name))
    counts = {"num_pieces": plan.num_pieces, "num_tokens": plan.num_tokens}
    write_json(folder / PLAN, made_from | counts)


def read_packing_plan(folder: str | Path) -> PackingPlan:
    """Open a plan that `write_packing_plan` wrote; its files are mapped into memory.

    Raises:
        ValueError: The plan is damaged, or the folder holds no finished plan.
    """
    folder = Path(folder)
    try:
        content = read_json(folder / PLAN)
        items, ends = (np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ARRAYS)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{folder} is damaged ({error}); remove it, and the next run makes the plan again") from error
    settings = PackingSettings(**content["settings"])
    return PackingPlan(items, ends, content["num_pieces"], content["num_tokens"], settings, folder)
