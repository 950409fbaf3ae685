"""Tokenize text for pretraining on Slurm, by datatrove's executor: an array of tasks, then a job that writes the manifest.

    python examples/corpus/tokenize_slurm.py --partition cpu --tokenizer_name runs/tokenizer --output_dir runs/documents \\
        corpus/*.jsonl

All machines must see the files and the folder. The same command submits what is missing after an interruption. Further arguments
of datatrove's SlurmPipelineExecutor, such as `sbatch_args={"account": "..."}`, go into OPTIONS.
"""

import argparse
import json
import shutil
from functools import partial
from pathlib import Path

from datatrove.executor import SlurmPipelineExecutor

from neobert_hf.checkpoints import load_tokenizer
from neobert_hf.files import run_command
from neobert_hf.pretraining import Corpus, tokenizing_tasks, write_manifest

OPTIONS = {"cpus_per_task": 1, "mem_per_cpu_gb": 2}


def submit(files: list[str], tokenizer_name: str, output_dir: Path, tasks: int, partition: str, time: str):
    """Submit both jobs, unless the folder is finished."""
    if shutil.which("sbatch") is None:
        raise ValueError("the command sbatch is missing; run this on a machine of the cluster that has it")
    folder = output_dir.resolve()
    tokenizer = load_tokenizer(tokenizer_name)
    steps, tasks = tokenizing_tasks(Corpus(files), tokenizer, folder, tasks)
    if steps:
        logs = str(folder / "logs")
        options = {**OPTIONS, "partition": partition, "time": time}
        job = SlurmPipelineExecutor(steps, tasks, logging_dir=logs, **options)
        last = [partial(write_manifest, folder)]
        SlurmPipelineExecutor(last, 1, depends=job, logging_dir=f"{logs}/manifest", **options).run()
    print(json.dumps({"folder": str(output_dir), "submitted": bool(steps)}))


def main():
    """Read the command line, and submit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="Text, JSON lines, CSV, TSV or Parquet, with the column text.")
    parser.add_argument("--tokenizer_name", required=True, help="Folder or Hub id of a fast tokenizer.")
    parser.add_argument("--output_dir", type=Path, required=True, help="Folder of the token ids.")
    parser.add_argument("--tasks", type=int, help="Parts of the corpus. Default: one for each file, 8 to 1,000.")
    parser.add_argument("--partition", required=True, help="Partition of Slurm.")
    parser.add_argument("--time", default="24:00:00", help="Time limit of a task. Default: a day.")
    run_command(parser.prog, submit, *vars(parser.parse_args()).values())


if __name__ == "__main__":
    main()
