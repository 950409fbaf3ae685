"""Runs that end too early: at which moments, what must hold then, and that the same command finishes with the right result."""

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

from neobert_hf.pretraining.runs import last_complete_checkpoint

# What is to be interrupted: the command of the workbench, and whether it is resumed or just run again.
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
    """An uninterrupted run: its folder, how long it took, and how often it changed a file."""

    folder: Path
    seconds: float
    num_events: int


def run_references(bench: Workbench) -> dict[str, Reference]:
    """Each command, to its end."""
    references = {}
    for name, method in COMMANDS.items():
        folder = bench.folder / f"whole-{method}"
        outcome = bench.finish(_counting(getattr(bench, method)(folder), folder), method)
        references[name] = Reference(folder, outcome.seconds, int(outcome.output.split()[-1]))
    return references


# ---------------------------------------------------------------------------------------- moments


def at_event(command: Callable[[], None], folder: Path, number: int, act: Callable[[str], None]) -> Callable[[], None]:
    """The command, with something that happens as it opens, renames or removes a file in its folder or beside it.

    Args:
        command: What to run; the processes that it starts count for themselves.
        folder: Its folder.
        number: Which of these events it is, from 1.
        act: What happens then, with the name of the file.
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
    """SIGKILL to this very process, so many seconds later."""

    def act(_):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start() if delay else os.kill(os.getpid(), signal.SIGKILL)

    return act


def run_out_of_space(file: str) -> None:
    """What the system says of a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)


def with_small_files(command: Callable[[], None], limit: int) -> Callable[[], None]:
    """The command where no file may be larger: the write fails, in libraries of C and Rust too."""

    def run():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        command()

    return run


# ---------------------------------------------------------------------------------------- after it


def start_again(bench: Workbench, name: str, folder: Path, wrap=lambda command: command, **options) -> Outcome:
    """The same command; one that trains goes on from its last checkpoint, or begins anew where there is none."""
    make = getattr(bench, COMMANDS[name])
    if name in TRAININGS and folder.exists():
        command = make(folder, resume_from_checkpoint="last", **options)
        outcome = fork_case(wrap(command), folder.with_name("resumed"))
        if outcome.status != 1 or "start without --resume_from_checkpoint" not in outcome.message:
            return outcome
    return fork_case(wrap(make(folder, **options)), folder.with_name("again"))


def check_nothing_half_is_whole(name: str, folder: Path, reference: Reference) -> None:
    """What passes for whole now is what the uninterrupted run has written."""
    if name in TRAININGS and folder.exists():
        checkpoint = last_complete_checkpoint(folder)
        if checkpoint and not _same_weights(checkpoint, reference.folder / checkpoint.name):
            raise Failed(f"partial: {checkpoint.name} passes for whole")
    if name == "tokenizing" and (folder / "manifest.json").exists():
        check_result(name, folder, reference)
    if (
        name == "the build for the Hub"
        and (folder / "README.md").exists()
        and not _same_weights(folder, reference.folder)
    ):
        raise Failed("partial: the folder has its card and not its weights")


def finish(bench: Workbench, name: str, folder: Path, reference: Reference, **options) -> str:
    """Run the command to its end and compare; a build that finds half a folder may ask for another."""
    outcome = start_again(bench, name, folder, **options)
    if outcome.status and name == "the build for the Hub":
        return explained(outcome, str(folder))
    if outcome.status:
        raise Failed(f"no way on: the next run ended with {outcome.status}: {outcome.message}")
    check_result(name, folder, reference)
    return RIGHT


def check_result(name: str, folder: Path, reference: Reference) -> None:
    """Bitwise the same as without an interruption."""
    if name == "tokenizing":
        found, wanted = (
            {file: digest for file, digest in files_of(f).items() if file.endswith(".arrow") or file == "manifest.json"}
            for f in (folder, reference.folder)
        )
        if found != wanted:
            raise Failed(f"silently wrong: {sorted(set(found.items()) ^ set(wanted.items()))} differ")
        return
    if not _same_weights(folder, reference.folder):
        raise Failed("silently wrong: other weights")
    if "pretraining" in name and losses_of(folder) != losses_of(reference.folder):
        raise Failed("silently wrong: other losses in metrics.jsonl")


def _same_weights(folder: Path, other: Path) -> bool:
    try:
        return weights_of(folder) == weights_of(other)
    except Exception:  # whatever safetensors says of half a file
        return False


def draw_moment(rng: random.Random, reference: Reference) -> tuple[int, float]:
    """(the file event, seconds after it)."""
    return rng.randint(1, reference.num_events), rng.choice((0.0, 0.0, rng.uniform(0, 0.05)))
