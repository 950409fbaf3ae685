"""A run that was killed, stopped or damaged resumes to the numbers of an uninterrupted run, bitwise, or is refused."""

import os
import shutil
import signal

import pretrain_mlm
import psutil
import pytest
from conftest import fill_disk_at_the_last_save, largest_file
from pretraining_runs import command, entries_of, run, start, wait_for_steps
from safetensors import SafetensorError

from neobert_hf.pretraining.trainer import PretrainingTrainer
from neobert_hf.runs import last_complete_checkpoint, manifests


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"optimizer": "muon", "schedule": "wsd", "mask_rate": [0.3, 0.15, 0.05]}, marks=pytest.mark.slow),
        pytest.param({"streaming": True, "dataloader_num_workers": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_resumes_to_the_same_losses_bitwise(corpus, tmp_path, options):
    """SIGKILL after the sixth step; the folder also holds a partial checkpoint."""
    changes = dict(options, max_steps=20)  # the kill comes before the last step
    whole = run(corpus, tmp_path / "whole", **changes)
    assert sorted(whole) == list(range(1, 21))
    folder, errors = tmp_path / "killed", tmp_path / "errors"
    process = start(pretrain_mlm, command(corpus, folder, **changes), errors)
    wait_for_steps(process, folder, 6)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, errors.read_text()[-2000:]
    last = last_complete_checkpoint(folder)
    assert last is not None
    partial = folder / "checkpoint-19"  # the state after a kill during a save
    shutil.copytree(last, partial)
    (partial / "trainer_state.json").unlink()
    (partial / "model.safetensors").write_bytes(b"half")
    assert run(corpus, folder, **changes) == whole


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_sigterm_and_ctrl_c_save_a_checkpoint_before_the_run_ends(corpus, tmp_path, number, status):
    """Schedulers and terminals send them to the workers of the data too."""
    folder, errors = tmp_path / "stopped", tmp_path / "errors"
    options = dict(max_steps=100_000, save_steps=100_000, dataloader_num_workers=1)
    process = start(pretrain_mlm, command(corpus, folder, **options), errors)
    wait_for_steps(process, folder, 3)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers, errors.read_text()[-2000:]
    for pid in (*(worker.pid for worker in workers), process.pid):
        os.kill(pid, number)
    process.join(timeout=60)
    assert process.exitcode == status, errors.read_text()[-2000:]
    assert "rerun the command to resume" in errors.read_text()
    assert int(last_complete_checkpoint(folder).name.rpartition("-")[2]) >= 3


def figures_of(folder):
    """The log entries without the values that depend on time."""
    times = ("tokens_per_s", "_runtime", "_per_second")
    return [{name: value for name, value in entry.items() if not name.endswith(times)} for entry in entries_of(folder)]


EIGHT = dict(max_steps=8, warmup_steps=4)


@pytest.fixture(scope="module")
def run_of_eight_steps(corpus, tmp_path_factory):
    """The folder of a run with checkpoints at 4 and 8, and its figures."""
    folder = tmp_path_factory.mktemp("eight")
    run(corpus, folder, **EIGHT)
    return folder, figures_of(folder)


@pytest.fixture
def finished(run_of_eight_steps, tmp_path):
    return shutil.copytree(run_of_eight_steps[0], tmp_path / "run"), run_of_eight_steps[1]


def resume(corpus, folder, **changes):
    run(corpus, folder, **{**EIGHT, **changes})
    return figures_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_that_resumes_after_its_last_step_only_saves_the_model(corpus, finished, tmp_path, streaming):
    """The run was killed between its last checkpoint and the save of the model."""
    folder, whole = finished
    if streaming:
        folder = tmp_path / "streaming"
        run(corpus, folder, **EIGHT, streaming=True)
        whole = figures_of(folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    assert resume(corpus, folder, streaming=streaming) == whole
    assert (folder / "model.safetensors").read_bytes() == weights
    assert not (folder / "checkpoint-9").exists()


def test_a_resume_after_damage_repeats_steps_and_gives_the_same_figures(corpus, finished):
    """The last entry is the same too: it holds no value of the steps after the resume alone."""
    folder, whole = finished
    os.truncate(folder / "checkpoint-8/optimizer.pt", 1000)
    assert resume(corpus, folder) == whole
    assert last_complete_checkpoint(folder).name == "checkpoint-8"
    assert not any("train_loss" in entry for entry in whole)


def test_a_checkpoint_without_the_schedule_resumes_only_inexactly(corpus, finished):
    folder, whole = finished
    shutil.rmtree(folder / "checkpoint-8")
    (folder / "checkpoint-4/scheduler.pt").unlink()
    for checkpoint in ("last", folder / "checkpoint-4"):
        with pytest.raises((ValueError, OSError), match=r"lacks scheduler.pt; give resume_inexactly|cannot resume"):
            resume(corpus, folder, resume_from_checkpoint=checkpoint)
    inexact = resume(corpus, folder, resume_inexactly=True)
    assert len(inexact) == len(whole) and inexact != whole


def test_older_checkpoints_are_removed_only_when_the_new_one_is_complete(corpus, tmp_path, monkeypatch):
    written, found = manifests.write_manifest, []

    def watch(checkpoint, **options):
        found.append(sorted(path.name for path in tmp_path.glob("checkpoint-*")))
        written(checkpoint, **options)

    monkeypatch.setattr(manifests, "write_manifest", watch)
    run(corpus, tmp_path, max_steps=8, save_steps=2, save_total_limit=1)
    names = [f"checkpoint-{step}" for step in (2, 4, 6, 8)]
    assert found == [names[:1], names[:2], names[1:3], names[2:]]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-8"]


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_removed_and_the_run_resumes(corpus, finished):
    folder, whole = finished
    shutil.rmtree(folder / "checkpoint-8")
    num_bytes = (folder / "checkpoint-4/optimizer.pt").stat().st_size - 1
    message = "checkpoint-8 cannot be written"
    with pytest.raises(OSError, match=message), largest_file(num_bytes):
        resume(corpus, folder)
    assert not (folder / "checkpoint-8").exists()
    assert resume(corpus, folder) == whole


def test_the_error_for_a_full_disk_at_the_last_save_names_the_folder(corpus, tmp_path, monkeypatch):
    # larger than the code, which is saved first, and smaller than the weights
    fill_disk_at_the_last_save(monkeypatch, PretrainingTrainer, 100_000)
    with pytest.raises(OSError, match=f"{tmp_path} cannot be written") as error:
        run(corpus, tmp_path, max_steps=1, warmup_steps=0, save_strategy="no")
    assert isinstance(error.value.__cause__, SafetensorError)
