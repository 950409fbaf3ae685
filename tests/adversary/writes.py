"""Writes that fail at a random file or above a random size: an error explains it; with free space, the command finishes."""

import random
from pathlib import Path

from adversary.interruptions import (
    at_event,
    check_no_partial_file_counts_as_complete,
    check_result,
    finish,
    run_out_of_space,
    run_references,
    start_again,
    with_file_limit,
)
from adversary.machinery import RIGHT, Family, explained
from adversary.workbench import Workbench

COUNTS = {
    "pretraining": 30,
    "pretraining from a stream": 10,
    "contrastive training": 20,
    "tokenizing": 25,
    "the build for the Hub": 15,
}


def prepare(folder: Path) -> tuple[list, dict]:
    """100 cases."""
    bench = Workbench(folder)
    plan = [(f"full disk in {name}", name) for name, count in COUNTS.items() for _ in range(count)]
    return plan, {"bench": bench, "references": run_references(bench)}


def case(_, name: str, rng: random.Random, folder: Path, shared: dict) -> str:
    """Let a write fail, check the files that remain, run the command again."""
    bench, reference = shared["bench"], shared["references"][name]
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


WRITES = Family("writes", prepare, case)
