"""Slurm gets the tasks, and then a job that writes the manifest: together the bytes of one process."""

import json

import dill
import pytest
import tokenize_slurm
from conftest import flags, run_main
from transformers import AutoTokenizer

from neobert_hf.pretraining import Corpus, tokenize


def test_the_jobs_of_slurm_write_the_bytes_of_one_process(corpus, tmp_path, monkeypatch):
    """A folder with a program `sbatch` stands for Slurm; then this process runs the tasks as the jobs would."""
    options = {"tokenizer_name": corpus / "tokenizer", "tasks": 5, "output_dir": tmp_path / "out"}
    options |= {"partition": "cpu", "time": "1:00:00"}
    arguments = [corpus / "train.jsonl", corpus / "held_out.jsonl", *flags(options)]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="the command sbatch is missing"):
        run_main(tokenize_slurm, *arguments)
    assert not (tmp_path / "out").exists()
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho Submitted batch job 7\n')
    (tmp_path / "sbatch").chmod(0o755)
    assert json.loads(run_main(tokenize_slurm, *arguments))["submitted"]
    assert any("--dependency=afterok:7" in call for call in (tmp_path / "calls").read_text().splitlines())
    logs = [tmp_path / "out/logs", tmp_path / "out/logs/manifest"]
    scripts = [(folder / "launch_script.slurm").read_text() for folder in logs]
    assert all("#SBATCH --partition=cpu" in script and "mem-per-cpu=2G" in script for script in scripts)
    assert "#SBATCH --array=0-4" in scripts[0] and "#SBATCH --array=0-0" in scripts[1]

    names = ("node_ips", "cpus_per_task", "mem_per_cpu", "gpus_on_node", "executor")
    environment = {f"datatrove_{name}": "1" for name in names}
    monkeypatch.setattr(tokenize_slurm.SlurmPipelineExecutor, "get_distributed_env", lambda *_: environment)
    for folder, num_tasks in zip(logs, (5, 1)):
        for rank in range(num_tasks):
            monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(rank))
            with (folder / "executor.pik").open("rb") as file:  # as `launch_pickled_pipeline` does on a machine
                dill.load(file).run()
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    files = Corpus([corpus / "train.jsonl", corpus / "held_out.jsonl"])
    tokenize(files, AutoTokenizer.from_pretrained(corpus / "tokenizer"), tmp_path / "whole", tasks=5, workers=1)
    whole = tmp_path / "whole"
    written = [file.relative_to(whole) for pattern in ("ids/*", "*.json") for file in whole.glob(pattern)]
    assert len(written) > 10
    assert all((tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes() for file in written)
    (tmp_path / "calls").unlink()
    assert not json.loads(run_main(tokenize_slurm, *arguments))["submitted"] and not (tmp_path / "calls").exists()
