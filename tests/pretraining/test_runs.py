"""A run's folder admits one training at a time; a resume is bitwise exact or refused."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pretrain_mlm
import pytest
from conftest import largest_file, run_main
from safetensors import SafetensorError
from test_pretraining import command, corpus, losses_of, run  # noqa: F401 (corpus is a fixture)

from neobert_hf.data.files import sealed
from neobert_hf.runs import manifests
from neobert_hf.runs.folders import (
    LOCK,
    begin_or_resume,
    check_held_out,
    check_start,
    last_complete_checkpoint,
    lock_run,
)
from neobert_hf.runs.manifests import MANIFEST, check_checkpoint, write_manifest

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
    """A run with checkpoints at the steps 4 and 8."""
    assert begin_or_resume(tmp_path / "run", RUN, None) is None
    for step in (4, 8):
        write_checkpoint(tmp_path / "run", step)
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["model.safetensors", "README.md"])
def test_a_new_run_does_not_replace_a_model_or_a_page_in_its_folder(tmp_path, name):
    (tmp_path / name).write_text("of someone")
    for resume in (None, "auto"):
        with pytest.raises(FileExistsError, match=f"holds {name}, which the trained model would replace; give another"):
            begin_or_resume(tmp_path, RUN, resume)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {name: "of someone"}


START = SimpleNamespace(config=SimpleNamespace(model_type="neobert", vocab_size=30))


@pytest.mark.parametrize(
    "architecture, num_tokens, tokenizer, message",
    [
        ("roberta-prelayernorm", 30, "a", "has the architecture neobert, and the recipe roberta-prelayernorm"),
        ("neobert", 30, "b", "the tokenizer is not that of"),
        ("neobert", 31, "a", r"which has 30 tokens .this one 31.; give the --tokenizer_name of phase 1"),
    ],
)
def test_phase_2_with_another_tokenizer_or_architecture_is_refused(
    tmp_path, architecture, num_tokens, tokenizer, message
):
    (tmp_path / "one/checkpoint-4").mkdir(parents=True)
    (tmp_path / "one/run.json").write_text('{"tokenizer_sha256": "a"}')
    for folder in (tmp_path / "one", tmp_path / "one/checkpoint-4"):
        check_start(START, folder, "neobert", 30, "a")
        with pytest.raises(ValueError, match=message):
            check_start(START, folder, architecture, num_tokens, tokenizer)
    check_start(START, "chandar-lab/NeoBERT", "neobert", 30, "a")


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def change_manifest(file, change):
    content = json.loads(file.read_text())
    del content["checksum"]
    change(content)
    file.write_text(json.dumps(sealed(content)))


FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", MANIFEST)
DAMAGE = {
    "flip": flip,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "empty": lambda file: file.write_bytes(b""),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "other": lambda file: shutil.copy(file.parents[1] / "checkpoint-4" / file.name, file),
    "missing": lambda file: file.unlink(),
    "not UTF-8": lambda file: file.write_bytes(b"\xff" + file.read_bytes()[1:]),
    "a list": lambda file: file.write_text("[]"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", [*FILES, "optimizer_0/__0_0.distcp"])
def test_last_skips_a_damaged_checkpoint_and_its_path_is_refused(folder, name, how):
    if how == "other" and "/" in name:
        pytest.skip("the other checkpoint has this file in another folder")
    assert last_complete_checkpoint(folder).name == "checkpoint-8"
    DAMAGE[how](folder / "checkpoint-8" / name)
    assert last_complete_checkpoint(folder).name == "checkpoint-4"
    assert begin_or_resume(folder, RUN, "last").name == "checkpoint-4"
    with pytest.raises(ValueError, match="checkpoint-8"):
        begin_or_resume(folder, RUN, str(folder / "checkpoint-8"))
    with pytest.raises(FileExistsError):
        begin_or_resume(folder, RUN, None)


@pytest.mark.parametrize("name", FILES)
def test_an_inexact_resume_also_refuses_a_damaged_file(folder, name):
    flip(folder / "checkpoint-8" / name)
    assert begin_or_resume(folder, RUN, "last", exactly=False).name == "checkpoint-4"
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        begin_or_resume(folder, RUN, str(folder / "checkpoint-8"), exactly=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["files"].update({"../run.json": m["files"]["optimizer.pt"]}), "outside the checkpoint"),
        (lambda m: m["files"].update({"/etc/hostname": m["files"]["optimizer.pt"]}), "outside the checkpoint"),
        (lambda m: m.update(files=["optimizer.pt"]), "no sizes and checksums"),
        (lambda m: m["files"].update({"optimizer.pt": "abc"}), "no sizes and checksums"),
        (lambda m: m.pop("is_exact"), "without optimizer state"),
        (lambda m: m.pop("num_processes"), "by None processes, and this run has 1"),
    ],
)
def test_the_error_for_an_invalid_manifest_names_the_fault(folder, change, words):
    change_manifest(folder / "checkpoint-8" / MANIFEST, change)
    with pytest.raises(ValueError, match=words):
        check_checkpoint(folder / "checkpoint-8")
    assert last_complete_checkpoint(folder).name == "checkpoint-4"


@pytest.mark.parametrize("checksum", [{}, {"checksum": None}])
def test_a_manifest_without_a_checksum_is_refused(folder, checksum):
    file = folder / "checkpoint-8" / MANIFEST
    content = json.loads(file.read_text())
    del content["checksum"]
    file.write_text(json.dumps(content | checksum))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: it has no checksum"):
        check_checkpoint(folder / "checkpoint-8")
    assert last_complete_checkpoint(folder, exactly=False).name == "checkpoint-4"


def test_checkpoints_of_a_version_without_manifests_are_not_overwritten(folder, tmp_path):
    for step in (4, 8):
        (folder / f"checkpoint-{step}" / MANIFEST).unlink()
    other = write_checkpoint(tmp_path / "other", 4)
    shutil.copy(folder / "run.json", tmp_path / "other")
    newest = folder / "checkpoint-8"
    for source in (None, str(other)):
        with pytest.raises(FileExistsError, match=f"another --output_dir, or .*--resume_from_checkpoint {newest} "):
            begin_or_resume(folder, RUN, source)
    with pytest.raises(FileNotFoundError, match=r"holds no complete checkpoint.*; give another --output_dir$"):
        begin_or_resume(folder, RUN, "last")
    assert begin_or_resume(folder, RUN, str(newest), exactly=False) == newest
    assert begin_or_resume(folder, RUN, "last", exactly=False) == newest


def test_a_folder_with_interrupted_checkpoints_only_accepts_a_new_run(folder):
    for step in (4, 8):
        (folder / f"checkpoint-{step}" / MANIFEST).unlink()
    (folder / "checkpoint-4/trainer_state.json").unlink()
    (folder / "checkpoint-8/trainer_state.json").write_text('{"global_st')
    assert begin_or_resume(folder, RUN, None) is None
    with pytest.raises(FileNotFoundError, match=r"start without --resume_from_checkpoint$"):
        begin_or_resume(folder, RUN, "last")


def test_last_skips_paths_that_only_look_like_checkpoints(folder):
    (folder / "checkpoint-98").write_text("a file")
    (folder / "checkpoint-99").mkdir()
    (folder / "checkpoint-²").mkdir()
    (folder / "checkpoint-best").mkdir()
    shutil.copytree(folder / "checkpoint-4", folder / "checkpoint-12")
    assert last_complete_checkpoint(folder).name == "checkpoint-8"
    with pytest.raises(ValueError, match="checkpoint-98 is not a folder"):
        begin_or_resume(folder, RUN, str(folder / "checkpoint-98"))
    with pytest.raises(ValueError, match="checkpoint-12 holds the state of step 4"):
        begin_or_resume(folder, RUN, str(folder / "checkpoint-12"))


def test_a_checkpoint_of_a_streaming_run_and_one_with_documents_do_not_resume_each_other(folder):
    streaming, sharded = RUN | {"data": {"files": []}}, RUN | {"data": {"num_documents": 9}}
    for there, here, words in ((streaming, sharded, "with --streaming"), (sharded, streaming, "without --streaming")):
        (folder / "run.json").write_text(json.dumps(there))
        with pytest.raises(ValueError, match=f"belongs to a run {words}, which has another order of rows"):
            begin_or_resume(folder, here, "last")
        assert begin_or_resume(folder, there, "last").name == "checkpoint-8"


FIRST = {"seed": 1, "data": {"num_documents": 9}, "held_out": {"files": [], "num_held_out": 4}}


@pytest.mark.parametrize("name", ["run.json", "training_summary.json"])
@pytest.mark.parametrize("is_checkpoint", [False, True])
@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ({}, None),
        ({"held_out": {"files": [], "num_held_out": 5}}, None),  # the first 4 of them
        ({"held_out": {"files": [], "num_held_out": 3}}, "num_held_out was 3 and is 4"),
        ({"held_out": {"files": ["a.txt"], "num_held_out": 4}}, "it had --validation_files"),
        ({"data": {"files": []}}, "it had --streaming"),
        ({"data": {"num_documents": 8}, "seed": 2}, "seed was 2 and is 1; its training text was another"),
    ],
)
def test_phase_2_holds_out_only_documents_that_phase_1_held_out(tmp_path, caplog, name, is_checkpoint, there, reason):
    there = {name: value for name, value in (FIRST | there).items() if value is not None}
    (tmp_path / name).write_text(json.dumps(there))
    init_from = tmp_path / "checkpoint-8" if is_checkpoint else tmp_path
    if reason is None:
        check_held_out(init_from, FIRST)
    else:
        with pytest.raises(ValueError, match=rf"may have trained on .*: {reason}.*\. Give --validation_files, or"):
            check_held_out(init_from, FIRST)
    assert not caplog.records


def test_phase_2_of_a_model_without_a_run_warns_that_held_out_documents_may_have_been_trained_on(tmp_path, caplog):
    check_held_out(tmp_path, FIRST)
    assert "holds no run.json: its training may have used the documents that are held out here" in caplog.text


@pytest.mark.parametrize("how", ["missing", "cut", "not UTF-8", "a list"])
def test_the_error_for_a_damaged_run_json_says_what_it_is_for(folder, how, monkeypatch):
    DAMAGE[how](folder / "run.json")
    with pytest.raises(ValueError, match=r"run.json .* it identifies the run of checkpoint-8"):
        begin_or_resume(folder, RUN, "last")
    assert begin_or_resume(folder, RUN, "last", exactly=False).name == "checkpoint-8"
    assert begin_or_resume(folder, RUN, "last").name == "checkpoint-8"  # the file was written again


def test_without_a_complete_checkpoint_the_error_names_the_fault_of_each(folder):
    flip(folder / "checkpoint-8/optimizer.pt")
    (folder / "checkpoint-4/scheduler.pt").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"holds no complete checkpoint; .*checkpoint-8/optimizer.pt is damaged.*; .*checkpoint-4 lacks scheduler.pt; "
        "give --resume_inexactly to resume from it; give another --output_dir",
    ):
        begin_or_resume(folder, RUN, "last")
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
    assert begin_or_resume(folder, RUN, "last").name == "checkpoint-8"
    with pytest.raises(ValueError, match=f"{words}.*; give --resume_inexactly to resume from it"):
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


# --- The example itself ---------------------------------------------------------------------------------------------


def metrics_of(folder):
    """The lines of the metrics without the values that depend on time."""
    times = ("tokens_per_s", "model_flops_utilization", "_runtime", "_per_second")
    entries = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in entry.items() if not name.endswith(times)} for entry in entries]


def test_a_run_killed_before_its_first_manifest_may_start_again(corpus, tmp_path, monkeypatch):  # noqa: F811
    """Trainer's state exists, as in checkpoints of earlier versions, which must not be overwritten."""

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt  # a real signal arrives later, at a place that differs from run to run

    with monkeypatch.context() as patched:
        patched.setattr(manifests, "write_manifest", interrupt)
        with pytest.raises(SystemExit):
            run(corpus, tmp_path / "run", max_steps=4)
    assert (tmp_path / "run/checkpoint-4/trainer_state.json").is_file()
    with pytest.raises(SystemExit, match="start without --resume_from_checkpoint"):
        run(corpus, tmp_path / "run", max_steps=4, resume_from_checkpoint="last")
    run(corpus, tmp_path / "run", max_steps=4)
    assert {file.name for file in (tmp_path / "run/checkpoint-4").glob("manifest.*")} == {"manifest.json"}
    assert last_complete_checkpoint(tmp_path / "run").name == "checkpoint-4"


@pytest.fixture
def finished(corpus, tmp_path):  # noqa: F811
    """A run of eight steps with checkpoints at 4 and 8: its folder and the lines of its metrics."""
    run(corpus, tmp_path / "run", max_steps=8, warmup_steps=4)
    return tmp_path / "run", metrics_of(tmp_path / "run")


def resume(corpus, folder, **changes):  # noqa: F811
    run(corpus, folder, **dict(max_steps=8, warmup_steps=4, resume_from_checkpoint="last") | changes)
    return metrics_of(folder)


def test_a_resume_after_damage_repeats_steps_and_gives_the_same_metrics(corpus, finished):  # noqa: F811
    """The last line is the same too: it holds no value of the steps after the resume alone."""
    folder, whole = finished
    flip(folder / "checkpoint-8/optimizer.pt")
    assert resume(corpus, folder) == whole
    assert last_complete_checkpoint(folder).name == "checkpoint-8"
    assert not any("train_loss" in entry for entry in whole)


def test_a_checkpoint_without_the_schedule_resumes_only_inexactly(corpus, finished, capsys):  # noqa: F811
    folder, whole = finished
    shutil.rmtree(folder / "checkpoint-8")
    (folder / "checkpoint-4/scheduler.pt").unlink()
    for checkpoint in ("last", folder / "checkpoint-4"):
        with pytest.raises(SystemExit) as ended:
            resume(corpus, folder, resume_from_checkpoint=checkpoint)
        assert "lacks scheduler.pt; give --resume_inexactly" in ended.value.code and "\n" not in ended.value.code
    inexact = resume(corpus, folder, resume_inexactly=True)
    assert len(inexact) == len(whole) and inexact != whole


def test_checkpoints_without_optimizer_state_cause_a_warning_and_are_refused(corpus, tmp_path, caplog):  # noqa: F811
    run(corpus, tmp_path, max_steps=4, save_only_model=True)
    assert "none of them can be resumed exactly" in caplog.text
    with pytest.raises(SystemExit, match="was saved without optimizer state"):
        run(corpus, tmp_path, max_steps=4, save_only_model=True, resume_from_checkpoint="last")


def test_older_checkpoints_are_removed_only_when_the_new_one_is_complete(corpus, tmp_path, monkeypatch):  # noqa: F811
    written, found = manifests.write_manifest, []

    def watch(checkpoint, **options):
        found.append(sorted(path.name for path in tmp_path.glob("checkpoint-*")))
        written(checkpoint, **options)

    monkeypatch.setattr(manifests, "write_manifest", watch)
    run(corpus, tmp_path, max_steps=8, save_steps=2, save_total_limit=1)
    names = [f"checkpoint-{step}" for step in (2, 4, 6, 8)]
    assert found == [names[:1], names[:2], names[1:3], names[2:]]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-8"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_checkpoint_that_cannot_be_written_is_removed_and_the_run_resumes(corpus, finished, name):  # noqa: F811
    folder, whole = finished
    shutil.rmtree(folder / "checkpoint-8")
    num_bytes = (folder / "checkpoint-4" / name).stat().st_size - 1
    message = r"checkpoint-8 could not be written; earlier checkpoints are complete"
    with pytest.raises(SystemExit, match=message) as ended, largest_file(num_bytes):
        resume(corpus, folder)
    assert "\n" not in ended.value.code and not (folder / "checkpoint-8").exists()
    assert resume(corpus, folder) == whole


def test_a_checkpoint_whose_manifest_cannot_be_written_is_removed(corpus, tmp_path, monkeypatch):  # noqa: F811
    def full(checkpoint, **options):
        assert (checkpoint / "model.safetensors").is_file()
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(manifests, "write_manifest", full)
    with pytest.raises(SystemExit, match="the disk is full"):
        run(corpus, tmp_path, max_steps=4)
    assert not (tmp_path / "checkpoint-4").exists()


def test_the_error_for_a_full_disk_at_the_last_save_is_one_line(corpus, tmp_path, monkeypatch):  # noqa: F811
    save = pretrain_mlm.PretrainingTrainer.save_model

    def save_on_a_full_disk(*args):
        with largest_file(100_000):  # larger than the code, which is saved first, and smaller than the weights
            save(*args)

    monkeypatch.setattr(pretrain_mlm.PretrainingTrainer, "save_model", save_on_a_full_disk)
    with pytest.raises(SystemExit, match=f"{tmp_path.name} could not be written; earlier checkpoints") as ended:
        run(corpus, tmp_path, max_steps=1, warmup_steps=0, save_strategy="no")
    assert isinstance(ended.value.__cause__.__cause__, SafetensorError)
    assert "\n" not in ended.value.code


def test_a_second_training_in_the_same_folder_is_refused(corpus, tmp_path):  # noqa: F811
    with lock_run(tmp_path), pytest.raises(SystemExit, match=r"another process writes to .* another folder$"):
        run_main(pretrain_mlm, *command(corpus, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
