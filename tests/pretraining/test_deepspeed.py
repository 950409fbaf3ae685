"""DeepSpeed on its CPU accelerator, by our configs of accelerate. `make test-runtimes` installs it."""

import importlib.util
import json
import os
import subprocess
import sys

import killed_pretraining
import pretrain_mlm
import pytest
import torch
from pretraining_runs import command, losses_of, run
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

from neobert_hf.runs.folders import last_complete_checkpoint

pytestmark = [
    pytest.mark.runtime,
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed: make test-runtimes"),
]

OPTIONS = dict(max_steps=20, save_steps=10)
CONFIGS = killed_pretraining.EXAMPLE.parent / "accelerate"
ZERO3 = {  # without the threshold, ZeRO-3 leaves parameters below 100,000 elements whole, which all of the tiny model are
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_gather_16bit_weights_on_model_save": True,
}
AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")


def launch(kind, script, arguments):
    """Run a script in two processes, by a config of accelerate or by the path of a config of DeepSpeed."""
    by_accelerate = ["accelerate.commands.launch", "--config_file", CONFIGS / f"{kind}.yaml"]
    by_accelerate += ["--num_processes", 2, "--main_process_port", 0, "--mixed_precision", "no"]
    if isinstance(kind, os.PathLike):
        by_accelerate = ["torch.distributed.run", "--standalone", "--nproc-per-node", 2]
        arguments = [*arguments, "--deepspeed", kind]
    words = map(str, [sys.executable, "-m", *by_accelerate, script.__file__, *arguments])
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(list(words), env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """The folder and the loss curve of a run on one process."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(corpus, folder, **OPTIONS)


@pytest.mark.parametrize("kind", ["deepspeed_zero2", "deepspeed_zero3", "all sharded"])
def test_deepspeed_follows_the_curve_of_one_process_also_after_a_kill(corpus, alone, tmp_path, kind):
    """1e-4 in float32 over 20 steps: only the order of sums differs. A resume on two processes is equal bit by bit."""
    if kind == "all sharded":
        kind = tmp_path / "zero3.json"
        kind.write_text(json.dumps({**AUTO, "zero_optimization": ZERO3}))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = launch(kind, pretrain_mlm, command(corpus, whole, **OPTIONS))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Warning" not in done.stderr and "mismatch" not in done.stderr, done.stderr[-4000:]
    done = launch(kind, killed_pretraining, command(corpus, killed, **OPTIONS))
    assert done.returncode != 0 and "SIGKILL" in done.stderr  # and the other process has ended too
    assert max(losses_of(killed)) < killed_pretraining.STEP
    done = launch(kind, pretrain_mlm, command(corpus, killed, **OPTIONS, resume_from_checkpoint="last"))
    assert done.returncode == 0, done.stderr[-4000:]

    one, two = alone[1], losses_of(whole)
    assert sorted(two) == sorted(one) and losses_of(killed) == two
    assert max(abs(two[step] - one[step]) for step in one) < 1e-4
    summaries = [json.loads((folder / "training_summary.json").read_text()) for folder in (alone[0], whole)]
    assert [summary["devices"] for summary in summaries] == [1, 2]
    for name in ("num_tokens", "num_masked", "num_parameters"):
        assert summaries[0][name] == summaries[1][name]
    assert abs(summaries[0]["eval_loss"] - summaries[1]["eval_loss"]) < 1e-4
    models = [AutoModelForMaskedLM.from_pretrained(folder) for folder in (alone[0], whole)]
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters()):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")  # 20 steps of lr 3e-3
    weights = [load_file(folder / "model.safetensors") for folder in (whole, killed, whole / "checkpoint-20")]
    for others in weights[1:]:
        assert all(torch.equal(weights[0][name], tensor) for name, tensor in others.items())
    assert last_complete_checkpoint(whole, exactly=False).name == "checkpoint-20"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_optimization": {"stage": 3}}, "ZeRO-3 would save no model; set zero3_save_16bit_model: true"),
        ({"optimizer": {"type": "AdamW"}}, "the recipe sets optimizer; remove this from the DeepSpeed config"),
        (
            {"gradient_accumulation_steps": 7},
            "gradient_accumulation_steps=7 in the DeepSpeed config, but the run requires 2",
        ),
    ],
    ids=["saves nothing", "optimizer", "accumulation"],
)
def test_a_deepspeed_config_that_contradicts_the_run_ends_it_in_one_line(corpus, alone, tmp_path, changes, message):
    """`alone` has tokenized the text."""
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({**AUTO, "zero_optimization": ZERO3, **changes}))
    done = launch(file, pretrain_mlm, command(corpus, tmp_path / "run", **OPTIONS))
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if message in line]
    assert lines and all("pretrain_mlm.py: error: " in line for line in lines)
    assert not (tmp_path / "run").exists()
