"""Commands that SIGKILL or a failed write interrupts: the same command then finishes as if it had never been interrupted."""

import errno
import os
import random
import re
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from adversary.machinery import RIGHT, Failed, Family, Outcome, at_event, explained, fork_case
from adversary.workbench import COMMANDS, TRAININGS, Reference, Workbench, losses_of, weights_of
from conftest import contents

from neobert_hf.runs import last_complete_checkpoint

NUM_KILLS = dict(zip(COMMANDS, (30, 15, 15, 20, 30, 10)))
NUM_WRITES = dict(zip(COMMANDS, (30, 0, 10, 20, 25, 15)))


def kill(delay: float) -> Callable[[str], None]:
    """Return a function that sends SIGKILL to the command after `delay` seconds.

    That is the first process of its group: without a worker that is killed alone, datatrove waits for ever (docs/limits.md).
    """

    def act(_):
        timer = threading.Timer(delay, os.kill, (os.getpgid(0), signal.SIGKILL))
        timer.daemon = True
        timer.start() if delay else os.kill(os.getpgid(0), signal.SIGKILL)

    return act


def run_out_of_space(file: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)


def with_file_limit(command: Callable[[], None], limit: int) -> Callable[[], None]:
    """Return a command that cannot write files above `limit` bytes; the limit also holds in libraries in C and Rust."""

    def run():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        command()

    return run


def start_again(bench: Workbench, name: str, folder: Path, wrap=lambda command: command, **options) -> Outcome:
    """Run the command again; a training resumes from its last checkpoint, or starts again if it has none."""
    return fork_case(wrap(getattr(bench, COMMANDS[name])(folder, **options)), folder.with_name("again"))


def check_no_partial_file_counts_as_complete(name: str, folder: Path, reference: Reference) -> None:
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
    if name == "tokenizing":
        found, expected = (
            {file: content for file, content in contents(each).items() if re.match(r"ids/.*\.ds|manifest.json$", file)}
            for each in (folder, reference.folder)
        )
        if found != expected:
            differ = [file for file in {*found, *expected} if found.get(file) != expected.get(file)]
            raise Failed(f"silently wrong: {sorted(differ)} differ")
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
    return rng.randint(1, reference.num_events), rng.choice((0.0, 0.0, rng.uniform(0, 0.05)))


def kill_case(_, name: str, rng: random.Random, folder: Path, bench: Workbench) -> str:
    reference = bench.references[name]
    out = folder / "out"
    options = {"documents_dir": None} if "pretraining" in name and rng.random() < 0.3 else {}  # tokenizing first
    num_kills, kills = rng.choice((1, 1, 2)), 0
    while kills < num_kills:
        outcome = _killed(bench, name, out, rng, reference, options)
        check_no_partial_file_counts_as_complete(name, out, reference)
        if outcome.status == 0 and kills:  # the command ended before the kill
            break
        if outcome.status == 0:
            shutil.rmtree(out)
            continue
        kills += 1
        if outcome.status != -signal.SIGKILL:  # the signal killed a child process, and the command reported it
            explained(outcome)
    return finish(bench, name, out, reference, **options)


def _killed(bench, name, out, rng, reference, options):
    if rng.random() < 0.5:
        number, delay = draw_moment(rng, reference)
        return start_again(bench, name, out, lambda command: at_event(command, out, number, kill(delay)), **options)
    seconds = rng.uniform(0.02, reference.seconds)
    command = getattr(bench, COMMANDS[name])
    return fork_case(command(out, **options), out.with_name("killed"), kill_after=seconds)


def write_case(_, name: str, rng: random.Random, folder: Path, bench: Workbench) -> str:
    reference = bench.references[name]
    out = folder / "out"
    if rng.random() < 0.5:
        number = rng.randint(1, reference.num_events)
        outcome = start_again(bench, name, out, lambda command: at_event(command, out, number, run_out_of_space))
    else:
        largest = max(file.stat().st_size for file in reference.folder.rglob("*") if file.is_file())
        limit = round(2 ** rng.uniform(14, largest.bit_length()))  # above the size of the printed output
        outcome = start_again(bench, name, out, lambda command: with_file_limit(command, limit))
    check_no_partial_file_counts_as_complete(name, out, reference)
    if outcome.status == 0:  # the command did not need the write that failed
        check_result(name, out, reference)
        return RIGHT
    result = explained(outcome)
    finish(bench, name, out, reference)
    return result


def plan(kind: str, counts: dict[str, int]) -> Callable[[Workbench], tuple[list, Workbench]]:
    def prepare(bench):
        cases = [(f"{kind} {name}", name) for name in bench.references for _ in range(counts.get(name, 0))]
        return cases, bench

    return prepare


KILLS = Family("kills", plan("kill in", NUM_KILLS), kill_case)
WRITES = Family("writes", plan("full disk in", NUM_WRITES), write_case)
