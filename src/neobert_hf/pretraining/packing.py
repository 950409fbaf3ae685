"""Documents packed whole into rows of a token budget: `PackedStream` for streams, `PackedRows` for documents by number.

trl's `pack_dataset` packs each block of a `datasets.map` alone and writes the tokens a second time; here any row follows from its
number and the seed, which exact resuming needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, islice

import numpy as np
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .documents import Selection
from .permutation import Permutation
from .plans import BestFit, PackingPlan

LONG_DOCUMENTS = ("error", "truncate", "chunk")
ROW_ORDER = 2  # purpose of a random order, part of its seed


class PackedStream(IterableDataset):
    """Pack a stream of documents into rows of at most `max_tokens`: each document whole, and exactly once.

    A document goes into the open row that it fills best. If it fits into none, it opens a row; when too many rows are open, the
    fullest row is complete. At the end of the stream the open rows follow, the fullest first, so no document is lost.
    Rows hold no padding: give Trainer `per_device_train_batch_size=1` and `PackedMLMCollator` as its collator. Several processes
    each pack the whole stream and take their share of the rows, with `accelerator_config={"dispatch_batches": False}`;
    without it accelerate stops, since it cannot cut one batch of rows that differ in length.

    In a DataLoader with workers each worker packs its own share: every n-th document, or the share that a torch
    `IterableDataset` yields in that worker. The counts of this object then do not change; those of the workers' copies do. For a
    large corpus tokenize first and use `PackedRows`: a stream tokenizes in every process, and a resumed Trainer reads it from its
    start.

    Args:
        documents: Dicts with `input_ids`, without the tokens whose `attention_mask` is 0, or plain lists of token ids. More than
            one pass needs a collection or a dataset, not a generator.
        max_tokens: Token budget of a row.
        long_documents: Treatment of a document above the budget: "error" refuses it, "truncate" keeps its first `max_tokens`
            tokens, "chunk" cuts it into documents of at most `max_tokens` tokens.
        max_open_rows: Number of rows that wait for a document that fits; more rows pack tighter and mix the order more.
        seed: Give each row a `mask_seed` that depends on this seed and the row's number, so that each reading of the stream masks
            the same tokens; None leaves the masks to the collator's own generator.
        num_rows: Number of rows of the whole run, over all workers, in one pass; a later epoch has no rows. None ends with the
            documents, in each epoch.
        mask_rate: The `mask_rate` of a row by its number, if it changes during the run.

    Attributes:
        num_yielded: Rows yielded in this pass.
        num_documents: Documents read in this pass.
        num_truncated: Documents that were truncated in this pass.

    Raises:
        ValueError: An argument is out of bounds; while iterating, a document is empty or above the budget.

    Source: paper, section 3 and Table 2, row M6 (documents must not attend to one another, hence `position_ids`).
    """

    def __init__(
        self,
        documents: Iterable,
        max_tokens: int,
        long_documents: str = "error",
        max_open_rows: int = 32,
        seed: int | None = None,
        num_rows: int | None = None,
        mask_rate: Callable[[int], float] | None = None,
    ):
        if long_documents not in LONG_DOCUMENTS:
            raise ValueError(f"long_documents={long_documents!r} is not one of {', '.join(LONG_DOCUMENTS)}")
        self.documents = documents
        self.max_tokens = max_tokens
        self.long_documents = long_documents
        self.max_open_rows = max_open_rows
        self.seed = seed
        self.num_rows = num_rows
        self.mask_rate = mask_rate
        self.epoch = 0
        self._begin()

    def _begin(self):
        self.num_yielded = self.num_documents = self.num_truncated = self._num_tokens = 0

    @property
    def packing_efficiency(self) -> float:
        """Share of the budget of the rows yielded so far that holds tokens; NaN before the first row."""
        if not self.num_yielded:
            return math.nan
        return self._num_tokens / (self.num_yielded * self.max_tokens)

    def __iter__(self) -> Iterator[dict]:
        """Yield rows as dicts of lists: `input_ids` (T,), and `position_ids` (T,), 0 where a document begins."""
        self._begin()
        worker, num_workers = _share()
        limit = None
        if self.num_rows:
            limit = len(range(worker, self.num_rows, num_workers)) if self.epoch == 0 else 0
        for documents in islice(self._rows(worker, num_workers), limit):
            number = self.num_yielded * num_workers + worker  # among the rows of all workers
            row = _packed(documents)
            self.num_yielded += 1
            self._num_tokens += len(row["input_ids"])
            if self.seed is not None:
                row["mask_seed"] = _mask_seed(self.seed, number)
            if self.mask_rate is not None:
                row["mask_rate"] = self.mask_rate(number)
            yield row

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of a stream that shuffles by it; with `num_rows`, an epoch after the first has no rows.

        Trainer calls this before each pass, and treats a run that is resumed at its end as a second epoch.
        """
        self.epoch = epoch
        if hasattr(self.documents, "set_epoch"):
            self.documents.set_epoch(epoch)

    def _rows(self, worker, num_workers):
        """Rows as lists of documents."""
        documents = self.documents
        if not isinstance(documents, IterableDataset):
            documents = islice(documents, worker, None, num_workers)
        packer = BestFit(self.max_tokens, self.max_open_rows)
        for document in documents:
            for piece in self._pieces(document):
                row = packer.place(piece, len(piece))
                if row is not None:
                    yield row
            self.num_documents += 1
        yield from packer.rest()

    def _pieces(self, document):
        ids = document
        if isinstance(document, dict):
            ids = document["input_ids"]
            mask = document.get("attention_mask")
            if mask is not None:
                ids = compress(ids, mask)
        ids = list(ids)
        number = self.num_documents
        if not ids:
            raise ValueError(f"document {number} of the stream holds no token; drop empty documents before packing")
        if len(ids) <= self.max_tokens:
            return [ids]
        if self.long_documents == "error":
            raise ValueError(
                f"document {number} of the stream has {len(ids)} tokens, the budget of a row is {self.max_tokens}; raise "
                "max_tokens, or choose long_documents='truncate' or 'chunk'"
            )
        if self.long_documents == "truncate":
            self.num_truncated += 1
            return [ids[: self.max_tokens]]
        return [ids[start : start + self.max_tokens] for start in range(0, len(ids), self.max_tokens)]


def _share() -> tuple[int, int]:
    """Number of this worker of a DataLoader, and number of workers; (0, 1) outside of a worker."""
    worker = get_worker_info()
    if worker is None:
        return 0, 1
    return worker.id, worker.num_workers


def _packed(documents):
    return {
        "input_ids": np.concatenate(documents).tolist(),
        "position_ids": np.concatenate([np.arange(len(document)) for document in documents]).tolist(),
    }


def _mask_seed(seed, number):
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> np.uint64(1))


class PackedRows(Dataset):
    """Packed rows of a run, each a pure function of its number.

    What a row holds and how it is masked does not depend on the progress of the run, on the number of devices, or on rows
    that were read ahead. Documents are shuffled and packed once. Each pass over the rows has its own order, and a row has
    another `mask_seed` in each pass. Read the rows in their own order (a sequential sampler).

    Args:
        documents: Sequences of token ids, by number; of a `Selection` its whole collection is read.
        plan: What `write_packing_plan` or `make_packing_plan` returned for the documents.
        num_rows: Number of rows in the run; None is one pass.
    """

    def __init__(self, documents: Sequence | Selection, plan: PackingPlan, num_rows: int | None = None):
        if isinstance(documents, Selection):
            documents = documents.documents
        self.documents = documents
        self.plan = plan
        self.num_rows = num_rows or len(plan)
        self._pass = -1

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, number: int) -> dict:
        """`input_ids` and `position_ids` (T,) as lists, and the `mask_seed` of the row."""
        if not 0 <= number < self.num_rows:
            raise IndexError(f"row {number} of {self.num_rows}")
        plan, seed = self.plan, self.plan.settings.seed
        number_of_pass, place = divmod(number, len(plan))
        if self._pass != number_of_pass:
            self._pass = number_of_pass
            self._order = Permutation(len(plan), seed, ROW_ORDER, number_of_pass)
        (row,) = self._order(np.array([place])).tolist()
        pieces = [plan.cut(self.documents[document], piece) for document, piece in plan.row(row)]
        return _packed(pieces) | {"mask_seed": _mask_seed(seed, number)}


class MixedRows(Dataset):
    """Rows of several collections; each optimizer step draws all of its rows from one collection.

    The choice depends on the seed and the number of the step alone, not on the number of devices.

    Args:
        parts: `PackedRows`, each with enough rows for the whole run.
        shares: Probability of each part.
        rows_per_step: Rows in an optimizer step, on all devices and accumulation steps together.
        num_steps: Optimizer steps of the run.
        seed: Seed of the draws.

    Source: paper, section 3.2: each batch of phase 2 comes from one of three sub-datasets.
    """

    def __init__(self, parts: list, shares, rows_per_step: int, num_steps: int, seed: int = 0):
        self.parts = parts
        self.rows_per_step = rows_per_step
        self.num_steps = num_steps
        self.draws = np.random.default_rng(seed).choice(len(parts), size=num_steps, p=shares)
        # Number of earlier steps that drew from the same part: it gives the place of the step's rows in the part.
        self._earlier = np.zeros(num_steps, np.int64)
        for part in range(len(parts)):
            drawn = self.draws == part
            self._earlier[drawn] = np.arange(drawn.sum())

    def __len__(self) -> int:
        return self.num_steps * self.rows_per_step

    def __getitem__(self, number: int) -> dict:
        """A row of the part that its step draws from."""
        step, place = divmod(number, self.rows_per_step)
        part = self.parts[self.draws[step]]
        return part[int(self._earlier[step]) * self.rows_per_step + place]


class RatedRows(Dataset):
    """Rows with the `mask_rate` of their number, for a share of masked tokens that changes during the run.

    Args:
        rows: `PackedRows` or `MixedRows`.
        mask_rate: The share by the number of a row.
    """

    def __init__(self, rows: Dataset, mask_rate: Callable[[int], float]):
        self.rows = rows
        self.mask_rate = mask_rate

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict:
        """The row and its `mask_rate`."""
        return self.rows[number] | {"mask_rate": self.mask_rate(number)}
