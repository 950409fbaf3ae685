"""`PackedStream`: documents of a stream, packed whole into rows of a token budget."""

from collections.abc import Iterable, Iterator
from itertools import islice

from torch.utils.data import IterableDataset, get_worker_info

LONG_DOCUMENTS = ("error", "truncate", "chunk")
CONFIGURATION = ("max_tokens", "long_documents", "max_open_rows")


class PackedStream(IterableDataset):
    """Pack documents into rows of at most `max_tokens`, each whole, and every one exactly once.

    A document goes into the open row that it fills best; if it fits into none it opens a row, and when too many are open
    the fullest one is complete. At the end of the stream the open rows follow, the fullest first, so nothing is lost.
    Rows hold no padding: give Trainer `per_device_train_batch_size=1` and `PackedMLMCollator` as its collator.

    In a DataLoader with workers each worker packs its own share: every n-th document, or what a torch `IterableDataset`
    gives to that worker.

    Args:
        documents: Dicts with `input_ids`, or plain lists of token ids. To be iterated more than once it must be a
            collection or a dataset, not a generator.
        max_tokens: Token budget of a row.
        long_documents: What becomes of a document above the budget: "error" refuses it, "truncate" keeps its first
            `max_tokens` tokens, "chunk" makes documents of `max_tokens` tokens and a rest out of it, as they are.
        max_open_rows: How many rows wait for a document that fits; more pack tighter and mix the order more.

    Raises:
        ValueError: An argument is out of range; while iterating, a document is empty or above the budget.

    Source: paper, section 3 and Table 2, row M6 (documents must not see one another: hence `position_ids`); best-fit
        packing is arXiv 2404.10830.
    """

    def __init__(
        self,
        documents: Iterable,
        max_tokens: int,
        long_documents: str = "error",
        max_open_rows: int = 32,
    ):
        if max_tokens < 1 or max_open_rows < 1:
            raise ValueError(f"max_tokens={max_tokens} and max_open_rows={max_open_rows} must be at least 1")
        if long_documents not in LONG_DOCUMENTS:
            raise ValueError(f"long_documents={long_documents!r} is not one of {', '.join(LONG_DOCUMENTS)}")
        self.documents = documents
        self.max_tokens, self.long_documents, self.max_open_rows = max_tokens, long_documents, max_open_rows
        self._resumed = False
        self._begin()

    def _begin(self):
        self.num_documents = 0  # taken from the stream
        self.num_rows = 0  # given out
        self.num_tokens = 0  # in the rows that were given out
        self.num_truncated = 0
        self._open_rows = []  # each a list of documents
        self._waiting = []  # rows that are complete and not yet given out
        self._source_state = None

    @property
    def packing_efficiency(self) -> float:
        """Share of the budget of the rows given out so far that holds tokens; NaN before the first."""
        return self.num_tokens / (self.num_rows * self.max_tokens) if self.num_rows else float("nan")

    def __iter__(self) -> Iterator[dict]:
        """Give rows as dicts of lists: `input_ids` (T,), and `position_ids` (T,), 0 where a document begins."""
        if not self._resumed:
            self._begin()
        self._resumed = False
        yield from self._give_out()
        for document in self._remaining_documents():
            for piece in self._pieces(document):
                self._place(piece)
            self.num_documents += 1
            if hasattr(self.documents, "state_dict"):
                self._source_state = self.documents.state_dict()
            yield from self._give_out()
        self._waiting += sorted(self._open_rows, key=_num_tokens, reverse=True)
        self._open_rows = []
        yield from self._give_out()

    def state_dict(self) -> dict:
        """Everything that the rest of the rows depends on, in plain Python types; take it between two rows."""
        return {
            "configuration": {name: getattr(self, name) for name in CONFIGURATION},
            "num_documents": self.num_documents,
            "num_rows": self.num_rows,
            "num_tokens": self.num_tokens,
            "num_truncated": self.num_truncated,
            "open_rows": [list(row) for row in self._open_rows],
            "waiting": [list(row) for row in self._waiting],
            "source": self._source_state,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on with the next iteration where `state_dict` was taken.

        The stream goes on by its own state if it has one (`datasets` streams do), else by skipping what was taken.

        Raises:
            ValueError: The state comes from another packing configuration.
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
        self._open_rows = [list(row) for row in state["open_rows"]]
        self._waiting = [list(row) for row in state["waiting"]]
        self._source_state = state["source"]
        if self._source_state is not None:
            self.documents.load_state_dict(self._source_state)
        self._resumed = True

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to a stream that shuffles by it."""
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

    def _place(self, piece):
        fitting = [row for row in self._open_rows if _num_tokens(row) + len(piece) <= self.max_tokens]
        if fitting:
            row = max(fitting, key=_num_tokens)
            row.append(piece)
        else:
            row = [piece]
            self._open_rows.append(row)
        if _num_tokens(row) == self.max_tokens:
            self._complete(row)
        elif len(self._open_rows) > self.max_open_rows:
            self._complete(max(self._open_rows, key=_num_tokens))

    def _complete(self, row):
        self._open_rows = [other for other in self._open_rows if other is not row]
        self._waiting.append(row)

    def _give_out(self):
        while self._waiting:
            row = self._waiting.pop(0)
            self.num_rows += 1
            self.num_tokens += _num_tokens(row)
            yield {
                "input_ids": [token for document in row for token in document],
                "position_ids": [position for document in row for position in range(len(document))],
            }


def _num_tokens(row):
    return sum(map(len, row))
