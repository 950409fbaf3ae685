"""Training on two processes follows the curve of one process, saves one model, and ends if a process is killed.

`make test-runtimes` installs DeepSpeed, which runs on its CPU accelerator.
"""

import importlib.util
import json
import os
import subprocess
import sys

import killed_pretraining
import launch
import pretrain_mlm
import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import send_to_device
from pretraining_runs import command, losses_of, run, start
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForMaskedLM

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.model import blocks_neobert
from neobert_hf.model.rotary_neobert import Rotary, split_and_rotate
from neobert_hf.pretraining.trainer import keep_float32
from neobert_hf.runs import lock_run

OPTIONS = dict(max_steps=20, save_steps=10)
MUON = dict(optimizer="muon", schedule="wsd", mask_rate=[0.3, 0.15, 0.05])
CONFIGS = killed_pretraining.EXAMPLE.parent / "accelerate"
needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs make test-runtimes")
AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
ZERO = {
    2: {"stage": 2},
    # without the threshold ZeRO-3 shards no parameter below 100,000 elements, and the tiny model has no other
    3: {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True},
}


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(corpus, folder, **OPTIONS)


def train(kind, script, arguments, folder):
    """Run a script in two processes, and return the errors of a run that failed; `kind` may be a config of DeepSpeed."""
    how = ["--fsdp2"] if kind == "fsdp2" else []
    if isinstance(kind, dict):
        file = folder / "deepspeed.json"
        file.write_text(json.dumps(AUTO | kind))
        arguments = [*arguments, "--deepspeed", str(file)]
    job = start(launch, [*how, script.__file__, *arguments], folder / "errors")
    job.join()
    return (folder / "errors").read_text() if job.exitcode else ""


def check_two_processes(kind, alone, corpus, folder, options=OPTIONS, bounds=(1e-4, 1e-3)):
    """Compare the run in `folder`/whole with that of one process, and with a run that resumes after a kill.

    Losses may differ by 1e-4 in fp32 over 20 steps: only the order of sums, and so the rounding, differs. On the same number of
    processes, the run that resumes is equal bit by bit.
    """
    whole, killed = folder / "whole", folder / "killed"
    arguments = command(corpus, killed, **options)
    assert "SIGKILL" in train(kind, killed_pretraining, arguments, folder)  # and the other process has ended too
    assert max(losses_of(killed)) < killed_pretraining.STEP
    assert train(kind, pretrain_mlm, [*arguments, "--resume_from_checkpoint", "last"], folder) == ""
    one, two = alone[1], losses_of(whole)
    assert sorted(two) == sorted(one) == list(range(1, 21))
    assert max(abs(two[step] - one[step]) for step in one) < bounds[0]
    assert losses_of(killed) == two
    weights, resumed = (load_file(path / "model.safetensors") for path in (whole, killed))
    assert all(torch.equal(weights[name], tensor) for name, tensor in resumed.items())
    folders = alone[0], whole
    summaries = [json.loads((path / "training_summary.json").read_text()) for path in folders]
    assert [summary["devices"] for summary in summaries] == [1, 2]
    for name in ("num_tokens", "num_masked", "num_parameters"):
        assert summaries[0][name] == summaries[1][name]
    assert abs(summaries[0]["eval_loss"] - summaries[1]["eval_loss"]) < bounds[0]  # no row is counted twice
    models = [AutoModelForMaskedLM.from_pretrained(path) for path in folders]
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters()):
        # 20 steps of lr 3e-3
        torch.testing.assert_close(b, a, rtol=0, atol=bounds[1], msg=lambda m, n=name: f"{n}: {m}")
    names, others = ({file.name for file in path.glob("*.py")} for path in folders)
    assert names == others
    auto_map, other = (json.loads((path / "config.json").read_text())["auto_map"] for path in folders)
    assert auto_map == other


@pytest.fixture(scope="module")
def alone_with_muon(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone_with_muon")
    return folder, run(corpus, folder, **OPTIONS, **MUON)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_processes_follow_the_curve_of_one_process_also_after_a_kill(corpus, request, tmp_path, kind, optimizer):
    alone = request.getfixturevalue("alone" if optimizer == "adamw" else "alone_with_muon")
    options = OPTIONS if optimizer == "adamw" else OPTIONS | MUON
    assert train(kind, pretrain_mlm, command(corpus, tmp_path / "whole", **options), tmp_path) == ""
    # Muon orthogonalizes in bf16: a rounding of the gradient changes the last of 8 bits of the update
    check_two_processes(kind, alone, corpus, tmp_path, options, (1e-4, 1e-3) if optimizer == "adamw" else (1e-3, 1e-2))
    assert (tmp_path / "whole/checkpoint-10/pytorch_model_fsdp_0").is_dir() == (kind == "fsdp2")


@pytest.mark.runtime
@needs_deepspeed
@pytest.mark.parametrize("stage", ZERO, ids="ZeRO-{}".format)
def test_deepspeed_follows_the_curve_of_one_process_also_after_a_kill(corpus, alone, tmp_path, stage):
    """The whole run by our config of accelerate, without a warning; the others by a config of DeepSpeed, which shards all."""
    options = ["--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no", "--config_file"]
    words = [sys.executable, "-m", "accelerate.commands.launch", *options, CONFIGS / f"deepspeed_zero{stage}.yaml"]
    words += [pretrain_mlm.__file__, *command(corpus, tmp_path / "whole", **OPTIONS)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Warning" not in done.stderr and "mismatch" not in done.stderr, done.stderr[-4000:]
    check_two_processes({"zero_optimization": ZERO[stage]}, alone, corpus, tmp_path)


@pytest.mark.slow
def test_all_processes_end_if_another_training_writes_to_the_folder(corpus, tmp_path):
    folder = tmp_path / "run"
    with lock_run(folder):
        job = start(launch, [pretrain_mlm.__file__, *command(corpus, folder)], tmp_path / "errors")
        job.join()
    assert job.exitcode == 1
    assert (tmp_path / "errors").read_text().count(f"another process writes to {folder}; wait until it has ended") == 2
    assert not (folder / "run.json").exists()


@pytest.fixture
def mesh():
    """A group of this process only: FSDP2 does not shard, but casts as with several processes."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("is_ours", [False, True], ids=["accelerate's policy", "our policy"])
def test_fsdp2_in_bf16_keeps_float32_where_autocast_does(tiny_config, mesh, monkeypatch, is_ours):
    """Rotary table: under any policy. Residual stream, loss and gradients: under the policy of PretrainingTrainer."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    if is_ours:
        keep_float32(plugin)
    rotated_in, states = [], []

    def watch(qkv, rotary, *others):
        rotated_in.append(rotary.dtype)
        return split_and_rotate(qkv, rotary, *others)

    monkeypatch.setattr(blocks_neobert, "split_and_rotate", watch)
    tiny_config.sparse_prediction = True
    ids = torch.randint(5, 96, (1, 64), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = NeoBERTForMaskedLM(tiny_config).train()
        if is_sharded:
            for module in (*model.model.transformer_encoder, model):
                fully_shard(module, mesh=mesh, mp_policy=plugin.mixed_precision_policy)
        for block in model.model.transformer_encoder:
            block.ffn_norm.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(input_ids=ids, position_ids=torch.arange(64)[None], labels=ids).loss)
        losses[-1].backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert set(rotated_in) == {torch.float32}
    if is_ours:
        assert set(states) == {torch.float32} and losses[1].dtype == torch.float32
        # Under FSDP2 norms have bf16 weights, here exactly 1; the embedding is rounded by a relative 2^-9 at most.
        assert abs(losses[1] - losses[0]) < 2**-9
        for ours, autocast in zip(gradients[1], gradients[0]):
            assert ours.dtype == torch.float32
            # the rounding error of bf16 products
            assert (ours.full_tensor() - autocast).norm() < 2**-5 * autocast.norm()


def test_the_rotary_table_moves_with_the_arguments_of_a_block():
    """With blocks on several devices, accelerate moves the arguments of each block to its device."""
    assert send_to_device((Rotary(torch.ones(3)),), "meta")[0].table.is_meta
