"""One of two training processes is killed: the other ends too, and a run on two processes resumes to the right result."""

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import launch
import pretrain_mlm
from adversary.interruptions import check_no_partial_file_counts_as_complete, check_result
from adversary.machinery import RIGHT, Failed, Family, fork_case
from adversary.workbench import Reference, Workbench

KIND = "kill of one of two processes"


def prepare(bench: Workbench) -> tuple[list, dict]:
    """12 cases."""
    assert bench.references
    whole = bench.folder / "whole-on-two"
    outcome = bench.finish(on_two(bench, whole), "ranks")
    return [(KIND, None)] * 12, {"bench": bench, "reference": Reference(whole, outcome.seconds, 0)}


def on_two(bench: Workbench, folder: Path, **changes) -> Callable[[], None]:
    """Return a command that runs examples/pretrain_mlm.py on two processes, as torchrun does."""
    argv = ["launch.py", pretrain_mlm.__file__, *bench.pretrain(folder, **changes).args[1]]
    return partial(_launch, argv)


def _launch(argv):
    sys.argv = argv
    launch.main()


def case(_, about, rng: random.Random, folder: Path, shared: dict) -> str:
    """Kill a rank at a random moment, then resume on two processes."""
    bench, reference, out = shared["bench"], shared["reference"], folder / "out"
    rank, seconds = rng.randrange(2), rng.uniform(0.1, reference.seconds)

    def kill_one():
        work = launch.work

        def work_until_killed(own, *args):
            if own == rank:
                timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
                timer.daemon = True
                timer.start()
            work(own, *args)

        launch.work = work_until_killed
        on_two(bench, out)()

    outcome = fork_case(kill_one, folder / "killed")
    check_no_partial_file_counts_as_complete("pretraining", out, reference)
    if outcome.status and "SIGKILL" not in outcome.errors:
        raise Failed(f"bug: the error does not name the killed process: {outcome.message}")
    outcome = fork_case(on_two(bench, out), folder / "again")
    if outcome.status:
        raise Failed(f"cannot resume: the next run ended with status {outcome.status}: {outcome.message}")
    check_result("pretraining", out, reference)
    return RIGHT


RANKS = Family("ranks", prepare, case)
