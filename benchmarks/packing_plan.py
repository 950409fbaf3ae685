"""The packing plan at scale: seconds and peak memory of planning and of reading, each in a process of its own.

Documents of random length and random tokens are written in the files of datatrove. One process plans the rows on disk, one
reads rows by the plan, and one plans in memory and compares every row with the plan on disk.
"""

import argparse
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from neobert_hf.data.documents import Documents, task_files
from neobert_hf.data.files import sealed, write_json
from neobert_hf.data.packing import PackedRows
from neobert_hf.data.plans import PackingSettings, make_packing_plan, read_packing_plan, write_packing_plan

VOCAB_SIZE = 30_522
SEED = 3


def write_documents(folder: Path, arguments) -> None:
    """Write random documents without a tokenizer."""
    from neobert_hf.data.tokenizing import SETTINGS, write_manifest, write_record  # datatrove, which no part needs

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
    write_json(folder / SETTINGS, sealed(settings))
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
    documents = Documents(folder)
    rows = PackedRows.from_plan(documents, write_packing_plan(documents, arguments.row_tokens, seed=SEED))
    rows[0]
    first = time.time() - arguments.started
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
    on_disk = read_packing_plan(next(folder.glob("plans/*")), verify=True)
    same = np.array_equal(in_memory.items, on_disk.items) and np.array_equal(in_memory.ends, on_disk.ends)
    is_complete = hashlib.sha256(np.sort(in_memory.items).tobytes()).digest()
    wanted = hashlib.sha256(np.arange(len(documents), dtype=in_memory.items.dtype).tobytes()).digest()
    return {"plan_s": seconds, "same_rows": bool(same), "every_document_once": is_complete == wanted}


def do_nothing(folder: Path, arguments) -> dict:
    """Only what imports cost."""
    return {}


PARTS = {"imports": do_nothing, "plan on disk": plan, "read": read, "plan in memory": compare}


def measure(name: str, folder: Path, options: list[str]) -> dict:
    """Run one part in a fresh process."""
    started = time.perf_counter()
    command = [
        sys.executable,
        __file__,
        *options,
        "--folder",
        str(folder),
        "--part",
        name,
        "--started",
        str(time.time()),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    return {"part": name, **figures, "process_s": time.perf_counter() - started}


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--num_documents", type=int, default=20_000_000)
    parser.add_argument("--shortest", type=int, default=8, help="Tokens of the shortest document.")
    parser.add_argument("--longest", type=int, default=60, help="Tokens of the longest document.")
    parser.add_argument("--documents_per_task", type=int, default=200_000, help="Documents in a file.")
    parser.add_argument("--row_tokens", type=int, default=8192)
    parser.add_argument("--num_read", type=int, default=20_000, help="Rows that the reading process reads.")
    parser.add_argument(
        "--folder", help="Folder for the documents; a temporary folder, removed at the end, by default."
    )
    parser.add_argument(
        "--part", choices=PARTS, help="Run this part on the documents in the folder; for the subprocesses."
    )
    parser.add_argument("--started", type=float, help="Time at which the part was started; for the subprocesses.")
    parser.add_argument("--json", help="Write the result to this file.")
    return parser.parse_args()


def main():
    """Write documents, run every part in a process of its own, and print a table and one line of JSON."""
    arguments = read_arguments()
    if arguments.part:
        figures = PARTS[arguments.part](Path(arguments.folder), arguments)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
        print(json.dumps({**figures, "peak_rss_mb": peak}))
        return
    from harness import finish  # it imports torch and transformers models, which no part needs

    folder = Path(tempfile.mkdtemp(prefix="packing_plan-", dir=arguments.folder))
    try:
        write_documents(folder, arguments)
        names = ("num_documents", "row_tokens", "num_read")
        options = [text for name in names for text in (f"--{name}", str(getattr(arguments, name)))]
        rows = [measure(name, folder, options) for name in PARTS]
        corpus_mb = sum(file.stat().st_size for file in folder.glob("ids/*")) / 1e6
    finally:
        shutil.rmtree(folder)
    finish(
        "packing_plan",
        rows,
        arguments,
        corpus_mb=corpus_mb,
        num_tasks=-(-arguments.num_documents // arguments.documents_per_task),
    )


if __name__ == "__main__":
    main()
