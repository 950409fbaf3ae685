"""Two processes train as one does; what they save loads as one model; one that dies takes the job with it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_pretraining import command, corpus, losses_of, run  # noqa: F401 (corpus is a fixture)
from transformers import AutoModelForMaskedLM

FSDP2 = str(Path(__file__).with_name("fsdp_on_cpu.py"))


def two_processes(*args, launcher=None, **changes):
    """The example's command on two processes of the CPU."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return [*launch, *([launcher] if launcher else []), *command(*args, **changes)[1:]]


@pytest.mark.parametrize("launcher", [None, FSDP2], ids=["ddp", "fsdp2"])
def test_two_processes_follow_the_curve_of_one(corpus, tmp_path, launcher):  # noqa: F811
    """1e-4 in fp32 over 20 steps; rounding in another order is all that may differ."""
    options = dict(max_steps=20, save_steps=10)
    alone = run(corpus, tmp_path / "alone", **options)
    options["launcher"] = launcher
    done = subprocess.run(
        two_processes(corpus, tmp_path / "two", **options), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    together = losses_of(tmp_path / "two")
    assert sorted(together) == sorted(alone) == list(range(1, 21))
    assert max(abs(together[step] - alone[step]) for step in alone) < 1e-4
    summaries = [json.loads((tmp_path / name / "training_summary.json").read_text()) for name in ("alone", "two")]
    assert [summary["devices"] for summary in summaries] == [1, 2]
    for name in ("num_tokens", "num_masked"):
        assert summaries[0][name] == summaries[1][name]
    assert abs(summaries[0]["eval_loss"] - summaries[1]["eval_loss"]) < 1e-4  # no row counted twice
    models = [AutoModelForMaskedLM.from_pretrained(tmp_path / name) for name in ("alone", "two")]
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters()):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")  # 20 steps of lr 3e-3
    sharded = tmp_path / "two/checkpoint-10/pytorch_model_fsdp_0"
    assert sharded.is_dir() == (launcher is FSDP2)
    assert {path.name for path in (tmp_path / "two").glob("*.py")} == {
        p.name for p in (tmp_path / "alone").glob("*.py")
    }
    auto_maps = [json.loads((tmp_path / name / "config.json").read_text())["auto_map"] for name in ("alone", "two")]
    assert auto_maps[0] == auto_maps[1]
    resume = dict(resume_from_checkpoint=tmp_path / "two/checkpoint-10")
    resumed = subprocess.run(
        two_processes(corpus, tmp_path / "two", **options, **resume), capture_output=True, text=True, timeout=300
    )
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert losses_of(tmp_path / "two") == together


def test_a_process_that_dies_ends_the_job_with_an_error(corpus, tmp_path):  # noqa: F811
    options = dict(max_steps=100_000, save_steps=100_000)
    job = subprocess.Popen(
        two_processes(corpus, tmp_path, **options), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 120
    metrics = tmp_path / "metrics.jsonl"
    while time.monotonic() < deadline and not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        time.sleep(0.1)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, errors = job.communicate(timeout=90)
    assert job.returncode != 0 and b"SIGKILL" in errors, errors[-2000:]
