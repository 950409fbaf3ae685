"""Tokenizing of a corpus on datatrove: locally, on Slurm, or on Ray.

datatrove runs tasks, records which are complete, and writes token ids. Three things are ours, because datatrove 0.10.1 does not
have them. Its reader of JSON lines leaves out a damaged line with a warning, and a whole file that is not UTF-8: `read_task`
refuses both. `WholeDocuments` adds checksums to its tokenizer. Its local pool waits forever for a process that was killed, and
its processes outlive a killed parent: `LocalExecutor` ends with an error, and its processes end with it.
"""

import errno
import json
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from functools import cached_property, partial
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.tokens import DocumentTokenizer
from filelock import FileLock
from loguru import logger
from tokenizers import Tokenizer
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast

from ..files.wordpiece import plain_tokenizer, tokenizer_hash
from ..files.writing import FULL, file_hash, only_writer, read_sealed, sealed, write_error, write_json, writing
from .corpus import Corpus
from .documents import ENDS_DTYPE, MANIFEST, REMEDY, Documents, task_files

EXECUTORS = ("local", "slurm", "ray")
SETTINGS, TOKENIZER, RECORDS, LOGS = "settings.json", "tokenizer.json", "records", "logs"
LOCK = ".tokenize.lock"
MIN_TASKS, MAX_TASKS = 8, 1000  # the default: several processes share a single file, and many files make few tasks
RESUME_HINT = "the finished tasks are whole: make room, and run the same again to continue"


def tokenize(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    folder: str | Path,
    executor: str = "local",
    tasks: int | None = None,
    workers: int | None = None,
    executor_options: dict | None = None,
) -> Documents | None:
    """Tokenize each text once, whole, and write the ids to a folder; the same call continues after an interruption.

    The order of the documents depends on `tasks`, not on the number of processes. Texts without a token are left out. If the
    folder is finished, and the corpus and the settings are the same, the documents are used and the texts are not read.

    Args:
        corpus: Texts. A missing text is left out; a lone surrogate becomes a question mark.
        tokenizer: A fast tokenizer; its special tokens are added.
        folder: Output folder; created if it does not exist. Slurm and Ray need a folder that all machines see.
        executor: "local", "slurm" or "ray": which executor of datatrove runs the tasks.
        tasks: Parts of the corpus; an interrupted task begins again. More tasks than files share the files. None is one for each
            file, at least 8 and at most 1,000; in a folder that was begun, as many as there.
        workers: Tasks that run at the same time; None is one for each core, on Slurm and Ray all. On macOS and Windows each local
            process imports the script again, so keep the call under `if __name__ == "__main__":`. 1 starts no process.
        executor_options: Further arguments of datatrove's executor. Slurm requires `time` and `partition`.

    Returns:
        The documents; None if Slurm has only accepted the job, which writes the manifest at its end.

    Raises:
        ValueError: An argument is out of bounds, a text is not a string, the folder holds documents of something else, another
            process writes to it, or no text has a token.
        OSError: A file cannot be written, for instance because the disk is full; finished tasks stay whole.
        RuntimeError: A process could not start, or was ended from outside; or some tasks are not complete.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer; give one that has a tokenizer.json")
    if executor not in EXECUTORS:
        raise ValueError(f"executor={executor!r} is not one of {', '.join(EXECUTORS)}")
    num_files = corpus.stream().num_shards
    folder, plain = Path(folder).resolve(), plain_tokenizer(tokenizer)
    tasks = tasks or _begun(folder).get("num_tasks") or min(max(num_files, MIN_TASKS), MAX_TASKS)
    num_parts = -(-tasks // num_files) if corpus.files else 1
    tasks = min(tasks, num_files * num_parts)
    settings = {
        "source": corpus.source,
        "tokenizer": {"sha256": tokenizer_hash(tokenizer), "vocab_size": len(tokenizer)},
        "special_tokens": _special_tokens(plain),
        "num_tasks": tasks,
    }
    _check_same(folder, settings)
    if (folder / MANIFEST).exists():  # the folder may be read-only
        return Documents(folder)
    _quieten_datatrove()
    with only_writer(folder, LOCK):
        _check_same(folder, settings)  # another process may have begun since
        _begin(folder, settings, plain)
        steps = [partial(read_task, corpus, num_parts), WholeDocuments(folder)]
        try:
            _run(folder, steps, executor, tasks, workers, executor_options or {})
        except OSError as error:
            if error.errno not in (*FULL, errno.EFBIG):
                raise
            raise write_error(error, folder, RESUME_HINT) from error
    return Documents(folder) if (folder / MANIFEST).exists() else None


def _begun(folder):
    """Manifest or settings of the folder; empty if nothing was begun."""
    return next((read_sealed(folder / name, REMEDY) for name in (MANIFEST, SETTINGS) if (folder / name).exists()), {})


def _check_same(folder, settings):
    begun = _begun(folder)
    if begun and (different := sorted(name for name in settings if settings[name] != begun.get(name))):
        details = "; ".join(f"{name} is {begun.get(name)} there and {settings[name]} here" for name in different)
        raise ValueError(
            f"{folder} holds documents of something else: {details}. Choose another folder, or remove this one"
        )


def _special_tokens(plain: Tokenizer) -> list[int]:
    """Numbers of special tokens that the tokenizer adds before and after a text."""
    masks = (plain.encode(text).special_tokens_mask for text in ("a", *plain.get_vocab()))
    mask = next(mask for mask in masks if 0 in mask)  # a vocabulary may have no "a" and no unknown token
    return [mask.index(0), mask[::-1].index(0)]


def _begin(folder, settings, plain):
    """Write the settings and the tokenizer; let tasks that were damaged begin again."""
    for name in (SETTINGS, TOKENIZER):  # a running Slurm job writes other files
        for file in folder.glob(f"{name}.*.part"):  # of a process that was killed
            file.unlink()
    if not (folder / SETTINGS).exists() and any(file.name != LOCK for file in folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no documents; choose another folder")
    write_json(folder / SETTINGS, sealed(settings), "no text was tokenized")
    with writing(folder / TOKENIZER, "no text was tokenized") as file:
        file.write(plain.to_str().encode())
    for mark in folder.glob(f"{LOGS}/completions/*"):
        if not _is_whole(folder, int(mark.name)):
            mark.unlink()


def typed_options(options: Iterable[str]) -> dict:
    """Arguments of an executor from the form "name=value"; a value that is JSON, such as a number, is read as JSON."""
    typed = {}
    for option in options:
        name, is_pair, value = option.partition("=")
        if not is_pair:
            raise ValueError(f"executor_options {option!r} is not of the form name=value, such as partition=cpu")
        try:
            typed[name] = json.loads(value)
        except ValueError:  # a word, such as the name of a partition
            typed[name] = value
    return typed


def _run(folder, steps, name, tasks, workers, options):
    """Run the tasks, then write the manifest; on Slurm a second job, which waits for the first, writes it."""
    ours = {"tasks": tasks, "workers": workers or -1, "logging_dir": str(folder / LOGS)}
    if both := sorted(ours.keys() & options.keys()):
        raise ValueError(
            f"executor_options sets {', '.join(both)}; tasks and workers are arguments of their own, and the logs stay in "
            f"{folder}"
        )
    options = {**ours, **options}
    try:
        if name == "local":
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            job = LocalExecutor(steps, **{**options, "workers": min(workers or cores, tasks)})
        elif name == "ray":
            job = RayPipelineExecutor(steps, **options)
        else:
            tokenizing = SlurmPipelineExecutor(steps, **options)
            options |= {"tasks": 1, "workers": 1, "logging_dir": str(folder / LOGS / "manifest")}
            job = SlurmPipelineExecutor([partial(write_manifest, folder)], depends=tokenizing, **options)
    except TypeError as error:
        raise ValueError(
            f"executor_options={options}: {error}; give the arguments of datatrove's executor for {name}"
        ) from error
    job.run()
    if name != "slurm":
        write_manifest(folder)


class LocalExecutor(LocalPipelineExecutor):
    """datatrove's executor for one machine, on a pool that ends with an error when a process was killed."""

    def run(self) -> None:
        """Run the tasks that are not complete.

        Raises:
            RuntimeError: A process could not start, or was ended from outside.
        """
        ranks = self.get_incomplete_ranks()
        progress = tqdm(desc="tokenizing", unit=" tasks", initial=self.tasks - len(ranks), total=self.tasks)
        with progress:
            if self.workers == 1:
                for rank in ranks:
                    deepcopy(self)._run_for_rank(rank)
                    progress.update()
                return
            with ProcessPoolExecutor(self.workers, initializer=_begin_worker) as pool:
                try:
                    for task in as_completed([pool.submit(self._run_for_rank, rank) for rank in ranks]):
                        task.result()
                        progress.update()
                except BrokenProcessPool as error:
                    raise RuntimeError(
                        "a process that tokenizes could not start, or was ended from outside; finished tasks are whole. Run the "
                        "same again to continue; if memory was short, with fewer workers. In a script, keep the call under "
                        "if __name__ == '__main__':, or give workers=1, which starts no process"
                    ) from error
                except BaseException:
                    pool.shutdown(cancel_futures=True)  # running tasks end, no further task starts
                    raise


def _quieten_datatrove():
    logger.disable("datatrove")  # an error reaches the caller; the log would show it a second time, with a traceback


def _begin_worker():
    _quieten_datatrove()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent_id):
    """End this process when its parent has ended, even if the parent was killed.

    A process that was forked meanwhile may hold the parent's end of the pipe, so the parent's id is compared too.
    """
    parent = multiprocessing.parent_process().sentinel
    while not connection.wait([parent], timeout=1) and os.getppid() == parent_id:
        pass
    os._exit(1)


def read_task(corpus: Corpus, num_parts: int, data=None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
    """Yield the texts of a corpus that belong to task `rank`, without blank ones; `num_parts` is that of `Corpus.stream`."""
    for number, row in enumerate(corpus.stream(num_parts).shard(num_shards=world_size, index=rank)):
        text = row[corpus.text_column]
        if text and not text.isspace():
            yield Document(text=text, id=f"{rank}/{number}")


class WholeDocuments(DocumentTokenizer):
    """datatrove's tokenizer, with a record of the checksums of each task.

    Args:
        folder: Folder of the documents, which holds the tokenizer.
    """

    def __init__(self, folder: Path):
        super().__init__(
            str(folder / "ids"), str(folder / TOKENIZER), shuffle_documents=False, save_final_metadata=False
        )
        self.folder = folder

    @cached_property
    def tokenizer(self) -> SimpleNamespace:
        """What the base class calls of a tokenizer; `encode_batch_fast` gives no offsets and is 1.2 times as fast.

        A text without a token, such as a zero-width space, is left out.
        """
        tokenizer = Tokenizer.from_file(self.tokenizer_name_or_path)
        num_special = tokenizer.num_special_tokens_to_add(is_pair=False)

        def encode_batch(texts):
            return [encoding for encoding in tokenizer.encode_batch_fast(texts) if len(encoding) > num_special]

        return SimpleNamespace(encode_batch=encode_batch, get_vocab_size=tokenizer.get_vocab_size)

    def run(self, data=None, rank: int = 0, world_size: int = 1):
        """Tokenize the documents of task `rank`, unless another process has."""
        with FileLock(self.folder / LOGS / f"{rank:05d}.lock"):  # a process whose parent was killed may still write
            if _is_whole(self.folder, rank):
                return
            for file in (self.folder / RECORDS).glob(f"{rank:05d}.*.part"):  # of a process that was killed
                file.unlink()
            super().run(data, rank, world_size)
            write_record(self.folder, rank, self.token_size)


def write_record(folder: Path, task: int, token_size: int) -> None:
    """Write numbers and checksums of what a task wrote; datatrove marks the task as complete afterwards."""
    files = task_files(folder, task)
    ends = np.fromfile(files["ends"], ENDS_DTYPE)
    lengths = np.diff(ends, prepend=ENDS_DTYPE.type(0)).astype(np.int64)
    powers = np.ceil(np.log2(np.maximum(lengths, 16))).astype(int)
    tops, counts = np.unique(2**powers, return_counts=True)
    record = {
        "task": task,
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "dtype": f"<u{token_size}",
        "sha256": {name: file_hash(file) for name, file in files.items()},
        "length_histogram": dict(zip(map(str, tops.tolist()), counts.tolist())),
    }
    (folder / RECORDS).mkdir(exist_ok=True)
    write_json(_record(folder, task), sealed(record), RESUME_HINT)


def _record(folder, task):
    return folder / RECORDS / f"{task:05d}.json"


def _is_whole(folder, task):
    """Whether the files of a task are those of its record."""
    try:
        hashes = read_sealed(_record(folder, task), REMEDY)["sha256"]
        return all(file_hash(file) == hashes[name] for name, file in task_files(folder, task).items())
    except (ValueError, FileNotFoundError):
        return False


def write_manifest(folder: Path, *_) -> None:
    """Write the manifest of a folder whose tasks are complete; `length_histogram` counts documents by powers of two.

    On Slurm it is the only step of a job, which gives it further arguments.

    Raises:
        RuntimeError: A task is not complete.
        ValueError: No document holds a token.
    """
    settings = read_sealed(folder / SETTINGS, REMEDY)
    records = [_record(folder, task) for task in range(settings["num_tasks"])]
    if num_missing := sum(not file.is_file() for file in records):
        raise RuntimeError(f"{num_missing} of {len(records)} tasks are not complete; run the same again to continue")
    tasks, histogram = [read_sealed(file, REMEDY) for file in records], Counter()
    for task in tasks:
        histogram.update({int(top): count for top, count in task.pop("length_histogram").items()})
    if not histogram:
        raise ValueError(f"no text of {settings['source']} has a token; there is nothing to train on")
    manifest = {
        **settings,
        "dtype": tasks[0]["dtype"],
        **{f"num_{name}": sum(task[name] for task in tasks) for name in ("documents", "tokens")},
        "length_histogram": {str(top): histogram[top] for top in sorted(histogram)},
        "tasks": tasks,
    }
    write_json(folder / MANIFEST, sealed(manifest), RESUME_HINT)
