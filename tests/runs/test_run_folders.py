"""A run's folder admits one training at a time; a resume is from an undamaged checkpoint of the same run, or refused."""

import json
import logging
import os
import shutil
import signal
from types import SimpleNamespace

import pytest

from neobert_hf.runs.manifests import MANIFEST, UNFINISHED, CheckedCheckpoints, write_manifest
from neobert_hf.runs.resume import LOCK, begin_or_resume, last_complete_checkpoint, lock_run

RUN = {"seed": 0}


def write_checkpoint(folder, step, **manifest):
    """Write a checkpoint with the files that Trainer writes and arbitrary content."""
    checkpoint = folder / f"checkpoint-{step}"
    (checkpoint / "optimizer_0").mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "optimizer_0/__0_0.distcp"):
        (checkpoint / name).write_bytes(f"{name} of step {step}".encode() * 9)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    write_manifest(checkpoint, **manifest)
    return checkpoint


@pytest.fixture
def folder(tmp_path):
    assert begin_or_resume(tmp_path / "run", RUN, None) is None
    for step in (4, 8):
        write_checkpoint(tmp_path / "run", step)
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["config.json", "a.txt", "1_Pooling/config.json", "checkpoint-500/model.safetensors"])
def test_a_folder_with_a_file_of_somebody_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("of someone")
    with pytest.raises(FileExistsError, match=f"holds {name}; choose a new or empty folder"), lock_run(tmp_path):
        pass
    assert [file.read_text() for file in tmp_path.rglob("*") if file.is_file()] == ["of someone"]


def test_a_run_that_was_killed_early_starts_again_and_a_finished_one_without_checkpoints_does_not(tmp_path):
    folder = tmp_path / "run"
    with lock_run(folder):
        (folder / "documents").write_text("of the run")
    with lock_run(folder):
        assert begin_or_resume(folder, RUN, "auto") is None is begin_or_resume(folder, RUN, None)
    (folder / "training.json").write_text("{}")
    with (
        lock_run(folder),
        pytest.raises(
            FileExistsError, match="run holds this training, which is finished; predict with it as model_name"
        ),
    ):
        begin_or_resume(folder, RUN, "auto")


def test_a_checkpoint_of_somebody_in_the_folder_of_a_run_is_not_overwritten_or_removed(folder):
    for step in (2, 500):
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}/model.safetensors").write_text("of someone")
    with pytest.raises(FileExistsError, match="holds checkpoint-500 of a training from which this run cannot resume"):
        begin_or_resume(folder, RUN, "auto")
    newest = write_checkpoint(folder, 12)
    state = SimpleNamespace(best_model_checkpoint=None)
    CheckedCheckpoints._remove_older_checkpoints(SimpleNamespace(state=state), newest, limit=1)
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-12", "checkpoint-500"}


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", MANIFEST)
DAMAGE = {
    "cut": cut,
    "empty": lambda file: file.write_bytes(b""),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"0"),
    "missing": lambda file: file.unlink(),
    "a list": lambda file: file.write_text("[]"),
    "no keys": lambda file: file.write_text("{}"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", [*FILES, "optimizer_0/__0_0.distcp"])
def test_last_skips_a_damaged_checkpoint_and_its_path_is_refused(folder, name, how):
    """Without a manifest, the newest one may be of somebody else."""
    assert last_complete_checkpoint(folder).name == "checkpoint-8"
    DAMAGE[how](folder / "checkpoint-8" / name)
    assert last_complete_checkpoint(folder).name == "checkpoint-4"
    if (name, how) == (MANIFEST, "missing"):
        with pytest.raises(FileExistsError, match="holds checkpoint-8"):
            begin_or_resume(folder, RUN, "last")
        return
    for exactly in (True, False) if how == "cut" and name in FILES else (True,):
        assert begin_or_resume(folder, RUN, "last", exactly=exactly).name == "checkpoint-4"
        with pytest.raises(ValueError, match="checkpoint-8" if exactly else f"{name} is (damaged|not JSON)"):
            begin_or_resume(folder, RUN, str(folder / "checkpoint-8"), exactly=exactly)


def test_checkpoints_of_a_plain_trainer_are_not_overwritten(folder, tmp_path):
    for step in (4, 8):
        (folder / f"checkpoint-{step}" / MANIFEST).unlink()
    other = write_checkpoint(tmp_path / "other", 4)
    shutil.copy(folder / "run.json", tmp_path / "other")
    for source in (None, "last", str(other)):
        with pytest.raises(FileExistsError, match=r"holds checkpoint-8 of .* cannot resume; give another output_dir"):
            begin_or_resume(folder, RUN, source)
    newest = folder / "checkpoint-8"
    assert begin_or_resume(folder, RUN, str(newest), exactly=False) == newest
    assert begin_or_resume(folder, RUN, "last", exactly=False) == newest


def test_a_folder_with_interrupted_checkpoints_only_accepts_a_new_run(folder):
    """A kill before Trainer's state, and a kill between it and the manifest."""
    for step in (4, 8):
        (folder / f"checkpoint-{step}" / MANIFEST).rename(folder / f"checkpoint-{step}" / UNFINISHED)
    (folder / "checkpoint-4/trainer_state.json").unlink()
    assert begin_or_resume(folder, RUN, "auto") is None
    with pytest.raises(FileNotFoundError, match=r"start without resume_from_checkpoint$"):
        begin_or_resume(folder, RUN, "last")


def test_last_skips_paths_that_only_look_like_checkpoints(folder):
    (folder / "checkpoint-98").write_text("a file")
    (folder / "checkpoint-99").mkdir()
    (folder / "checkpoint-²").mkdir()
    (folder / "checkpoint-best").mkdir()
    shutil.copytree(folder / "checkpoint-4", folder / "checkpoint-12")
    assert last_complete_checkpoint(folder).name == "checkpoint-8"
    with pytest.raises(ValueError, match=r"checkpoint-98.trainer_state.json is missing"):
        begin_or_resume(folder, RUN, str(folder / "checkpoint-98"))
    with pytest.raises(ValueError, match="checkpoint-12 holds the state of step 4"):
        begin_or_resume(folder, RUN, str(folder / "checkpoint-12"))


@pytest.mark.parametrize("exactly", [True, False])
@pytest.mark.parametrize("earlier", [{}, {"packing": 1}, {"packing": 2, "data": {"files": []}}])
def test_a_checkpoint_of_a_run_with_other_values_is_refused_and_the_values_are_named(folder, earlier, exactly):
    """Another order of rows, and a stream instead of shards."""
    run = RUN | {"packing": 2}
    (folder / "run.json").write_text(json.dumps(RUN | earlier))
    name, value = ("data", "{'files': \\[\\]} and is None") if "data" in earlier else ("packing", ".* and is 2")
    with pytest.raises(ValueError, match=f"belongs to another run: {name} was {value}; give the same values, or"):
        begin_or_resume(folder, run, "last", exactly)
    (folder / "run.json").write_text(json.dumps(run))
    assert begin_or_resume(folder, run, "last", exactly).name == "checkpoint-8"


@pytest.mark.parametrize("how", ["missing", "cut", "a list"])
def test_the_error_for_a_damaged_run_json_says_what_it_is_for(folder, how, monkeypatch):
    DAMAGE[how](folder / "run.json")
    with pytest.raises(ValueError, match=r"run.json .* it identifies the run; give resume_inexactly"):
        begin_or_resume(folder, RUN, "last")
    assert begin_or_resume(folder, RUN, "last", exactly=False).name == "checkpoint-8"
    assert begin_or_resume(folder, RUN, "last").name == "checkpoint-8"  # the file was written again


def test_without_a_complete_checkpoint_a_warning_names_the_fault_of_each(folder, caplog):
    logging.getLogger("neobert_hf").propagate = True
    cut(folder / "checkpoint-8/optimizer.pt")
    (folder / "checkpoint-4/scheduler.pt").unlink()
    with pytest.raises(FileExistsError, match="holds checkpoint-8 of a training from which this run cannot resume"):
        begin_or_resume(folder, RUN, "last")
    assert "checkpoint-8/optimizer.pt is damaged" in caplog.text and "checkpoint-4 lacks scheduler.pt" in caplog.text
    assert begin_or_resume(folder, RUN, "last", exactly=False).name == "checkpoint-4"


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"is_exact": False}, "was saved without optimizer state"),
        ({"num_processes": 2}, "was written by 2 processes, and this run has 1"),
        (None, "has no manifest.json"),
    ],
)
def test_a_checkpoint_without_exact_resume_is_skipped_unless_resume_is_inexact(folder, manifest, words):
    checkpoint = write_checkpoint(folder, 12, **manifest or {})
    if manifest is None:
        (checkpoint / MANIFEST).unlink()
        (checkpoint / UNFINISHED).touch()
    assert begin_or_resume(folder, RUN, "last").name == "checkpoint-8"
    with pytest.raises(ValueError, match=f"{words}.*; give resume_inexactly to resume from it"):
        begin_or_resume(folder, RUN, str(checkpoint))
    assert begin_or_resume(folder, RUN, "last", exactly=False) == checkpoint
    with pytest.raises(ValueError, match="belongs to another run"):
        begin_or_resume(folder, {"seed": 1}, "last", exactly=False)


def test_a_run_does_not_mix_checkpoints_of_two_folders(folder, tmp_path):
    assert begin_or_resume(tmp_path / "new", RUN, str(folder / "checkpoint-4")).name == "checkpoint-4"
    assert json.loads((tmp_path / "new/run.json").read_text()) == RUN
    write_checkpoint(tmp_path / "new", 6)
    with pytest.raises(FileExistsError, match="holds checkpoint-6"):
        begin_or_resume(tmp_path / "new", RUN, str(folder / "checkpoint-4"))


@pytest.mark.slow
def test_a_folder_admits_one_training_and_a_killed_training_releases_its_lock(tmp_path):
    ready, wake = os.pipe()
    child = os.fork()
    if not child:
        with lock_run(tmp_path / "run"):
            os.write(wake, b"x")
            signal.pause()
    os.read(ready, 1)
    with pytest.raises(ValueError, match=f"another process writes to {tmp_path / 'run'}; .* another folder"):
        lock_run(tmp_path / "run").__enter__()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / "run" / LOCK).exists()
    with lock_run(tmp_path / "run"), pytest.raises(ValueError, match="another process"), lock_run(tmp_path / "run"):
        pass
    with lock_run(tmp_path / "run"):
        pass


def test_an_error_before_the_first_file_leaves_no_folder(tmp_path):
    for files in ((), ("run.json",), ("model.safetensors",)):
        with pytest.raises(OSError, match="unreadable"), lock_run(tmp_path / "run"):
            for name in files:
                (tmp_path / "run" / name).touch()
            raise OSError("unreadable")
        assert (tmp_path / "run").exists() == ("model.safetensors" in files)
    (tmp_path / "mine").mkdir()
    with pytest.raises(OSError, match="unreadable"), lock_run(tmp_path / "mine"):
        raise OSError("unreadable")
    assert (tmp_path / "mine").is_dir()  # it was there before


def test_the_best_checkpoint_stays_when_the_folder_of_the_run_is_spelled_in_another_way(folder):
    best = SimpleNamespace(best_model_checkpoint=os.path.relpath(folder / "checkpoint-4"))
    newest = write_checkpoint(folder, 12)
    CheckedCheckpoints._remove_older_checkpoints(SimpleNamespace(state=best), newest, limit=1)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-4"]
