"""The packing plan at scale: seconds and peak memory of planning and of reading, each in a process of its own.

Documents of random length and random tokens are written in the format of the shards. One process plans the rows on disk, one
reads rows by the plan, and one plans in memory and compares every row with the plan on disk.
"""

import hashlib
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import finish, in_new_process, read_arguments
from tqdm.auto import tqdm

from neobert_hf.data.packing import PackedRows
from neobert_hf.data.plans import make_packing_plan, read_packing_plan, write_packing_plan
from neobert_hf.data.shards import Shards, write_manifest, write_shard

VOCAB_SIZE = 30_522
SEED = 3


def write_shards(folder: Path, arguments) -> None:
    """Write random documents as shards, without a tokenizer."""
    rng, records = np.random.default_rng(0), []
    for first in tqdm(range(0, arguments.num_documents, arguments.documents_per_shard), unit=" shards"):
        count = min(arguments.documents_per_shard, arguments.num_documents - first)
        lengths = rng.integers(arguments.shortest, arguments.longest + 1, count)
        ids = rng.integers(0, VOCAB_SIZE, lengths.sum(), np.uint16)
        documents = np.split(ids, lengths.cumsum()[:-1])
        record = {"texts": count, "texts_sha256": "", "empty": 0}
        records.append(write_shard(folder, len(records), documents, np.uint16, record))
    settings = {"source": {"documents": "random"}, "tokenizer": {"sha256": "", "vocab_size": VOCAB_SIZE}}
    write_manifest(folder, settings, records)


def plan(folder: Path, arguments) -> dict:
    """Plan the rows on disk."""
    started = time.perf_counter()
    made = write_packing_plan(Shards(folder), arguments.row_tokens, seed=SEED)
    size = sum(file.stat().st_size for file in made.folder.iterdir())
    efficiency = made.num_tokens / (len(made) * made.max_tokens)
    seconds = time.perf_counter() - started
    return {"plan_s": seconds, "plan_mb": size / 1e6, "num_rows": len(made), "packing_efficiency": efficiency}


def read(folder: Path, arguments) -> dict:
    """Open shards and plan, and read rows in the order of training."""
    opened = time.perf_counter()
    shards = Shards(folder)
    rows = PackedRows.from_plan(shards, write_packing_plan(shards, arguments.row_tokens, seed=SEED))
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
    shards = Shards(folder)
    started = time.perf_counter()
    in_memory = make_packing_plan(shards.lengths, arguments.row_tokens, seed=SEED)
    seconds = time.perf_counter() - started
    on_disk = read_packing_plan(next(folder.glob("plans/*")), verify=True)
    same = np.array_equal(in_memory.documents, on_disk.documents) and np.array_equal(in_memory.ends, on_disk.ends)
    is_complete = hashlib.sha256(np.sort(in_memory.documents).tobytes()).digest()
    wanted = hashlib.sha256(np.arange(len(shards), dtype=in_memory.documents.dtype).tobytes()).digest()
    return {"plan_s": seconds, "same_rows": bool(same), "every_document_once": is_complete == wanted}


PARTS = {"imports": lambda folder, arguments: {}, "plan on disk": plan, "read": read, "plan in memory": compare}


def measure(name: str, folder: Path, arguments) -> dict:
    """Run one part, in a fresh process."""
    started = time.perf_counter()
    figures = PARTS[name](folder, arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
    return {"part": name, **figures, "process_s": time.perf_counter() - started, "peak_rss_mb": peak}


def main():
    """Write shards, run every part in a process of its own, and print a table and one line of JSON."""
    arguments = read_arguments(
        __doc__,
        num_documents=20_000_000,
        shortest=8,
        longest=60,
        documents_per_shard=10_000,
        row_tokens=8192,
        num_read=20_000,
        folder=None,
    )
    with tempfile.TemporaryDirectory(prefix="packing_plan-", dir=arguments.folder) as folder:
        write_shards(Path(folder), arguments)
        rows = [in_new_process(measure, name, Path(folder), arguments) for name in PARTS]
        corpus_mb = sum(file.stat().st_size for file in Path(folder).glob("*.arrow")) / 1e6
    finish("packing_plan", rows, arguments, corpus_mb=corpus_mb)


if __name__ == "__main__":
    main()
