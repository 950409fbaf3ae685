"""Copy JSON lines without near-duplicates, by datatrove's MinHash: one document of each group stays.

    python examples/corpus/deduplicate_corpus.py corpus/*.jsonl --output_dir unique

A pair of documents whose runs of five words agree to 80 % is found with a probability of 92 %, to 50 % with 5 %. Case, numbers,
accents and punctuation do not count; a document of fewer than five words stays. `unique/00000.jsonl` has the rows of the first
file that stay, unchanged. It needs transformers 5, since datatrove's MinHash needs huggingface_hub 1.
"""

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WordTokenizer
from loguru import logger

from neobert_hf.data import read_rows
from neobert_hf.files import run_command


class Words(WordTokenizer):
    """Words between spaces; those of datatrove need further packages for each language."""

    def word_tokenize(self, text):
        """Split a text."""
        return text.split()

    sent_tokenize = span_tokenize = word_tokenize  # MinHash has no use for them


def read(files, text_column, data=None, rank=0, world_size=1):
    """Yield the rows of a file; unlike datatrove's reader, it raises an error at a damaged line."""
    for row in read_rows(files[rank]):
        if not isinstance(row.values, dict) or not isinstance(row.values.get(text_column), str):
            raise ValueError(f"{row.place}: no text in the column {text_column!r}; name another --text_column")
        yield Document(text=row.values[text_column], id=row.place, metadata=row.values)


def write(folder, data, rank=0, world_size=1):
    """Write the rows that stay."""
    with Path(folder, f"{rank:05d}.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(document.metadata) + "\n" for document in data)


def deduplicate(files: list[str], output_dir: Path, text_column: str):
    """Write the rows that stay, one file for each file, and print their number."""
    if output_dir.exists():
        raise ValueError(f"{output_dir} exists; choose a new folder")
    logger.disable("datatrove")  # an error reaches the caller
    hashes = HashConfig(hash_fc="sha1")  # datatrove's xxhash fails with xxhash 4
    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8, hash_config=hashes)
    rows = partial(read, files, text_column)
    options = {}
    if sys.platform == "linux":
        options["start_method"] = "fork"  # the default imports everything again
    with tempfile.TemporaryDirectory(dir=output_dir.absolute().parent) as work:
        unique = f"{work}/unique"
        os.mkdir(unique)
        steps = [
            (len(files), [rows, MinhashDedupSignature(f"{work}/signatures", config, language=Words())]),
            (config.num_buckets, [MinhashDedupBuckets(f"{work}/signatures", f"{work}/pairs", config=config)]),
            (1, [MinhashDedupCluster(f"{work}/pairs", f"{work}/groups", config)]),
            (len(files), [rows, MinhashDedupFilter(f"{work}/groups"), partial(write, unique)]),
        ]
        for number, (tasks, pipeline) in enumerate(steps):
            options["logging_dir"] = f"{work}/logs/{number}"
            workers = min(os.cpu_count(), tasks)
            stats = LocalPipelineExecutor(pipeline, tasks, workers, **options).run()
        os.replace(unique, output_dir)
    counts = stats.stats[0]  # of the filter
    numbers = {"rows": int(counts["total"].total), "removed": int(counts["dropped"].total)}
    print(json.dumps({"folder": str(output_dir), **numbers}))


def main():
    """Read the command line, and deduplicate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="JSON lines; also CSV, TSV or Parquet.")
    parser.add_argument("--output_dir", type=Path, required=True, help="Folder to write; it must not exist.")
    parser.add_argument("--text_column", default="text", help="Column of the text.")
    run_command(parser.prog, deduplicate, *vars(parser.parse_args()).values())


if __name__ == "__main__":
    main()
