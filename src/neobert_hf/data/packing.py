"""Documents packed whole into rows of a token budget: `PackedStream` for streams, `PackedRows` for documents by number.

trl's `pack_dataset` packs each block of a `datasets.map` alone and writes the tokens a second time; here any row follows from its
number and the seed, which exact resuming needs.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice

import numpy as np
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .permutation import Permutation
from .plans import BestFit, PackingPlan, make_packing_plan

LONG_DOCUMENTS = ("error", "truncate", "chunk")
ROW_ORDER = 2  # purpose of a random order, part of its seed
CONFIGURATION = ("max_tokens", "long_documents", "max_open_rows")


class PackedStream(IterableDataset):
    """Pack a stream of documents into rows of at most `max_tokens`: each document whole, and exactly once.

    A document goes into the open row that it fills best. If it fits into none, it opens a row; when too many rows are open, the
    fullest row is complete. At the end of the stream the open rows follow, the fullest first, so no document is lost.
    Rows hold no padding: give Trainer `per_device_train_batch_size=1` and `PackedMLMCollator` as its collator. Several processes
    each pack the whole stream and take their share of the rows, with `accelerator_config={"dispatch_batches": False}`;
    without it accelerate stops, since it cannot cut one batch of rows that differ in length.

    In a DataLoader with workers each worker packs its own share: every n-th document, or the share that a torch
    `IterableDataset` yields in that worker. The counts and the state of this object then do not change; those of the workers'
    copies do. For a large corpus tokenize first and use `PackedRows`: a stream tokenizes in every process, and resuming reads it
    from its start.

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
    ):
        if num_rows is not None and num_rows < 1:
            raise ValueError(f"num_rows={num_rows} must be at least 1; None ends with the documents")
        if max_tokens < 1 or max_open_rows < 1:
            raise ValueError(f"max_tokens={max_tokens} and max_open_rows={max_open_rows} must be at least 1")
        if long_documents not in LONG_DOCUMENTS:
            raise ValueError(f"long_documents={long_documents!r} is not one of {', '.join(LONG_DOCUMENTS)}")
        self.documents = documents
        self.max_tokens, self.long_documents, self.max_open_rows = max_tokens, long_documents, max_open_rows
        self.seed, self.most_rows = seed, num_rows
        self._is_later_epoch = False
        self._resumed = False
        self._resumed_in_worker = False
        self._begin()

    def _begin(self):
        self.num_documents = 0  # read from the stream
        self.num_rows = 0  # yielded
        self.num_tokens = 0  # in the rows that were yielded
        self.num_truncated = 0
        self._open = BestFit(self.max_tokens, self.max_open_rows)
        self._waiting = []  # rows that are complete and not yet yielded
        self._source_state = None

    @property
    def packing_efficiency(self) -> float:
        """Share of the budget of the rows yielded so far that holds tokens; NaN before the first row."""
        return self.num_tokens / (self.num_rows * self.max_tokens) if self.num_rows else float("nan")

    def __iter__(self) -> Iterator[dict]:
        """Yield rows as dicts of lists: `input_ids` (T,), and `position_ids` (T,), 0 where a document begins."""
        worker = get_worker_info()
        if self._resumed and not self._resumed_in_worker and worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"one state cannot be shared out to {worker.num_workers} workers, each of which packs its own documents; use "
                "num_workers=0 or 1 to resume from it"
            )
        if not self._resumed:
            self._begin()
        self._resumed = False
        yield from self._finished_rows()
        if self._is_done():
            return
        for document in self._remaining_documents():
            for piece in self._pieces(document):
                if (row := self._open.place(piece, len(piece))) is not None:
                    self._waiting.append(row)
            self.num_documents += 1
            if hasattr(self.documents, "state_dict"):
                self._source_state = self.documents.state_dict()
            yield from self._finished_rows()
            if self._is_done():
                return
        self._waiting += self._open.rest()
        yield from self._finished_rows()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of a stream that shuffles by it; with `num_rows`, an epoch after the first has no rows.

        Trainer calls this before each pass, and treats a run that is resumed at its end as a second epoch.
        """
        self._is_later_epoch = epoch > 0
        if hasattr(self.documents, "set_epoch"):
            self.documents.set_epoch(epoch)

    def _remaining_documents(self):
        worker = get_worker_info()
        documents = iter(self.documents)
        if worker is not None and not isinstance(self.documents, IterableDataset):
            documents = islice(documents, worker.id, None, worker.num_workers)
        if self._source_state is None and self.num_documents:
            taken = sum(1 for _ in islice(documents, self.num_documents))
            if taken < self.num_documents:
                raise ValueError(
                    f"the state has taken {self.num_documents} documents, but the stream ends after {taken}; "
                    "it is not the stream that the state belongs to"
                )
        return documents

    def _pieces(self, document):
        if isinstance(document, dict):
            mask = document.get("attention_mask")
            document = document["input_ids"] if mask is None else compress(document["input_ids"], mask)
        ids = list(document)
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

    def _finished_rows(self):
        while self._waiting and not self._is_done():
            row, number = self._waiting.pop(0), self._next_number()
            self.num_rows += 1
            self.num_tokens += sum(map(len, row))
            seeds = {} if self.seed is None else {"mask_seed": _mask_seed(self.seed, number)}
            yield _packed(row) | seeds

    def _next_number(self):
        """The number of the next row, among those of all workers."""
        worker = get_worker_info()
        share, num_shares = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return self.num_rows * num_shares + share

    def state_dict(self) -> dict:
        """Everything that the remaining rows depend on, in plain Python types; call it between two rows.

        It is the state after the rows that were read from this object. A Trainer reads at least one row ahead, so a state taken
        during training skips rows that were never trained on. Resume a Trainer with `resume_from_checkpoint`: it reads the stream
        again and skips exactly the rows that were used.
        """
        return {
            "configuration": {name: getattr(self, name) for name in CONFIGURATION},
            "num_documents": self.num_documents,
            "num_rows": self.num_rows,
            "num_tokens": self.num_tokens,
            "num_truncated": self.num_truncated,
            "open_rows": [list(row) for row in self._open.rows],
            "waiting": [list(row) for row in self._waiting],
            "source": self._source_state,
        }

    def load_state_dict(self, state: dict) -> None:
        """Resume: the next iteration starts where `state_dict` was called.

        A stream with a state of its own (`datasets` has them) is resumed by it; in any other the documents that were read are
        skipped.

        Raises:
            ValueError: The state comes from another packing configuration. While iterating: several workers would resume from
                this one state.
        """
        here = {name: getattr(self, name) for name in CONFIGURATION}
        there = state["configuration"]
        if here != there:
            names = [name for name in CONFIGURATION if here[name] != there.get(name)]
            differences = ", ".join(f"{name}={here[name]!r} here and {there.get(name)!r} there" for name in names)
            raise ValueError(
                f"the state belongs to another packing: {differences}; use the same values, or read the stream from its beginning"
            )
        for name in ("num_documents", "num_rows", "num_tokens", "num_truncated"):
            setattr(self, name, state[name])
        self._open = BestFit(self.max_tokens, self.max_open_rows, [list(row) for row in state["open_rows"]])
        self._waiting = [list(row) for row in state["waiting"]]
        self._source_state = state["source"]
        if self._source_state is not None:
            self.documents.load_state_dict(self._source_state)
        self._resumed, self._resumed_in_worker = True, get_worker_info() is not None

    def _is_done(self):
        return self.most_rows is not None and (self._is_later_epoch or self._next_number() >= self.most_rows)


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
    that were read ahead. Documents are shuffled once and packed once. Each pass over the rows has its own order, and a row has
    another `mask_seed` in each pass. Read the rows in their own order (a sequential sampler).

    This constructor plans the rows in memory; `from_plan` takes a plan that was written to disk.

    Args:
        documents: Sequences of token ids, by number.
        lengths: (N,) their numbers of tokens.
        max_tokens: Token budget of a row.
        max_length: Longer documents are cut to this many tokens; None cuts none.
        end_token: A document that ends with this token, `[SEP]`, keeps it when it is cut, as the tokenizer does.
        num_rows: Number of rows in the run; None is one pass.
        seed: Seed of the order and of the masks.
        max_open_rows: As in `PackedStream`.

    Raises:
        ValueError: There is no document, a document is empty, a document is longer than a row and not cut, or a number is out of
            bounds.
    """

    def __init__(
        self,
        documents: Sequence,
        lengths: np.ndarray,
        max_tokens: int,
        max_length: int | None = None,
        end_token: int | None = None,
        num_rows: int | None = None,
        seed: int = 0,
        max_open_rows: int = 32,
    ):
        if max_tokens < 1 or max_open_rows < 1 or (num_rows is not None and num_rows < 1):
            raise ValueError(
                f"max_tokens={max_tokens}, max_open_rows={max_open_rows} and num_rows={num_rows} must be at least 1"
            )
        lengths = np.asarray(lengths)
        if len(lengths) != len(documents) or not len(lengths):
            raise ValueError(
                f"{len(documents)} documents with {len(lengths)} lengths cannot be packed; give at least one"
            )
        least, most = (
            limit if max_length is None else min(limit, max_length) for limit in (lengths.min(), lengths.max())
        )
        if least < 1 or most > max_tokens:
            raise ValueError(
                f"documents have {least} to {most} tokens, a row takes 1 to {max_tokens}; drop empty documents, "
                f"and raise row_tokens (max_tokens) or lower max_length={max_length}"
            )
        self._begin(
            documents, make_packing_plan(lengths, max_tokens, max_length, max_open_rows, seed), end_token, num_rows
        )

    @classmethod
    def from_plan(
        cls, documents: Sequence, plan: PackingPlan, end_token: int | None = None, num_rows: int | None = None
    ) -> "PackedRows":
        """Rows of a plan.

        Args:
            documents: Sequences of token ids, by the numbers that the plan holds; for a subset, those of its `shards`.
            plan: What `write_packing_plan` returned.
            end_token: As in the constructor.
            num_rows: Number of rows in the run; None is one pass.

        Raises:
            ValueError: `num_rows` is out of bounds.
        """
        if num_rows is not None and num_rows < 1:
            raise ValueError(f"num_rows={num_rows} must be at least 1; None is one pass")
        rows, documents = cls.__new__(cls), getattr(documents, "shards", documents)
        rows._begin(documents, plan, end_token, num_rows)
        return rows

    def _begin(self, documents, plan, end_token, num_rows):
        self.documents, self.plan, self.end_token = documents, plan, end_token
        self.max_tokens, self.max_length, self.seed = plan.max_tokens, plan.max_length, plan.seed
        self.rows_per_pass, self.num_tokens = len(plan), plan.num_tokens
        self.num_rows = self.rows_per_pass if num_rows is None else num_rows
        self._order = (None, None)  # number of a pass, and the order of the rows in it

    @property
    def packing_efficiency(self) -> float:
        """Share of the budget of all rows that holds tokens."""
        return self.num_tokens / (self.rows_per_pass * self.max_tokens)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, number: int) -> dict:
        """`input_ids` and `position_ids` (T,) as lists, and the `mask_seed` of the row."""
        if not 0 <= number < self.num_rows:
            raise IndexError(f"row {number} of {self.num_rows}")
        number_of_pass, place = divmod(number, self.rows_per_pass)
        if self._order[0] != number_of_pass:
            self._order = (number_of_pass, Permutation(self.rows_per_pass, self.seed, ROW_ORDER, number_of_pass))
        (row,) = self._order[1](np.array([place])).tolist()
        documents = [self._cut(self.documents[i]) for i in self.plan.row(row)]
        return _packed(documents) | {"mask_seed": _mask_seed(self.seed, number)}

    def _cut(self, ids):
        ids = np.asarray(ids)
        if self.max_length is None or len(ids) <= self.max_length:
            return ids
        if ids[-1] == self.end_token:
            return np.append(ids[: self.max_length - 1], ids[-1])
        return ids[: self.max_length]


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
        self.parts, self.rows_per_step, self.num_steps = parts, rows_per_step, num_steps
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
        return self.parts[self.draws[step]][int(self._earlier[step]) * self.rows_per_step + place]
