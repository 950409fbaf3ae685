"""Tokenized text on disk: `tokenize_corpus` writes memory-mapped shards once, `Shards` reads them.

A folder of shards holds `shard-00000.arrow`, ... (Arrow streams with one column of token ids, which
`datasets.Dataset.from_file` reads too) and `manifest.json`, written last: what has no manifest is not finished. Each shard
gets its own small record when it is whole, so that an interrupted run goes on after the last whole shard.

pyarrow is imported where it is used, since the command line knows the bounds of this module without it.
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
from multiprocessing import connection
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from ..deprecations import renamed_names
from .files import file_hash, only_writer, sealed, unsealed, write_json, writing
from .wordpiece import plain_tokenizer, tokenizer_hash

logger = logging.get_logger(__name__)

MANIFEST = "manifest.json"
SETTINGS = "settings.json"  # of shards that are not finished
LOCK = ".tokenize.lock"
COLUMN = "input_ids"
LONG_DOCUMENTS = ("truncate", "chunk")
MOST_TOKENS = (1 << 31) - 1  # in a shard, whose offsets are int32
MOST_DOCUMENTS = 1_000_000  # in a shard: their texts wait in memory together
MOST_ON_WINDOWS = 61  # processes that one pool can wait for there
STILL_GOOD = "the finished shards are whole: make room, and run the same again to go on"


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

    Memory does not grow with the corpus. Texts without a token are left out and counted. A finished folder is taken as it is if
    `source` and the settings are the same; the texts are not read again then. In one that is not finished, each finished shard is
    compared with its texts and its checksum.

    Args:
        texts: Documents, the same in the same order whenever they are read. A lone surrogate becomes a question mark.
        tokenizer: A fast tokenizer; its special tokens are added.
        folder: Where to write; made if it is not there.
        source: What the texts are, for the manifest and so that another corpus is not continued; plain types.
        max_length: Where a document is cut, in tokens, the special ones included; at least one more than these.
        long_documents: What becomes of the rest: "truncate" drops it, as in the paper, "chunk" makes further documents of it.
        documents_per_shard: Documents of the source in a shard, 1 to 1,000,000.
        num_processes: Processes that tokenize, 1 to `most_processes()`; None is one for each core. They are started anew on macOS
            and Windows, so a script that calls this keeps it under `if __name__ == "__main__":`. 1 starts none and needs no such
            line. They end when this process does, however that ends.
        show_progress: Show a progress bar over documents.

    Raises:
        ValueError: An argument is out of bounds, a text is not a string, the folder holds shards of something else or of other
            texts, another process writes to it, or no text has a token.
        OSError: A shard cannot be written, for want of space for instance; finished shards stay whole.
        RuntimeError: The processes could not start, or one of them ended.
    """
    _check_arguments(tokenizer, max_length, long_documents, documents_per_shard, num_processes)
    folder = Path(folder)
    settings = {
        "source": source or {},
        "tokenizer": {"sha256": tokenizer_hash(tokenizer), "vocab_size": len(tokenizer)},
        "max_length": max_length,
        "long_documents": long_documents,
        "documents_per_shard": documents_per_shard,
    }
    if (folder / MANIFEST).exists():  # it may lie where nothing can be written
        return _finished_shards(folder, settings)
    with only_writer(folder, LOCK):
        if (folder / MANIFEST).exists():  # by another process, meanwhile
            return _finished_shards(folder, settings)
        if (folder / SETTINGS).exists():
            _check_same(folder, settings, _read_json(folder / SETTINGS))
        elif any(file.name != LOCK and not file.match(f"{SETTINGS}.*.part") for file in folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no shards; choose another folder")
        _remove_partial(folder)
        write_json(folder / SETTINGS, settings, "nothing else was begun")
        try:
            _write_manifest(folder, texts, tokenizer, settings, num_processes, show_progress)
        finally:
            _remove_partial(folder)  # of processes that were ended
    return Shards(folder)


def most_processes() -> int:
    """The largest `num_processes`: the cores of this machine, or 4 where it has fewer."""
    most = max(os.cpu_count() or 1, 4)
    return min(most, MOST_ON_WINDOWS) if sys.platform == "win32" else most


def _check_arguments(tokenizer, max_length, long_documents, documents_per_shard, num_processes):
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer; give one that has a tokenizer.json")
    if long_documents not in LONG_DOCUMENTS:
        raise ValueError(f"long_documents={long_documents!r} is not one of {', '.join(LONG_DOCUMENTS)}")
    least = tokenizer.num_special_tokens_to_add() + 1
    if not least <= max_length <= MOST_TOKENS:
        raise ValueError(
            f"max_length={max_length} is not from {least}, which is the tokenizer's special tokens and one more, to {MOST_TOKENS}"
        )
    if not 1 <= documents_per_shard <= MOST_DOCUMENTS:
        raise ValueError(f"documents_per_shard={documents_per_shard} is not from 1 to {MOST_DOCUMENTS}")
    if num_processes is not None and not 1 <= num_processes <= most_processes():
        raise ValueError(
            f"num_processes={num_processes} is not from 1 to {most_processes()}; this machine has {os.cpu_count()} cores, and "
            "more processes only take more memory"
        )


def _finished_shards(folder, settings):
    shards = Shards(folder)
    _check_same(folder, settings, shards.manifest)
    return shards


def _remove_partial(folder):
    for name in ("shard-*", SETTINGS, MANIFEST):
        for file in folder.glob(f"{name}.part"):
            file.unlink(missing_ok=True)


def _write_manifest(folder, texts, tokenizer, settings, num_processes, show_progress):
    options = (folder, plain_tokenizer(tokenizer).to_str(), settings["max_length"], settings["long_documents"])
    if num_processes is None:  # not the cores of the whole machine, where a job has some of them
        num_processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if sys.platform == "win32":
        num_processes = min(num_processes, MOST_ON_WINDOWS)
    try:
        records = _write_shards(texts, settings["documents_per_shard"], num_processes, options, show_progress)
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a process that tokenizes could not start, or was ended from outside; finished shards are whole. Run the same again "
            "to go on; if memory was short, pass a smaller num_processes. In a script, keep what starts processes under "
            "if __name__ == '__main__':, or pass num_processes=1, which starts none"
        ) from error
    shards = [records[number] for number in sorted(records)]
    if not sum(shard["tokens"] for shard in shards):
        raise ValueError(f"no text of {settings['source'] or 'the corpus'} has a token; there is nothing to train on")
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
    write_json(folder / MANIFEST, sealed(manifest), STILL_GOOD)
    (folder / SETTINGS).unlink()
    for shard in shards:
        (folder / shard["file"]).with_suffix(".json").unlink()


def _read_json(file):
    """What a JSON file of a folder of shards holds, an object."""
    try:
        content = json.loads(file.read_text("utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        return unsealed(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); restore it, or remove the folder and tokenize again") from error


def _check_same(folder, here, there):
    source, theirs = here["source"], there.get("source")
    if theirs != source and theirs == _names_and_sizes(source):
        logger.warning(
            f"the shards in {folder} were begun by a version that knew files by name and size only: whether their content has "
            "changed since cannot be told. Tokenize again if it may have"
        )
        there = there | {"source": source}
    if different := sorted(name for name in here if here[name] != there.get(name)):
        details = "; ".join(f"{name} is {there.get(name)} there and {here[name]} here" for name in different)
        raise ValueError(
            f"{folder} holds shards of something else: {details}. Choose another folder, or remove this one"
        )


def _names_and_sizes(source):
    """What earlier versions recorded of the same files: nothing of those in the folder of a dataset."""
    if "dataset_name" in source:
        return {name: value for name, value in source.items() if name != "files"}
    files = source.get("files", ())
    if not all(isinstance(file, dict) for file in files):  # what a caller of our functions says of its texts
        return source
    files = [{name: file.get(name) for name in ("name", "bytes")} for file in files]
    return source | {"files": files}


def _write_shards(texts, documents_per_shard, num_processes, options, show_progress):
    """Write the shards that are not there yet; the record of each, by number."""
    folder, records, pending = options[0], {}, set()
    make_pool = ThreadPoolExecutor if num_processes == 1 else ProcessPoolExecutor
    progress = tqdm(desc="tokenizing", unit=" documents", disable=not show_progress)
    with progress, make_pool(num_processes, initializer=_begin_worker, initargs=options) as pool:
        try:
            for number, block in enumerate(_blocks(texts, documents_per_shard)):
                record = _finished(folder, number, block)
                if record is not None:
                    records[number] = record
                    progress.update(len(block))
                    continue
                pending.add(pool.submit(_write_shard, number, block))
                if len(pending) > num_processes:  # no more texts wait in memory than the processes need
                    pending = _collect(pending, records, progress)
            while pending:
                pending = _collect(pending, records, progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # the others finish the shard that they are at, and begin none
            raise
    return records


def _blocks(texts, size) -> Iterator[list[str]]:
    texts, first = iter(texts), 0
    while block := list(islice(texts, size)):
        for number, text in enumerate(block, first):
            if not isinstance(text, str):
                raise ValueError(f"text {number} is {text!r:.80}, a {type(text).__name__}; every text must be a string")
        first += len(block)
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


def _finished(folder, number, texts):
    """The record of a shard that an earlier run has finished, or None; one that is damaged is written again.

    Raises:
        ValueError: It was made of other texts.
    """
    file = _shard_file(folder, number)
    if not file.is_file() or not file.with_suffix(".json").is_file():
        return None
    try:
        record = _read_json(file.with_suffix(".json"))
    except ValueError:
        return None
    if record.get("sha256") != file_hash(file) or "texts_sha256" not in record:
        return None
    if record["texts_sha256"] != _texts_hash(texts):
        raise ValueError(
            f"{file} was made of other texts than those at its place now; give the same texts in the same order, or choose "
            "another folder"
        )
    return record


def _texts_hash(texts):
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


_worker = threading.local()


def _begin_worker(folder, tokenizer, max_length, long_documents):
    if multiprocessing.parent_process() is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    tokenizer = Tokenizer.from_str(tokenizer)
    tokenizer.enable_truncation(max_length)
    _worker.tokenizer, _worker.folder, _worker.is_chunking = tokenizer, folder, long_documents == "chunk"
    _worker.num_special = tokenizer.num_special_tokens_to_add(is_pair=False)


def _end_with_parent(parent_id):
    """End this process when the one that started it is gone, however it ended.

    Processes that were forked meanwhile may hold the parent's end of the pipe, hence the second question.
    """
    parent = multiprocessing.parent_process().sentinel
    while not connection.wait([parent], timeout=1) and os.getppid() == parent_id:
        pass
    os._exit(1)


def _write_shard(number, texts):
    """Tokenize a block of texts, write its shard and then its record; returns (number, record)."""
    import pyarrow as pa

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
    with writing(file, STILL_GOOD) as handle, pa.ipc.new_stream(handle, batch.schema) as writer:
        writer.write_batch(batch)
    record = {
        "file": file.name,
        "texts": len(texts),
        "texts_sha256": _texts_hash(texts),
        "documents": len(documents),
        "tokens": int(lengths.sum()),
        "empty": num_empty,
        "bytes": file.stat().st_size,
        "sha256": file_hash(file),
        "length_histogram": _histogram(lengths),
    }
    write_json(file.with_suffix(".json"), sealed(record), STILL_GOOD)  # last: what has no record is not finished
    return number, record


def _histogram(lengths):
    """Number of documents with up to 16, 32, 64, ... tokens and more than the half of it."""
    tops = 2 ** np.maximum(np.ceil(np.log2(np.maximum(lengths, 1))), 4).astype(int)
    return {str(top): int((tops == top).sum()) for top in np.unique(tops)}


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
        self.manifest = _read_json(manifest)
        self._ids, self._offsets = [], []
        try:
            for shard in self.manifest["shards"]:
                ids, offsets = self._open(shard, verify)
                self._ids.append(ids)
                self._offsets.append(offsets)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{manifest} is not a manifest of shards: {error!r} in it") from error
        self._first = np.cumsum([0, *(len(offsets) - 1 for offsets in self._offsets)])
        self.lengths = np.concatenate([np.diff(offsets) for offsets in self._offsets])

    def _open(self, shard, verify):
        """Token ids and offsets of a shard."""
        import pyarrow as pa

        name = shard["file"]
        if Path(name).name != name:
            raise ValueError(f"{self.folder / MANIFEST} names {name!r}, which is not a file of its own folder")
        file = self.folder / name
        if not file.is_file():
            raise ValueError(f"{file} is missing; restore it, or remove the folder and tokenize again")
        is_whole = file.stat().st_size == shard["bytes"] and not (verify and file_hash(file) != shard["sha256"])
        try:
            column = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()[COLUMN].chunk(0) if is_whole else None
        except (pa.ArrowInvalid, OSError, KeyError, IndexError):
            column = None
        if column is not None:
            ids, offsets = column.values.to_numpy(), column.offsets.to_numpy()
            is_in_order = offsets[0] == 0 and offsets[-1] == len(ids) and (np.diff(offsets) > 0).all()
            if is_in_order and (len(offsets) - 1, len(ids)) == (shard["documents"], shard["tokens"]):
                return ids, offsets
        raise ValueError(
            f"{file} is damaged: it is not what the manifest says; remove the folder and tokenize again, or restore the file"
        )

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

    def longer_than(self, num_tokens: int) -> "ShardsView":
        """The documents of more than that many tokens, without a copy of them.

        Source: paper, section 3.2, RefinedWeb 1024+ and 2048+.
        """
        return ShardsView(self, np.flatnonzero(self.lengths > num_tokens))

    def split(self, num_held_out: int, seed: int = 0) -> tuple["ShardsView", "ShardsView"]:
        """Hold documents out at random: (those to train on, those held out), without a copy.

        Raises:
            ValueError: Nothing would be left to train on, or nothing held out.
        """
        if not 0 < num_held_out < len(self):
            raise ValueError(
                f"num_held_out={num_held_out} of {len(self)} documents; hold out at least one, and not all"
            )
        order = np.random.default_rng(seed).permutation(len(self))
        return ShardsView(self, np.sort(order[num_held_out:])), ShardsView(self, np.sort(order[:num_held_out]))

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raise ValueError unless this tokenizer made the shards."""
        here, there = tokenizer_hash(tokenizer), self.manifest["tokenizer"]["sha256"]
        if here != there:
            raise ValueError(
                f"the shards in {self.folder} come from another tokenizer (sha256 {there[:12]}, given: {here[:12]}, "
                f"{self.manifest['tokenizer']['vocab_size']} and {len(tokenizer)} tokens); give the one that made them, "
                "or tokenize again"
            )


class ShardsView:
    """Some of the documents of another collection, by number."""

    def __init__(self, documents, numbers: np.ndarray):
        self.documents, self.numbers = documents, numbers
        self.lengths = documents.lengths[numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> np.ndarray:
        """The token ids of a document."""
        return self.documents[int(self.numbers[number])]

    def longer_than(self, num_tokens: int) -> "ShardsView":
        """Those of more than that many tokens."""
        return ShardsView(self.documents, self.numbers[self.lengths > num_tokens])


__getattr__ = renamed_names(__name__, {"View": ("ShardsView", ShardsView)})
