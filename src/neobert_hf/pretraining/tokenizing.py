"""Tokenizing of a corpus on datatrove: locally, on Ray, or as tasks for another executor.

datatrove runs the tasks, records which are complete, and writes token ids. Reading is ours: datatrove's reader of JSON lines
leaves out a damaged line, and a file that is not UTF-8, with no more than a warning.
"""

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor
from datatrove.pipeline.tokens import DocumentTokenizer
from loguru import logger
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ..data.lengths import plain_tokenizer
from ..data.wordpiece import tokenizer_hash
from ..files.json_files import read_json
from ..files.messages import differences, first_of
from ..files.output import check_folder, file_hash, saving, write_json, writing
from ..runs.resume import LOCK, lock_run
from .corpus import Corpus
from .documents import ENDS_DTYPE, MANIFEST, Documents, is_whole, task_files

EXECUTORS = {"local": LocalPipelineExecutor, "ray": RayPipelineExecutor}
SETTINGS, TOKENIZER, RECORDS, LOGS = "settings.json", "tokenizer.json", "records", "logs"
MIN_TASKS, MAX_TASKS = 8, 1000  # the default: several processes share a single file, and many files make few tasks


def tokenize(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    folder: str | Path,
    executor: str = "local",
    tasks: int | None = None,
    workers: int | None = None,
) -> Documents:
    """Tokenize each text once, whole, and write the ids to a folder; the same call continues after an interruption.

    The order of the documents depends on `tasks`, not on the number of processes. White space is left out. If the folder is
    finished, and the corpus and the settings are the same, the documents are used and the texts are not read.

    Args:
        corpus: Texts. A missing text is left out; a lone surrogate becomes a question mark.
        tokenizer: A fast tokenizer; its special tokens are added.
        folder: Output folder; created if it does not exist. Ray needs a folder that all machines see.
        executor: "local" or "ray": which executor of datatrove runs the tasks. `tokenizing_tasks` gives them to any other.
        tasks: Parts of the corpus; an interrupted task begins again. More tasks than files share the files. None is one for each
            file, at least 8 and at most 1,000; in a folder that was begun, as many as there.
        workers: Tasks that run at the same time; None is one for each core, on Ray all. On macOS and Windows each local
            process imports the script again, so keep the call under `if __name__ == "__main__":`.

    Returns:
        The documents.

    Raises:
        KeyError: The executor is unknown.
        ValueError: An argument is out of bounds, a line of the corpus is damaged, a text is not a string, the folder holds
            documents of something else, or no text has a token.
        OSError: A file cannot be written, or a task did not end; others stay whole.
    """
    executor_class = EXECUTORS[executor]
    folder = Path(folder).resolve()
    is_local = executor == "local"
    is_finished = (folder / MANIFEST).exists()  # a finished folder may be read-only
    with lock_run(folder, SETTINGS) if is_local and not is_finished else nullcontext():
        steps, tasks = tokenizing_tasks(corpus, tokenizer, folder, tasks, workers)
        if steps:
            logger.disable("datatrove")  # an error reaches the caller; the log would show it again
            options = _local_options(workers, tasks) if is_local else {"workers": workers or -1}
            with default_sigterm(), saving(folder):
                executor_class(steps, tasks, logging_dir=str(folder / LOGS), **options).run()
            write_manifest(folder)
    return Documents(folder)


def tokenizing_tasks(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    folder: str | Path,
    tasks: int | None = None,
    workers: int | None = None,
) -> tuple[list[Callable], int]:
    """Begin or continue a folder of documents, and return the tasks for an executor of datatrove; `tokenize` runs them here.

    The executor needs FOLDER/logs as its `logging_dir`. When all tasks are complete, `write_manifest` finishes the folder.

    Args:
        corpus: As of `tokenize`.
        tokenizer: As of `tokenize`.
        folder: As of `tokenize`.
        tasks: As of `tokenize`.
        workers: With 1, the tokenizer uses all cores of its process.

    Returns:
        The steps of a task, a pipeline of datatrove, empty if the folder is finished; and the number of tasks.

    Raises:
        ValueError: An argument is out of bounds, or the folder holds something else.
        OSError: A file cannot be written.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer; give one that has a tokenizer.json")
    folder = Path(folder).resolve()
    begun = {}
    for name in (SETTINGS, MANIFEST):
        if (folder / name).exists():
            begun = read_json(folder / name)
    num_files = corpus.stream().num_shards
    tasks = tasks or begun.get("num_tasks") or min(max(num_files, MIN_TASKS), MAX_TASKS)
    num_parts = -(-tasks // num_files) if corpus.files else 1
    plain = plain_tokenizer(tokenizer)
    settings = {
        "source": corpus.source,
        "tokenizer": {"sha256": tokenizer_hash(tokenizer), "vocab_size": len(tokenizer)},
        "special_tokens": _special_tokens(plain),
        "num_tasks": min(tasks, num_files * num_parts),
    }
    _check_folder(folder, settings, begun)
    if (folder / MANIFEST).exists():  # the folder may be read-only
        return [], settings["num_tasks"]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SETTINGS, settings)
    with writing(folder / TOKENIZER) as file:
        file.write(plain.to_str().encode())
    for mark in folder.glob(f"{LOGS}/completions/*"):
        if not _is_whole(folder, int(mark.name)):  # after a power failure
            mark.unlink()
    steps: list[Callable] = [partial(read_task, corpus, num_parts), partial(write_task, folder, workers != 1)]
    return steps, settings["num_tasks"]


def _check_folder(folder, settings, begun):
    """Raise ValueError if the folder holds documents of something else than its settings, FileExistsError for other files."""
    if not begun:
        return check_folder(folder, LOCK)
    different = differences({name: begun.get(name) for name in settings}, settings)
    if different:
        details = first_of(different, "; ")
        raise ValueError(
            f"{folder} holds documents of something else: {details}; choose another folder, or remove this one"
        )


def _local_options(workers, tasks):
    if sys.platform != "linux":
        return {"workers": min(workers or os.cpu_count(), tasks)}
    workers = workers or len(os.sched_getaffinity(0))
    return {"workers": min(workers, tasks), "start_method": "fork"}  # datatrove's forkserver imports torch each time


@contextmanager
def default_sigterm() -> Iterator[None]:
    """Give SIGTERM its default meaning: a pool ends its processes by it, and they inherit the handlers of this one."""
    if threading.current_thread() is not threading.main_thread():  # only this thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _special_tokens(plain: Tokenizer) -> list[int]:
    """Numbers of special tokens that the tokenizer adds before and after a text."""
    masks = (plain.encode(text).special_tokens_mask for text in ("a", *plain.get_vocab()))
    mask = next(mask for mask in masks if 0 in mask)  # a vocabulary may have no "a" and no unknown token
    return [mask.index(0), mask[::-1].index(0)]


def read_task(corpus: Corpus, num_parts: int, data=None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
    """Yield the texts of a corpus that belong to task `rank`, without blank ones; `num_parts` is that of `Corpus.stream`."""
    for number, row in enumerate(corpus.stream(num_parts).shard(num_shards=world_size, index=rank)):
        text = row[corpus.text_column]
        if text and not text.isspace():
            yield Document(text=text, id=f"{rank}/{number}")


def write_task(folder: Path, is_parallel: bool, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> None:
    """Write the token ids of a task, and its record; datatrove marks the task as complete afterwards.

    The files are moved into their place when they are whole: a process that outlives a killed run writes the same files.
    """
    if is_parallel:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    with tempfile.TemporaryDirectory(prefix=f"{rank:05d}.", suffix=".part", dir=folder) as part:
        options = {"shuffle_documents": False, "save_final_metadata": False}
        step = DocumentTokenizer(f"{part}/ids", str(folder / TOKENIZER), **options)
        step.run(data, rank, world_size)
        for name, file in task_files(Path(part), rank).items():
            target = task_files(folder, rank)[name]
            target.parent.mkdir(exist_ok=True)
            os.replace(file, target)
    write_record(folder, rank, step.token_size)


def write_record(folder: Path, task: int, token_size: int) -> None:
    """Write numbers and checksums of what a task wrote."""
    files = task_files(folder, task)
    ends = np.fromfile(files["ends"], ENDS_DTYPE)
    record = {
        "task": task,
        "documents": len(ends),
        "tokens": int(ends[-1]) if len(ends) else 0,
        "dtype": f"<u{token_size}",
        "sha256": {name: file_hash(file) for name, file in files.items()},
    }
    (folder / RECORDS).mkdir(exist_ok=True)
    write_json(_record(folder, task), record)


def _record(folder, task):
    return folder / RECORDS / f"{task:05d}.json"


def _is_whole(folder, task):
    try:
        return _record(folder, task).is_file() and is_whole(folder, read_json(_record(folder, task)))
    except (ValueError, KeyError, TypeError):  # a damaged record: the task is done again
        return False


def write_manifest(folder: Path, *_) -> None:
    """Write the manifest of a folder whose tasks are complete.

    Args:
        folder: Folder of `tokenizing_tasks`.
        _: What an executor gives to a step, so that this can be the only step of a last job.

    Raises:
        OSError: A task is not complete.
        ValueError: No document holds a token.
    """
    settings = read_json(folder / SETTINGS)
    num_tasks = settings["num_tasks"]
    num_missing = sum(not _is_whole(folder, task) for task in range(num_tasks))
    if num_missing:
        raise OSError(f"{num_missing} of {num_tasks} tasks are not complete; run the same again to continue")
    tasks = [read_json(_record(folder, task)) for task in range(num_tasks)]
    num_documents = sum(task["documents"] for task in tasks)
    num_tokens = sum(task["tokens"] for task in tasks)
    if num_tokens == num_documents * sum(settings["special_tokens"]):
        raise ValueError(f"no text of {settings['source']} has a token; there is nothing to train on")
    for part in folder.glob("*.part"):  # of tasks that were killed
        shutil.rmtree(part, ignore_errors=True)
    manifest = {
        **settings,
        "dtype": tasks[0]["dtype"],
        "num_documents": num_documents,
        "num_tokens": num_tokens,
        "tasks": tasks,
    }
    write_json(folder / MANIFEST, manifest)
