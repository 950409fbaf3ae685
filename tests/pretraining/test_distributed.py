"""Training on two processes follows the curve of one process, saves one model, and ends if a process is killed."""

import json

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
from neobert_hf.runs.folders import lock_run

OPTIONS = dict(max_steps=20, save_steps=10)


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """The folder and the loss curve of a run on one process."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(corpus, folder, **OPTIONS)


def train(kind, script, arguments, folder):
    """Run a script in two processes, and return the errors of a run that failed."""
    job = start(launch, [*(["--fsdp2"] if kind == "fsdp2" else []), script.__file__, *arguments], folder / "errors")
    job.join()
    return (folder / "errors").read_text() if job.exitcode else ""


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_follow_the_curve_of_one_process_also_after_a_kill(corpus, alone, tmp_path, kind):
    """Tolerance 1e-4 in fp32 over 20 steps: only the order of sums, and so the rounding, differs.

    With the same number of processes, the run that resumes after a kill is equal bit by bit.
    """
    folders = alone[0], tmp_path / "two"
    assert train(kind, pretrain_mlm, command(corpus, folders[1], **OPTIONS), tmp_path) == ""
    killed = command(corpus, tmp_path / "killed", **OPTIONS)
    assert "SIGKILL" in train(kind, killed_pretraining, killed, tmp_path)  # and the other process has ended too
    assert max(losses_of(tmp_path / "killed")) < killed_pretraining.STEP
    assert train(kind, pretrain_mlm, [*killed, "--resume_from_checkpoint", "last"], tmp_path) == ""
    one, two, resumed = alone[1], losses_of(folders[1]), losses_of(tmp_path / "killed")
    assert sorted(two) == sorted(one) == list(range(1, 21))
    assert max(abs(two[step] - one[step]) for step in one) < 1e-4
    assert resumed == two
    weights = [load_file(folder / "model.safetensors") for folder in (folders[1], tmp_path / "killed")]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())
    summaries = [json.loads((folder / "training_summary.json").read_text()) for folder in folders]
    assert [summary["devices"] for summary in summaries] == [1, 2]
    for name in ("num_tokens", "num_masked"):
        assert summaries[0][name] == summaries[1][name]
    assert abs(summaries[0]["eval_loss"] - summaries[1]["eval_loss"]) < 1e-4  # no row is counted twice
    models = [AutoModelForMaskedLM.from_pretrained(folder) for folder in folders]
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters()):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")  # 20 steps of lr 3e-3
    assert (folders[1] / "checkpoint-10/pytorch_model_fsdp_0").is_dir() == (kind == "fsdp2")
    names, others = ({path.name for path in folder.glob("*.py")} for folder in folders)
    assert names == others
    auto_map, other = (json.loads((folder / "config.json").read_text())["auto_map"] for folder in folders)
    assert auto_map == other


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
