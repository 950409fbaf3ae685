"""Tokenized text on disk: `tokenize_corpus` writes a folder of shards once, `Shards` reads documents from it.

A folder of shards holds `shard-00000.arrow`, ... (Arrow streams with one column of token ids, which `datasets.Dataset.from_file`
reads too) and `manifest.json`, written last: a folder without it is not finished. Each shard gets a small record when it is
complete, so an interrupted run continues after the last complete shard. datatrove's `.ds` shards are read in windows of equal
length, which cut documents; here each document is read by its number and stays whole.

pyarrow is imported where it is used, since the command line knows the bounds of this module without it.
"""

import hashlib
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

from .files import file_hash, only_writer, sealed, write_json, writing
from .plans import PLANS, remove_plans_of_others
from .shard_reader import COLUMN, MANIFEST, Shards, read_shards_json
from .wordpiece import plain_tokenizer, tokenizer_hash

logger = logging.get_logger(__name__)

SETTINGS = "settings.json"  # of shards that are not finished
LOCK = ".tokenize.lock"
LONG_DOCUMENTS = ("truncate", "chunk")
MOST_TOKENS = (1 << 31) - 1  # in a shard, whose offsets are int32
MOST_DOCUMENTS = 1_000_000  # in a shard, whose texts are in memory together
MOST_ON_WINDOWS = 61  # processes that one pool can wait for there
STILL_GOOD = "the finished shards are whole: make room, and run the same again to continue"


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
) -> Shards:
    """Tokenize each text once and write the ids to a folder of shards; the same call continues after an interruption.

    Memory does not grow with the corpus. Texts without a token are left out and counted. If the folder is finished, and `source`
    and the settings are the same, the shards are used as they are and the texts are not read. If it is not finished, each
    finished shard is compared with its texts and its checksum.

    Args:
        texts: Documents, the same in the same order at each reading. A lone surrogate becomes a question mark.
        tokenizer: A fast tokenizer; its special tokens are added.
        folder: Output folder; created if it does not exist.
        source: Description of the texts in plain types. It is kept in the manifest, and shards of another source are refused.
        max_length: Longest document in tokens, special tokens included; at least one more than their number.
        long_documents: Treatment of the tokens beyond `max_length`: "truncate" drops them, as in the paper, "chunk" makes further
            documents of them.
        documents_per_shard: Documents of the source in a shard, 1 to 1,000,000.
        num_processes: Processes that tokenize, 1 to `most_processes()`; None is one for each core. On macOS and Windows each of
            them imports the script again, so keep the call under `if __name__ == "__main__":`. 1 starts no process and needs no
            such line. The processes end with this one, even if it is killed.
        show_progress: Show a progress bar over documents.

    Raises:
        ValueError: An argument is out of bounds, a text is not a string, the folder holds shards of something else or of other
            texts, another process writes to it, or no text has a token.
        OSError: A shard cannot be written, for instance because the disk is full; finished shards stay whole.
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
    if (folder / MANIFEST).exists():  # the folder may be read-only
        return _finished_shards(folder, settings)
    with only_writer(folder, LOCK):
        if (folder / MANIFEST).exists():  # by another process, meanwhile
            return _finished_shards(folder, settings)
        if (folder / SETTINGS).exists():
            _check_same(folder, settings, read_shards_json(folder / SETTINGS))
        elif any(file.name not in (LOCK, PLANS) and not file.match(f"{SETTINGS}.*.part") for file in folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no shards; choose another folder")
        _remove_partial(folder)
        write_json(folder / SETTINGS, settings, "nothing else was begun")
        try:
            records = _tokenize(folder, texts, tokenizer, settings, num_processes, show_progress)
            write_manifest(folder, settings, records)
        finally:
            _remove_partial(folder)  # of processes that were ended
        shards = Shards(folder)
        remove_plans_of_others(folder / PLANS, shards.identity["shards"])
    return shards


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


def _tokenize(folder, texts, tokenizer, settings, num_processes, show_progress):
    options = (folder, plain_tokenizer(tokenizer).to_str(), settings["max_length"], settings["long_documents"])
    if num_processes is None:  # the cores of this job, which may be fewer than those of the machine
        num_processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if sys.platform == "win32":
        num_processes = min(num_processes, MOST_ON_WINDOWS)
    try:
        records = _write_shards(texts, settings["documents_per_shard"], num_processes, options, show_progress)
        return [records[number] for number in sorted(records)]
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a process that tokenizes could not start, or was ended from outside; finished shards are whole. Run the same again "
            "to continue; if memory was short, pass a smaller num_processes. In a script, keep the call under "
            "if __name__ == '__main__':, or pass num_processes=1, which starts no process"
        ) from error


def write_manifest(folder: Path, settings: dict, shards: list[dict]) -> None:
    """Write the manifest of complete shards, and remove their records.

    Args:
        folder: Folder of the shards.
        settings: `source`, `tokenizer` and the other settings of `tokenize_corpus`.
        shards: What `write_shard` returned for each shard, in order.

    Raises:
        ValueError: No shard holds a token.
        OSError: The manifest cannot be written.
    """
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
    (folder / SETTINGS).unlink(missing_ok=True)
    for shard in shards:
        (folder / shard["file"]).with_suffix(".json").unlink()


def _check_same(folder, here, there):
    source, theirs = here["source"], there.get("source")
    if theirs != source and theirs == _names_and_sizes(source):
        logger.warning(
            f"an earlier version, which recorded only names and sizes of files, wrote the shards in {folder}: a later change of "
            "the content cannot be detected. Tokenize again if the files may have changed"
        )
        there = there | {"source": source}
    if different := sorted(name for name in here if here[name] != there.get(name)):
        details = "; ".join(f"{name} is {there.get(name)} there and {here[name]} here" for name in different)
        raise ValueError(
            f"{folder} holds shards of something else: {details}. Choose another folder, or remove this one"
        )


def _names_and_sizes(source):
    """The source as earlier versions recorded it: names and sizes of files, and no files for the folder of a dataset."""
    if "dataset_name" in source:
        return {name: value for name, value in source.items() if name != "files"}
    files = source.get("files", ())
    if not all(isinstance(file, dict) for file in files):  # a description by a caller of `tokenize_corpus`
        return source
    files = [{name: file.get(name) for name in ("name", "bytes")} for file in files]
    return source | {"files": files}


def _write_shards(texts, documents_per_shard, num_processes, options, show_progress):
    """Write the missing shards; returns the record of every shard, by number."""
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
                if len(pending) > num_processes:  # bounds the texts in memory
                    pending = _collect(pending, records, progress)
            while pending:
                pending = _collect(pending, records, progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # running shards are finished, no further shard is started
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
    """The record of a shard that an earlier run finished; None if the shard is missing or damaged, so it is written again.

    Raises:
        ValueError: The shard was made of other texts.
    """
    file = _shard_file(folder, number)
    if not file.is_file() or not file.with_suffix(".json").is_file():
        return None
    try:
        record = read_shards_json(file.with_suffix(".json"))
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
    """End this process when its parent has ended, even if the parent was killed.

    A process that was forked meanwhile may hold the parent's end of the pipe, so the parent's id is compared too.
    """
    parent = multiprocessing.parent_process().sentinel
    while not connection.wait([parent], timeout=1) and os.getppid() == parent_id:
        pass
    os._exit(1)


def _write_shard(number, texts):
    """Tokenize a block of texts and write its shard; returns (number, record)."""
    tokenizer, folder = _worker.tokenizer, _worker.folder
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32
    documents, num_empty = [], 0
    try:
        encodings = tokenizer.encode_batch_fast(texts)
    except (TypeError, UnicodeEncodeError):  # a lone surrogate is not valid text: it becomes a question mark
        encodings = tokenizer.encode_batch_fast([text.encode("utf-8", "replace").decode() for text in texts])
    for encoding in encodings:
        pieces = [encoding, *encoding.overflowing] if _worker.is_chunking else [encoding]
        pieces = [np.array(piece.ids, dtype) for piece in pieces if len(piece.ids) > _worker.num_special]
        num_empty += not pieces
        documents += pieces
    record = {"texts": len(texts), "texts_sha256": _texts_hash(texts), "empty": num_empty}
    return number, write_shard(folder, number, documents, dtype, record)


def write_shard(folder: Path, number: int, documents: list[np.ndarray], dtype: np.dtype, record: dict) -> dict:
    """Write one shard, and then its record, which marks the shard as finished.

    Args:
        folder: Folder of the shards.
        number: Number of the shard.
        documents: Token ids of each document, at least one token each.
        dtype: Integer type of the ids.
        record: Further entries of the record, such as the number of texts.

    Returns:
        The record, an entry of the manifest with a histogram of the lengths.

    Raises:
        ValueError: The shard would hold more tokens than its offsets can count.
        OSError: A file cannot be written.
    """
    import pyarrow as pa

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
        **record,
        "documents": len(documents),
        "tokens": int(lengths.sum()),
        "bytes": file.stat().st_size,
        "sha256": file_hash(file),
        "length_histogram": _histogram(lengths),
    }
    write_json(file.with_suffix(".json"), sealed(record), STILL_GOOD)
    return record


def _histogram(lengths):
    """Numbers of documents by length: up to 16 tokens, 17 to 32, 33 to 64, and further powers of two."""
    tops = 2 ** np.maximum(np.ceil(np.log2(np.maximum(lengths, 1))), 4).astype(int)
    return {str(top): int((tops == top).sum()) for top in np.unique(tops)}
