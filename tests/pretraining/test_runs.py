"""Pretraining: a resume is bitwise exact or refused, and phase 2 continues phase 1."""

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pretrain_mlm
import pytest
from conftest import largest_file, run_main
from safetensors import SafetensorError
from test_pretraining import command, corpus, losses_of, run  # noqa: F401 (corpus is a fixture)

from neobert_hf.pretraining.starts import check_held_out, check_start
from neobert_hf.runs import manifests
from neobert_hf.runs.folders import LOCK, last_complete_checkpoint, lock_run

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


FIRST = {"seed": 1, "packing": 2, "data": {"num_documents": 9}, "held_out": {"files": [], "num_held_out": 4}}


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
        ({"packing": None}, "its packing version was 1 and is 2"),
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
    (folder / "checkpoint-8/optimizer.pt").write_bytes(b"damaged")
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
