"""Interrupted runs: the moments, the checks of the files that remain, and the check that the same command then finishes."""

import errno
import itertools
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adversary.machinery import RIGHT, Failed, Outcome, explained, fork_case
from adversary.workbench import Workbench, files_of, losses_of, weights_of

from neobert_hf.runs.folders import last_complete_checkpoint

# The runs to interrupt and the method of the workbench that makes the command; the first four are trainings, which resume.
COMMANDS = {
    "pretraining": "pretrain",
    "pretraining, phase 2": "second_phase",
    "pretraining from a stream": "streaming",
    "contrastive training": "contrastive",
    "tokenizing": "tokenize",
    "the build for the Hub": "hub",
}
TRAININGS = tuple(COMMANDS)[:4]
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run: its folder, its duration, and how often it changed a file."""

    folder: Path
    seconds: float
    num_events: int


def run_references(bench: Workbench) -> dict[str, Reference]:
    """Run each command without an interruption."""
    references = {}
    for name, method in COMMANDS.items():
        folder = bench.folder / f"whole-{method}"
        outcome = bench.finish(_counting(getattr(bench, method)(folder), folder), method)
        references[name] = Reference(folder, outcome.seconds, int(outcome.output.split()[-1]))
    return references


# ---------------------------------------------------------------------------------------- moments


def at_event(command: Callable[[], None], folder: Path, number: int, act: Callable[[str], None]) -> Callable[[], None]:
    """Return a command that calls a function when it opens, renames or removes a file in its folder or next to it.

    Args:
        command: The command; its child processes count their own events.
        folder: Folder of the command.
        number: Number of the event, from 1.
        act: The function to call with the name of the file.
    """

    def run():
        numbers = itertools.count(1)

        def watch(event, args):
            if event in FILE_EVENTS and _changes(event, args, folder) and next(numbers) == number:
                act(str(args[0]))

        sys.addaudithook(watch)
        command()

    return run


def _changes(event: str, args: tuple, folder: Path) -> bool:
    is_read = event == "open" and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    return not is_read and isinstance(args[0], (str, bytes, os.PathLike)) and str(folder.parent) in os.fsdecode(args[0])


def _counting(command, folder):
    def run():
        count = []
        sys.addaudithook(lambda e, args: count.append(e) if e in FILE_EVENTS and _changes(e, args, folder) else None)
        command()
        print(len(count))

    return run


def kill(delay: float) -> Callable[[str], None]:
    """Return a function that sends SIGKILL to its own process after `delay` seconds."""

    def act(_):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start() if delay else os.kill(os.getpid(), signal.SIGKILL)

    return act


def run_out_of_space(file: str) -> None:
    """Raise the error of a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)


def with_file_limit(command: Callable[[], None], limit: int) -> Callable[[], None]:
    """Return a command that cannot write files above `limit` bytes; the limit also holds in libraries in C and Rust."""

    def run():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        command()

    return run


# ---------------------------------------------------------------------------------------- after the interruption


def start_again(bench: Workbench, name: str, folder: Path, wrap=lambda command: command, **options) -> Outcome:
    """Run the command again; a training resumes from its last checkpoint, or starts again if it has none."""
    make = getattr(bench, COMMANDS[name])
    if name in TRAININGS and folder.exists():
        command = make(folder, resume_from_checkpoint="last", **options)
        outcome = fork_case(wrap(command), folder.with_name("resumed"))
        if outcome.status != 1 or "start without --resume_from_checkpoint" not in outcome.message:
            return outcome
    return fork_case(wrap(make(folder, **options)), folder.with_name("again"))


def check_no_partial_file_counts_as_complete(name: str, folder: Path, reference: Reference) -> None:
    """Check that files that count as complete equal the files of the uninterrupted run."""
    if name in TRAININGS and folder.exists():
        checkpoint = last_complete_checkpoint(folder)
        if checkpoint and not _same_weights(checkpoint, reference.folder / checkpoint.name):
            raise Failed(f"partial: {checkpoint.name} counts as complete, but its weights differ")
    if name == "tokenizing" and (folder / "manifest.json").exists():
        check_result(name, folder, reference)
    if (
        name == "the build for the Hub"
        and (folder / "README.md").exists()
        and not _same_weights(folder, reference.folder)
    ):
        raise Failed("partial: the folder has a model card, but its weights are missing or differ")


def finish(bench: Workbench, name: str, folder: Path, reference: Reference, **options) -> str:
    """Run the command to its end and check the result; a build may refuse a folder that holds a part of an earlier build."""
    outcome = start_again(bench, name, folder, **options)
    if outcome.status and name == "the build for the Hub":
        return explained(outcome, str(folder))
    if outcome.status:
        raise Failed(f"cannot resume: the next run ended with status {outcome.status}: {outcome.message}")
    check_result(name, folder, reference)
    return RIGHT


def check_result(name: str, folder: Path, reference: Reference) -> None:
    """Check that the result equals the uninterrupted run bitwise."""
    if name == "tokenizing":
        found, expected = (
            {
                file: digest
                for file, digest in files_of(f).items()
                if ("ids/" in file and ".ds" in file) or file == "manifest.json"
            }
            for f in (folder, reference.folder)
        )
        if found != expected:
            raise Failed(f"silently wrong: {sorted(set(found.items()) ^ set(expected.items()))} differ")
        return
    if not _same_weights(folder, reference.folder):
        raise Failed("silently wrong: the weights differ")
    if "pretraining" in name and losses_of(folder) != losses_of(reference.folder):
        raise Failed("silently wrong: the losses in metrics.jsonl differ")


def _same_weights(folder: Path, other: Path) -> bool:
    try:
        return weights_of(folder) == weights_of(other)
    except Exception:  # safetensors raises several types for a partial file
        return False


def draw_moment(rng: random.Random, reference: Reference) -> tuple[int, float]:
    """Draw the number of a file event, and the seconds after it."""
    return rng.randint(1, reference.num_events), rng.choice((0.0, 0.0, rng.uniform(0, 0.05)))
