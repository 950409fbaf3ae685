"""SIGKILL at random moments: the same command then finishes, and its result equals an uninterrupted run bitwise."""

import random
import shutil
import signal
from pathlib import Path

from adversary.interruptions import (
    COMMANDS,
    TRAININGS,
    at_event,
    check_no_partial_file_counts_as_complete,
    draw_moment,
    finish,
    kill,
    run_references,
    start_again,
)
from adversary.machinery import Family, explained, fork_case
from adversary.workbench import Workbench

COUNTS = {
    "pretraining": 30,
    "pretraining, phase 2": 15,
    "pretraining from a stream": 15,
    "contrastive training": 20,
    "tokenizing": 30,
    "the build for the Hub": 10,
}


def prepare(folder: Path) -> tuple[list, dict]:
    """120 cases, each with one or two kills."""
    bench = Workbench(folder)
    plan = [(f"kill in {name}", name) for name, count in COUNTS.items() for _ in range(count)]
    return plan, {"bench": bench, "references": run_references(bench)}


def case(_, name: str, rng: random.Random, folder: Path, shared: dict) -> str:
    """Kill the command, check the files that remain, run the command again."""
    bench, reference = shared["bench"], shared["references"][name]
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
    if name in TRAININGS and any(out.glob("checkpoint-*/trainer_state.json")):
        options = options | {"resume_from_checkpoint": "last"}
    return fork_case(command(out, **options), out.with_name("killed"), kill_after=seconds)


KILLS = Family("kills", prepare, case)
