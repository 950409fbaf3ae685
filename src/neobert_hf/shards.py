"""Tokenized text on disk: `tokenize_corpus` writes memory-mapped shards once, `Shards` reads them.

A folder of shards holds `shard-00000.arrow`, ... (Arrow streams with one column of token ids, which
`datasets.Dataset.from_file` reads too) and `manifest.json`, written last: what has no manifest is not finished. Each shard
gets its own small record when it is whole, so that an interrupted run goes on after the last whole shard.
"""

import hashlib
import json
import multiprocessing
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast

from .wordpiece import plain_tokenizer, tokenizer_hash

MANIFEST = "manifest.json"
COLUMN = "input_ids"
LONG_DOCUMENTS = ("truncate", "chunk")
MOST_ON_WINDOWS = 61  # processes that one pool can wait for there


def tokenize_corpus(
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    folder: str | Path,
    source: dict | None = None,
    max_length: int = 4096,
    long_documents: str = "truncate",
    documents_per_shard: int = 10_000,
    num_processes: int | None = None,
    show_progress: bool = True,
) -> "Shards":
    """Tokenize each text once and write the ids to a folder of shards; call it again to go on after an interruption.

    Memory does not grow with the corpus. Texts without a token are left out and counted.

    Args:
        texts: Documents, the same in the same order whenever they are read. A lone surrogate becomes a question mark.
        tokenizer: A fast tokenizer; its special tokens are added.
        folder: Where to write; made if it is not there.
        source: What the texts are, for the manifest and so that another corpus is not continued; plain types.
        max_length: Where a document is cut, in tokens, the special ones included.
        long_documents: What becomes of the rest: "truncate" drops it, as in the paper, "chunk" makes further documents of it.
        documents_per_shard: Documents of the source in a shard.
        num_processes: Processes that tokenize; None is one for each core. They are started anew on macOS and Windows, so a
            script that calls this keeps it under `if __name__ == "__main__":`. 1 starts none and needs no such line.
        show_progress: Show a progress bar over documents.

    Raises:
        ValueError: The folder holds shards of something else, or no text has a token.
        OSError: A shard cannot be written, for want of space for instance; finished shards stay whole.
        RuntimeError: The processes could not start, or one of them ended.
    """
    if long_documents not in LONG_DOCUMENTS:
        raise ValueError(f"long_documents={long_documents!r} is not one of {', '.join(LONG_DOCUMENTS)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "source": source or {},
        "tokenizer": {"sha256": tokenizer_hash(tokenizer), "vocab_size": len(tokenizer)},
        "max_length": max_length,
        "long_documents": long_documents,
        "documents_per_shard": documents_per_shard,
    }
    if (folder / MANIFEST).exists():
        shards = Shards(folder)
        _check_same(folder, settings, {name: shards.manifest[name] for name in settings})
        return shards
    if (folder / "settings.json").exists():
        _check_same(folder, settings, json.loads((folder / "settings.json").read_text("utf-8")))
    elif any(file.suffix != ".part" for file in folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no shards; choose another folder")
    write_json(folder / "settings.json", settings)

    options = (folder, plain_tokenizer(tokenizer).to_str(), max_length, long_documents)
    if num_processes is None:  # not the cores of the whole machine, where a job has some of them
        num_processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if sys.platform == "win32":
        num_processes = min(num_processes, MOST_ON_WINDOWS)
    try:
        records = _write_shards(texts, documents_per_shard, num_processes, options, show_progress)
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a process that tokenizes could not start, or ended: in a script, keep what starts it under "
            "if __name__ == '__main__':, or pass num_processes=1, which starts none; if memory was short, pass fewer"
        ) from error
    shards = [records[number] for number in sorted(records)]
    if not sum(shard["tokens"] for shard in shards):
        raise ValueError(f"no text of {source or 'the corpus'} has a token; there is nothing to train on")
    histogram = Counter()
    for shard in shards:
        histogram.update(shard.pop("length_histogram"))
    totals = {f"num_{name}": sum(shard[name] for shard in shards) for name in ("documents", "tokens", "empty")}
    manifest = {
        **settings,
        **totals,
        "length_histogram": {str(top): histogram[str(top)] for top in sorted(map(int, histogram))},
        "shards": shards,
    }
    write_json(folder / MANIFEST, manifest)
    (folder / "settings.json").unlink()
    for shard in shards:
        (folder / shard["file"]).with_suffix(".json").unlink()
    return Shards(folder)


def _check_same(folder, here, there):
    if different := sorted(name for name in here if here[name] != there.get(name)):
        details = "; ".join(f"{name} is {there.get(name)} there and {here[name]} here" for name in different)
        raise ValueError(
            f"{folder} holds shards of something else: {details}. Choose another folder, or remove this one"
        )


def _write_shards(texts, documents_per_shard, num_processes, options, show_progress):
    """Write the shards that are not there yet; the record of each, by number."""
    folder, records, pending = options[0], {}, set()
    make_pool = ThreadPoolExecutor if num_processes == 1 else ProcessPoolExecutor
    progress = tqdm(desc="tokenizing", unit=" documents", disable=not show_progress)
    with progress, make_pool(num_processes, initializer=_begin_worker, initargs=options) as pool:
        for number, block in enumerate(_blocks(texts, documents_per_shard)):
            record = _finished(folder, number)
            if record is not None:
                records[number] = record
                progress.update(len(block))
                continue
            pending.add(pool.submit(_write_shard, number, block))
            if len(pending) > num_processes:  # no more texts wait in memory than the processes need
                pending = _collect(pending, records, progress)
        while pending:
            pending = _collect(pending, records, progress)
    return records


def _blocks(texts, size) -> Iterator[list[str]]:
    texts = iter(texts)
    while block := list(islice(texts, size)):
        yield block


def _collect(pending, records, progress):
    done, pending = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        number, record = future.result()
        records[number] = record
        progress.update(record["texts"])
    return pending


def _shard_file(folder, number):
    return folder / f"shard-{number:05d}.arrow"


def _finished(folder, number):
    """The record of a shard that an earlier run has finished, or None."""
    file = _shard_file(folder, number)
    try:
        record = json.loads(file.with_suffix(".json").read_text("utf-8"))
    except FileNotFoundError:
        return None
    return record if file.is_file() and file.stat().st_size == record["bytes"] else None


_worker = threading.local()


def _begin_worker(folder, tokenizer, max_length, long_documents):
    if multiprocessing.parent_process() is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    tokenizer = Tokenizer.from_str(tokenizer)
    tokenizer.enable_truncation(max_length)
    _worker.tokenizer, _worker.folder, _worker.is_chunking = tokenizer, folder, long_documents == "chunk"
    _worker.num_special = tokenizer.num_special_tokens_to_add(is_pair=False)


def _write_shard(number, texts):
    """Tokenize a block of texts, write its shard and then its record; returns (number, record)."""
    tokenizer, folder = _worker.tokenizer, _worker.folder
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32
    documents, num_empty = [], 0
    try:
        encodings = tokenizer.encode_batch_fast(texts)
    except (TypeError, UnicodeEncodeError):  # a lone surrogate, which is no text: it becomes a question mark
        encodings = tokenizer.encode_batch_fast([text.encode("utf-8", "replace").decode() for text in texts])
    for encoding in encodings:
        pieces = [encoding, *encoding.overflowing] if _worker.is_chunking else [encoding]
        pieces = [np.array(piece.ids, dtype) for piece in pieces if len(piece.ids) > _worker.num_special]
        num_empty += not pieces
        documents += pieces
    lengths = np.array([len(document) for document in documents], np.int64)
    if lengths.sum() >= 1 << 31:
        raise ValueError(
            f"shard {number} would hold {lengths.sum()} tokens, at most 2^31 fit; lower documents_per_shard"
        )
    ids = np.concatenate(documents) if documents else np.zeros(0, dtype)
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    batch = pa.record_batch([pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))], names=[COLUMN])
    file = _shard_file(folder, number)
    part = file.with_suffix(".part")
    try:
        with part.open("wb") as handle:
            with pa.ipc.new_stream(handle, batch.schema) as writer:
                writer.write_batch(batch)
            handle.flush()
            os.fsync(handle.fileno())
        record = {
            "file": file.name,
            "texts": len(texts),
            "documents": len(documents),
            "tokens": int(lengths.sum()),
            "empty": num_empty,
            "bytes": part.stat().st_size,
            "sha256": _sha256(part),
            "length_histogram": _histogram(lengths),
        }
        part.replace(file)
        write_json(file.with_suffix(".json"), record)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(
            error.errno,
            f"shard {number} could not be written ({error.strerror}); the finished ones are whole: make room and run the "
            "same again to go on",
            str(folder),
        ) from error
    return number, record


def _histogram(lengths):
    """Number of documents with up to 16, 32, 64, ... tokens and more than the half of it."""
    tops = 2 ** np.maximum(np.ceil(np.log2(np.maximum(lengths, 1))), 4).astype(int)
    return {str(top): int((tops == top).sum()) for top in np.unique(tops)}


def _sha256(file):
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while part := handle.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def write_json(file: Path, content) -> None:
    """Write the whole file or none of it."""
    part = file.with_name(file.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as handle:
            json.dump(content, handle, indent=1)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError:
        part.unlink(missing_ok=True)
        raise
    part.replace(file)


class Shards:
    """The documents of a folder of shards, by number, without loading them: the files are mapped into memory.

    Args:
        folder: What `tokenize_corpus` wrote.
        verify: Compare the checksum of every shard, which reads all of them once.

    Raises:
        FileNotFoundError: The folder holds no finished shards.
        ValueError: A shard is damaged.
    """

    def __init__(self, folder: str | Path, verify: bool = False):
        self.folder = Path(folder)
        manifest = self.folder / MANIFEST
        if not manifest.is_file():
            raise FileNotFoundError(
                f"{self.folder} holds no {MANIFEST}; tokenize into it first, or again if that was interrupted"
            )
        self.manifest = json.loads(manifest.read_text("utf-8"))
        self._ids, self._offsets = [], []
        for shard in self.manifest["shards"]:
            file = self.folder / shard["file"]
            size = file.stat().st_size if file.is_file() else None
            if size != shard["bytes"] or (verify and _sha256(file) != shard["sha256"]):
                problem = "is missing" if size is None else "is damaged: it is not what the manifest's checksum says"
                raise ValueError(f"{file} {problem}; remove the folder and tokenize again, or restore the file")
            column = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()[COLUMN].chunk(0)
            self._ids.append(column.values.to_numpy())
            self._offsets.append(column.offsets.to_numpy())
        self._first = np.cumsum([0, *(len(offsets) - 1 for offsets in self._offsets)])
        self.lengths = np.concatenate([np.diff(offsets) for offsets in self._offsets])

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, number: int) -> np.ndarray:
        """The token ids of a document, a view of the file."""
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        shard = int(np.searchsorted(self._first, number, side="right")) - 1
        place = number - self._first[shard]
        return self._ids[shard][self._offsets[shard][place] : self._offsets[shard][place + 1]]

    def __reduce__(self):
        return type(self), (self.folder,)  # a worker maps the files itself

    def longer_than(self, num_tokens: int) -> "View":
        """The documents of more than that many tokens, without a copy of them.

        Source: paper, section 3.2, RefinedWeb 1024+ and 2048+.
        """
        return View(self, np.flatnonzero(self.lengths > num_tokens))

    def split(self, num_held_out: int, seed: int = 0) -> tuple["View", "View"]:
        """Hold documents out at random: (those to train on, those held out), without a copy.

        Raises:
            ValueError: Nothing would be left to train on, or nothing held out.
        """
        if not 0 < num_held_out < len(self):
            raise ValueError(
                f"num_held_out={num_held_out} of {len(self)} documents; hold out at least one, and not all"
            )
        order = np.random.default_rng(seed).permutation(len(self))
        return View(self, np.sort(order[num_held_out:])), View(self, np.sort(order[:num_held_out]))

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raise ValueError unless this tokenizer made the shards."""
        here, there = tokenizer_hash(tokenizer), self.manifest["tokenizer"]["sha256"]
        if here != there:
            raise ValueError(
                f"the shards in {self.folder} come from another tokenizer (sha256 {there[:12]}, given: {here[:12]}, "
                f"{self.manifest['tokenizer']['vocab_size']} and {len(tokenizer)} tokens); give the one that made them, "
                "or tokenize again"
            )


class View:
    """Some of the documents of another collection, by number."""

    def __init__(self, documents, numbers: np.ndarray):
        self.documents, self.numbers = documents, numbers
        self.lengths = documents.lengths[numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> np.ndarray:
        """The token ids of a document."""
        return self.documents[int(self.numbers[number])]

    def longer_than(self, num_tokens: int) -> "View":
        """Those of more than that many tokens."""
        return View(self.documents, self.numbers[self.lengths > num_tokens])
