"""The packing plan at scale: seconds and peak memory of planning and of reading, each in a process of its own (Linux).

Documents of random length and random tokens are written in the files of datatrove. One process plans the rows on disk, one
reads rows by the plan, and one plans in memory and compares every row with the plan on disk.
"""

import hashlib
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from harness import finish, in_new_process, read_arguments
from tqdm.auto import tqdm

from neobert_hf.files import write_json
from neobert_hf.pretraining import (
    Documents,
    PackedRows,
    PackingSettings,
    make_packing_plan,
    read_packing_plan,
    write_packing_plan,
)
from neobert_hf.pretraining.documents import task_files

VOCAB_SIZE = 30_522
SEED = 3


def write_documents(folder: Path, arguments) -> None:
    """Write random documents without a tokenizer."""
    # here, since it imports datatrove, which no part needs
    from neobert_hf.pretraining.tokenizing import SETTINGS, write_manifest, write_record

    (folder / "ids").mkdir()
    rng = np.random.default_rng(0)
    starts = range(0, arguments.num_documents, arguments.documents_per_task)
    for task, first in enumerate(tqdm(starts, unit=" tasks")):
        count = min(arguments.documents_per_task, arguments.num_documents - first)
        ends = rng.integers(arguments.shortest, arguments.longest + 1, count).cumsum()
        files = task_files(folder, task)
        rng.integers(0, VOCAB_SIZE, ends[-1], np.uint16).tofile(files["ids"])
        ends.astype("<u8").tofile(files["ends"])
        write_record(folder, task, token_size=2)
    settings = {"source": {"documents": "random"}, "tokenizer": {"sha256": "", "vocab_size": VOCAB_SIZE}}
    settings |= {"special_tokens": [0, 0], "num_tasks": len(starts)}
    write_json(folder / SETTINGS, settings)
    write_manifest(folder)


def plan(folder: Path, arguments) -> dict:
    """Plan the rows on disk."""
    started = time.perf_counter()
    made = write_packing_plan(Documents(folder), arguments.row_tokens, seed=SEED)
    size = sum(file.stat().st_size for file in made.folder.iterdir())
    efficiency = made.num_tokens / (len(made) * made.settings.max_tokens)
    seconds = time.perf_counter() - started
    return {"plan_s": seconds, "plan_mb": size / 1e6, "num_rows": len(made), "packing_efficiency": efficiency}


def read(folder: Path, arguments) -> dict:
    """Open documents and plan, and read rows in the order of training."""
    opened = time.perf_counter()
    documents = Documents(folder)
    rows = PackedRows(documents, write_packing_plan(documents, arguments.row_tokens, seed=SEED))
    rows[0]
    first = time.perf_counter() - opened
    started, num_tokens, count = time.perf_counter(), 0, min(arguments.num_read, len(rows))
    for number in range(count):
        num_tokens += len(rows[number]["input_ids"])
    seconds = time.perf_counter() - started
    return {
        "first_row_s": first,
        "rows_read": count,
        "rows_per_s": count / seconds,
        "tokens_per_s": num_tokens / seconds,
    }


def compare(folder: Path, arguments) -> dict:
    """Plan in memory, and compare with the plan on disk."""
    documents = Documents(folder)
    started = time.perf_counter()
    in_memory = make_packing_plan(documents.lengths, PackingSettings(arguments.row_tokens, seed=SEED))
    seconds = time.perf_counter() - started
    on_disk = read_packing_plan(next(folder.glob("plans/*")))
    same = np.array_equal(in_memory.items, on_disk.items) and np.array_equal(in_memory.ends, on_disk.ends)
    is_complete = hashlib.sha256(np.sort(in_memory.items).tobytes()).digest()
    wanted = hashlib.sha256(np.arange(len(documents), dtype=in_memory.items.dtype).tobytes()).digest()
    return {"plan_s": seconds, "same_rows": bool(same), "every_document_once": is_complete == wanted}


PARTS = {
    "imports": lambda folder, arguments: {},
    "plan on disk": plan,
    "read": read,
    "plan in memory": compare,
}


def measure(name: str, folder: Path, arguments) -> dict:
    """Run one part, in a process of its own that has imported the package."""
    process, is_done, sizes = psutil.Process(), threading.Event(), []

    def watch():
        while not sizes or not is_done.wait(0.02):
            memory = process.memory_info()
            sizes.append(memory.rss - memory.shared)  # without pages of mapped files, which the system can take back

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    figures = PARTS[name](folder, arguments)
    if figures:
        figures["process_s"] = time.perf_counter() - started
    is_done.set()
    watcher.join()
    return {"part": name, **figures, "peak_rss_mb": max(sizes) / 1e6}


def main():
    """Write documents, run every part in a process of its own, and print a table and one line of JSON."""
    arguments = read_arguments(
        __doc__,
        num_documents=20_000_000,
        shortest=8,
        longest=60,
        documents_per_task=200_000,
        row_tokens=8192,
        num_read=20_000,
        folder=None,
    )
    with tempfile.TemporaryDirectory(prefix="packing_plan-", dir=arguments.folder) as folder:
        write_documents(Path(folder), arguments)
        rows = [in_new_process(measure, name, Path(folder), arguments) for name in PARTS]
        corpus_mb = sum(file.stat().st_size for file in Path(folder).glob("ids/*")) / 1e6
    finish("packing_plan", rows, arguments, corpus_mb=corpus_mb)


if __name__ == "__main__":
    main()
