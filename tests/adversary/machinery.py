"""Draw cases from a seed, run each in a process of its own, and count how it ends: right, explained, or failed.

A `Family` names its kinds of case and how one is run. Everything is imported and prepared once, then each case is a fork: a new
process would import torch and transformers for seconds. Seed, family and number make a case; they draw it again.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
from provenance import provenance
from tabulate import tabulate
from tqdm import tqdm

RIGHT, EXPLAINED, FAILED = "right", "explained", "failed"
CASE_SECONDS = 300  # a case that takes longer is a hang
ORPHAN_SECONDS = 10  # what a command started ends that soon after it


class Failed(Exception):
    """A wrong result in silence, or a bug: a traceback, a hang, an orphan, a partial file taken for whole."""


@dataclass(frozen=True)
class Family:
    """Cases of one sort.

    Attributes:
        name: By which a case is found again.
        prepare: From a folder to (the cases of a full run, what all of them share), before the first case forks. A case is
            (kind, what it is about): the kind is its row in the table.
        case: From (kind, what it is about, random numbers, a folder of its own, what is shared) to RIGHT or EXPLAINED; raises
            `Failed`.
    """

    name: str
    prepare: Callable[[Path], tuple[list[tuple[str, Any]], Any]]
    case: Callable[[str, Any, random.Random, Path, Any], str]


@dataclass(frozen=True)
class Verdict:
    """How a case ended."""

    family: str
    number: int
    kind: str
    result: str
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        status: Its exit status; minus the signal that ended it.
        output: What it printed.
        errors: What it wrote to standard error.
        seconds: How long it took.
    """

    status: int
    output: str
    errors: str
    seconds: float

    @property
    def message(self) -> str:
        """The last line of standard error."""
        return (self.errors.strip().splitlines() or [""])[-1]


# ---------------------------------------------------------------------------------------- one command


def fork_case(function: Callable[[], Any], log: Path, timeout: float = 90, kill_after: float | None = None) -> Outcome:
    """Call the function in a fork, as the main function of a command, and wait for it and all that it starts.

    Args:
        function: What to call; SystemExit and errors end the fork as they end a Python process.
        log: Where its output goes: `.out` and `.err` are added to the name.
        timeout: Seconds after which it hangs.
        kill_after: Seconds after which SIGKILL ends it.

    Raises:
        Failed: It hangs, or a process that it started lives on.
    """
    pid, begin = _fork(function, log), time.monotonic()
    is_hung = False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        seconds = time.monotonic() - begin
        if kill_after is not None and seconds >= kill_after:
            os.kill(pid, signal.SIGKILL)
        elif seconds >= timeout and not is_hung:
            is_hung = True
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.002)
    output, errors = (Path(f"{log}{end}").read_text("utf-8", "replace") for end in (".out", ".err"))
    outcome = Outcome(os.waitstatus_to_exitcode(status), output, errors, time.monotonic() - begin)
    orphans = _end_group(pid)
    if is_hung:
        raise Failed(f"hang: not at its end after {timeout} s; {outcome.message}")
    if orphans:
        raise Failed(f"orphans: {orphans} processes lived for {ORPHAN_SECONDS} s after the command")
    return outcome


def _fork(function: Callable[[], Any], log: Path) -> int:
    """Call the function in a fork that leads a process group; returns the process's id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run_and_exit(function, log)
    with contextlib.suppress(OSError):  # here as well as there, whoever is first; it may have ended
        os.setpgid(pid, pid)
    return pid


def _run_and_exit(function: Callable[[], Any], log: Path) -> NoReturn:
    status = 0
    # All processes share tqdm's lock, and one that is killed while it holds the lock would stop every later one.
    lock, classes = threading.RLock(), [tqdm]
    for each in classes:  # a subclass may have the shared one
        each.set_lock(lock)
        classes += each.__subclasses__()
    try:
        os.setpgid(0, 0)
        for number, end in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(f"{log}{end}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        sys.stdin = open(os.devnull)  # noqa: SIM115 (for as long as the process)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        function()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _end_group(group: int) -> int:
    """Wait for the processes of a group, then end those that are left; returns their number."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while left := _members(group):
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)
            return len(left)
        time.sleep(0.05)
    return 0


def _members(group: int) -> list[int]:
    try:
        os.killpg(group, 0)  # the quick answer, where there is none
    except ProcessLookupError:
        return []
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


def explained(outcome: Outcome, *names: str) -> str:
    """EXPLAINED, if the command ended as one with an error that its user can mend ends.

    Args:
        outcome: How it ended.
        names: What its message must name, such as a file or an argument; any case.
    """
    if "Traceback (most recent call last)" in outcome.errors:
        raise Failed(f"bug: a traceback, {outcome.message}")
    if outcome.status not in (1, 2):
        raise Failed(f"bug: exit status {outcome.status}, {outcome.message}")
    if not re.match(r"[\w./ -]+: \S", outcome.message):
        raise Failed(f"unexplained: the last line of the errors is {outcome.message!r}")
    if missing := [name for name in names if name.lower() not in outcome.message.lower()]:
        raise Failed(f"unexplained: {', '.join(missing)} is not in {outcome.message!r}")
    return EXPLAINED


# ---------------------------------------------------------------------------------------- many cases


def draw(seed: str, family: str, number: int) -> random.Random:
    """The random numbers of a case."""
    return random.Random(f"{seed} {family} {number}")


def run_family(
    family: Family, seed: str, folder: Path, share: float = 1.0, only: int | None = None
) -> Iterator[Verdict]:
    """Run cases, as many at once as there are cores to use.

    Args:
        family: What to run.
        seed: What the cases are drawn from.
        folder: An empty one; what failed stays there.
        share: Of a full run; each kind has a case at least.
        only: The number of the one case to run.
    """
    plan, shared = family.prepare(folder)
    waiting = _choose(plan, random.Random(f"{seed} {family.name}"), share) if only is None else [only]
    running = {}
    while waiting or running:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            number = waiting.pop()
            home = folder / f"case-{number}"
            home.mkdir()
            judge = partial(_judge, family, draw(seed, family.name, number), home, plan[number], shared)
            running[_fork(judge, home / "case")] = (number, home)
        pid, status = os.wait()
        number, home = running.pop(pid)
        kind, _ = plan[number]
        if (home / "verdict.json").exists():
            found = json.loads((home / "verdict.json").read_text())
        else:
            reason = (home / "case.err").read_text("utf-8", "replace").strip().splitlines()[-1:]
            found = {"result": FAILED, "note": f"bug: status {os.waitstatus_to_exitcode(status)}, {reason}"}
        verdict = Verdict(family.name, number, kind, **found)
        if verdict.result != FAILED:
            shutil.rmtree(home)
        yield verdict


def _choose(plan: list[tuple[str, Any]], rng: random.Random, share: float) -> list[int]:
    """Numbers of cases: one of each kind, and others until there are enough."""
    numbers, firsts = list(range(len(plan))), {}
    rng.shuffle(numbers)
    for number in numbers:
        firsts.setdefault(plan[number][0], number)
    others = [number for number in numbers if number not in firsts.values()]
    return [*firsts.values(), *others[: max(0, round(share * len(plan)) - len(firsts))]]


def _judge(family: Family, rng: random.Random, home: Path, case: tuple[str, Any], shared: Any) -> None:
    signal.alarm(CASE_SECONDS)
    note = ""
    try:
        result = family.case(*case, rng, home, shared)
    except Failed as reason:
        result, note = FAILED, str(reason)
    (home / "verdict.json").write_text(json.dumps({"result": result, "note": note}))


def table(verdicts: list[Verdict]) -> str:
    """One row for each kind of case: how many there were, and how they ended."""
    return tabulate(rows(verdicts), headers="keys", tablefmt="github")


def rows(verdicts: list[Verdict]) -> list[dict]:
    """What the table shows."""
    counts = {}
    for verdict in verdicts:
        counts.setdefault(verdict.kind, Counter())[verdict.result] += 1
    counts["all"] = sum(counts.values(), Counter())
    return [
        {
            "kind of case": kind,
            "cases": sum(found.values()),
            **{name: found[name] for name in (RIGHT, EXPLAINED, FAILED)},
        }
        for kind, found in counts.items()
    ]


def failures(verdicts: list[Verdict]) -> list[str]:
    """A line for each case that failed, with what draws it again."""
    return [f"{v.family} {v.number} ({v.kind}): {v.note}" for v in verdicts if v.result == FAILED]


def to_json(verdicts: list[Verdict], seed: str, seconds: float) -> str:
    """The same for a page of the documentation."""
    failed = [asdict(verdict) for verdict in verdicts if verdict.result == FAILED]
    found = {"seed": seed, "seconds": round(seconds), **provenance(), "rows": rows(verdicts), "failed": failed}
    return json.dumps(found, indent=1)
