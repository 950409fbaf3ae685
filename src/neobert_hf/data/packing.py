"""Documents packed whole into rows of a token budget: `PackedStream` for streams, `PackedRows` where each can be reached."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from torch.utils.data import Dataset, IterableDataset, get_worker_info

LONG_DOCUMENTS = ("error", "truncate", "chunk")
CONFIGURATION = ("max_tokens", "long_documents", "max_open_rows")


class BestFit:
    """Open rows: an item goes where it leaves the least room, and the fullest row is complete when too many are open.

    Args:
        max_tokens: Token budget of a row.
        max_open_rows: How many rows wait for an item that fits; more pack tighter and mix the order more.
        rows: Open rows to go on with, each a list of items.

    Source: best-fit packing, arXiv 2404.10830.
    """

    def __init__(self, max_tokens: int, max_open_rows: int, rows: Iterable[list] = ()):
        self.max_tokens, self.max_open_rows = max_tokens, max_open_rows
        self.rows = [(sum(map(len, row)), row) for row in rows]

    def place(self, item, length: int) -> list | None:
        """Put an item of `length` tokens, at most `max_tokens`, into a row; the row that became complete, if any."""
        room = self.max_tokens - length
        place = max(
            (i for i, row in enumerate(self.rows) if row[0] <= room), key=lambda i: self.rows[i][0], default=None
        )
        if place is None:
            place = len(self.rows)
            self.rows.append((0, []))
        tokens, items = self.rows[place]
        items.append(item)
        self.rows[place] = (tokens + length, items)
        if tokens + length == self.max_tokens:
            return self.rows.pop(place)[1]
        if len(self.rows) > self.max_open_rows:
            return self.rows.pop(max(range(len(self.rows)), key=lambda i: self.rows[i][0]))[1]
        return None

    def rest(self) -> list[list]:
        """The open rows, the fullest first; none stays open."""
        rows = sorted(self.rows, key=lambda row: row[0], reverse=True)
        self.rows = []
        return [items for _, items in rows]


class PackedStream(IterableDataset):
    """Pack documents into rows of at most `max_tokens`, each whole, and every one exactly once.

    A document goes into the open row that it fills best; if it fits into none it opens a row, and when too many are open
    the fullest one is complete. At the end of the stream the open rows follow, the fullest first, so nothing is lost.
    Rows hold no padding: give Trainer `per_device_train_batch_size=1` and `PackedMLMCollator` as its collator. Several processes
    each pack the whole stream and take their share of the rows, with `accelerator_config={"dispatch_batches": False}`;
    without it accelerate stops, since it cannot cut one batch of rows that differ in length.

    In a DataLoader with workers each worker packs its own share: every n-th document, or what a torch `IterableDataset`
    gives to that worker. The counts and the state of this object then stay as they are; those of the workers' copies move.

    Args:
        documents: Dicts with `input_ids`, or plain lists of token ids. To be iterated more than once it must be a
            collection or a dataset, not a generator.
        max_tokens: Token budget of a row.
        long_documents: What becomes of a document above the budget: "error" refuses it, "truncate" keeps its first
            `max_tokens` tokens, "chunk" makes documents of `max_tokens` tokens and a rest out of it, as they are.
        max_open_rows: How many rows wait for a document that fits; more pack tighter and mix the order more.
        seed: Give each row a `mask_seed` that follows from this and its number, so that masks are the same however often the
            stream is read; None leaves the masks to the collator's own generator.
        num_rows: Number of rows of a whole run, those of all workers counted, in one pass; a later epoch has none. None ends with
            the documents, in each epoch.

    Raises:
        ValueError: An argument is out of range; while iterating, a document is empty or above the budget.

    Source: paper, section 3 and Table 2, row M6 (documents must not see one another: hence `position_ids`).
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
        self.num_documents = 0  # taken from the stream
        self.num_rows = 0  # given out
        self.num_tokens = 0  # in the rows that were given out
        self.num_truncated = 0
        self._open = BestFit(self.max_tokens, self.max_open_rows)
        self._waiting = []  # rows that are complete and not yet given out
        self._source_state = None

    @property
    def packing_efficiency(self) -> float:
        """Share of the budget of the rows given out so far that holds tokens; NaN before the first."""
        return self.num_tokens / (self.num_rows * self.max_tokens) if self.num_rows else float("nan")

    def __iter__(self) -> Iterator[dict]:
        """Give rows as dicts of lists: `input_ids` (T,), and `position_ids` (T,), 0 where a document begins."""
        worker = get_worker_info()
        if self._resumed and not self._resumed_in_worker and worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"one state cannot be shared out to {worker.num_workers} workers, each of which packs its own documents; use "
                "num_workers=0 or 1 to go on from it"
            )
        if not self._resumed:
            self._begin()
        self._resumed = False
        yield from self._give_out()
        if self._is_done():
            return
        for document in self._remaining_documents():
            for piece in self._pieces(document):
                if (row := self._open.place(piece, len(piece))) is not None:
                    self._waiting.append(row)
            self.num_documents += 1
            if hasattr(self.documents, "state_dict"):
                self._source_state = self.documents.state_dict()
            yield from self._give_out()
            if self._is_done():
                return
        self._waiting += self._open.rest()
        yield from self._give_out()

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to a stream that shuffles by it; with `num_rows`, an epoch after the first has no rows.

        Trainer calls this before each pass, and counts a run that is resumed at its end as a second one.
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
        ids = list(document["input_ids"] if isinstance(document, dict) else document)
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

    def _give_out(self):
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
        """Everything that the rest of the rows depends on, in plain Python types; take it between two rows.

        It is the state after the rows that were read from here. Where you read them yourself, these are the rows that you
        have used. A Trainer reads at least one row ahead, so a state taken beside it skips what was never trained: there, go on
        with `resume_from_checkpoint`, which reads the stream again and leaves out exactly what was used.
        """
        return {
            "configuration": {name: getattr(self, name) for name in CONFIGURATION},
            "num_documents": self.num_documents,
            "num_rows": self.num_rows,
            "num_tokens": self.num_tokens,
            "num_truncated": self.num_truncated,
            "open_rows": [list(row) for _, row in self._open.rows],
            "waiting": [list(row) for row in self._waiting],
            "source": self._source_state,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on with the next iteration where `state_dict` was taken.

        The stream goes on by its own state if it has one (`datasets` streams do), else by skipping what was taken.

        Raises:
            ValueError: The state comes from another packing configuration. While iterating: several workers would go on from
                this one state.
        """
        here = {name: getattr(self, name) for name in CONFIGURATION}
        there = state["configuration"]
        if here != there:
            names = [name for name in CONFIGURATION if here[name] != there.get(name)]
            differences = ", ".join(f"{name}={here[name]!r} here and {there.get(name)!r} there" for name in names)
            raise ValueError(
                f"the state belongs to another packing: {differences}; use the same values, or start the stream anew"
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
    """Packed rows of a run, each a pure function of its number: what a row holds and how it is masked never depends on how
    far a run has come, how many devices share it, or what was read ahead.

    Documents are shuffled once and packed once. Each pass over them has an order of the rows of its own, and a row has
    another `mask_seed` in each pass. Read them in their own order (a sequential sampler).

    Args:
        documents: Sequences of token ids, by number.
        lengths: (N,) their numbers of tokens.
        max_tokens: Token budget of a row.
        max_length: Documents above it are cut; None: none is.
        end_token: A document that ends with this token, `[SEP]`, keeps it when it is cut, as a tokenizer would have cut it.
        num_rows: Number of rows in the run; None is one pass.
        seed: Of the order and of the masks.
        max_open_rows: As in `PackedStream`.

    Raises:
        ValueError: There is no document, one is empty, one is above the budget and not cut, or a number is out of bounds.
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
        cut = lengths if max_length is None else np.minimum(lengths, max_length)
        if cut.min() < 1 or cut.max() > max_tokens:
            raise ValueError(
                f"documents have {cut.min()} to {cut.max()} tokens, a row takes 1 to {max_tokens}; drop empty documents, "
                f"and raise max_tokens or lower max_length={max_length}"
            )
        self.documents, self.max_tokens, self.max_length, self.seed = documents, max_tokens, max_length, seed
        self.end_token = end_token
        self.num_tokens = int(cut.sum())
        open_rows, rows = BestFit(max_tokens, max_open_rows), []
        for number in np.random.default_rng(seed).permutation(len(documents)).tolist():
            if (row := open_rows.place(number, int(cut[number]))) is not None:
                rows.append(row)
        rows += open_rows.rest()
        self._documents = np.concatenate([np.asarray(row, np.int64) for row in rows])
        self._ends = np.cumsum([len(row) for row in rows])
        self.rows_per_pass = len(rows)
        self.num_rows = self.rows_per_pass if num_rows is None else num_rows
        self._order = (None, None)  # the number of a pass, and the order of the rows in it

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
            rng = np.random.default_rng((self.seed, number_of_pass))
            self._order = (number_of_pass, rng.permutation(self.rows_per_pass))
        row = int(self._order[1][place])
        start = self._ends[row - 1] if row else 0
        documents = [self._cut(self.documents[int(i)]) for i in self._documents[start : self._ends[row]]]
        return _packed(documents) | {"mask_seed": _mask_seed(self.seed, number)}

    def _cut(self, ids):
        ids = np.asarray(ids)
        if self.max_length is None or len(ids) <= self.max_length:
            return ids
        if ids[-1] == self.end_token:
            return np.append(ids[: self.max_length - 1], ids[-1])
        return ids[: self.max_length]


class MixedRows(Dataset):
    """Rows of several collections; each optimizer step draws all of its rows from one of them.

    Which one a step draws from depends on the seed and the number of the step alone, not on the number of devices.

    Args:
        parts: `PackedRows`, each long enough for the whole run.
        shares: Probability of each.
        rows_per_step: Rows in an optimizer step, on all devices and accumulation steps together.
        num_steps: Optimizer steps of the run.
        seed: Of the draws.

    Source: paper, section 3.2: each batch of phase 2 comes from one of three sub-datasets.
    """

    def __init__(self, parts: list, shares, rows_per_step: int, num_steps: int, seed: int = 0):
        self.parts, self.rows_per_step, self.num_steps = parts, rows_per_step, num_steps
        self.draws = np.random.default_rng(seed).choice(len(parts), size=num_steps, p=shares)
        # How many earlier steps drew from the same part: where a step's rows begin in it.
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
