"""Draw cases from a seed, run each case in its own process, and count the results: right, explained or failed.

A `Family` is a list of cases and the function that runs them. This process imports and prepares everything once and forks for
each case: a new process would need seconds to import torch and transformers. The seed, the family and the number of a case
reproduce it.
"""

import contextlib
import itertools
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
from tqdm import tqdm

RIGHT, EXPLAINED, FAILED = "right", "explained", "failed"
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
CASE_SECONDS = 300  # a case that takes longer is a hang
ORPHAN_SECONDS = 10  # the child processes of a command must end within this time after it


class Failed(Exception):
    """A wrong result without an error, or a bug: a traceback, a hang, an orphan, a partial file that counts as complete."""


@dataclass(frozen=True)
class Family:
    """Cases of one type; `prepare` returns them as (kind, subject), with what they share, and `case` runs one of them."""

    name: str
    prepare: Callable[[Any], tuple[list[tuple[str, Any]], Any]]
    case: Callable[[str, Any, random.Random, Path, Any], str]


@dataclass(frozen=True)
class Verdict:
    family: str
    number: int
    kind: str
    result: str
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """The end of a command; the status is the negative number of a signal that ended it."""

    status: int
    output: str
    errors: str
    seconds: float

    @property
    def message(self) -> str:
        return (self.errors.strip().splitlines() or [""])[-1]


def fork_case(function: Callable[[], Any], log: Path, timeout: float = 90, kill_after: float | None = None) -> Outcome:
    """Call the main function of a command in a fork, and wait for the fork and its child processes.

    Its output goes to `log`.out and `log`.err. SIGKILL ends it after `kill_after` seconds. A command that runs for `timeout`
    seconds, or whose child processes run on, has failed.
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
        raise Failed(f"hang: still running after {timeout} s; {outcome.message}")
    if orphans:
        raise Failed(f"orphans: {orphans} child processes still ran {ORPHAN_SECONDS} s after the command")
    return outcome


def _fork(function: Callable[[], Any], log: Path) -> int:
    """Call the function in a fork that leads a process group; return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run_and_exit(function, log)
    # both processes call setpgid, since either may run first; the child may have ended
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return pid


def _run_and_exit(function: Callable[[], Any], log: Path) -> NoReturn:
    status = 0
    # All forks share tqdm's lock: a process that is killed while it holds the lock would block all later ones.
    lock, classes = threading.RLock(), [tqdm]
    for each in classes:  # a subclass may hold the shared lock
        each.set_lock(lock)
        classes += each.__subclasses__()
    try:
        os.setpgid(0, 0)
        for number, end in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(f"{log}{end}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        sys.stdin = open(os.devnull)  # noqa: SIM115 (open until the process ends)
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
    """Wait for the processes of a group, kill the processes that still run, and return their number.

    One may stay: the idle process of datatrove's counters, after a SIGKILL of a command that tokenizes (docs/limits.md).
    """
    deadline = time.monotonic() + ORPHAN_SECONDS
    while len(left := _members(group)) > 1:
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)
            return len(left)
        time.sleep(0.05)
    if left:
        os.killpg(group, signal.SIGKILL)
    return 0


def _members(group: int) -> list[int]:
    try:
        os.killpg(group, 0)  # fast, if no process of the group exists
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


def at_event(command: Callable[[], None], folder: Path, number: int, act: Callable[[str], None]) -> Callable[[], None]:
    """Return a command that calls `act` with a file, when it opens, renames or removes one in its folder, the `number`th time.

    Its child processes count their own events.
    """

    def run():
        numbers = itertools.count(1)
        watch(folder, lambda file: act(file) if next(numbers) == number else None)
        command()

    return run


def watch(folder: Path, act: Callable[[str], None]) -> None:
    """From now on, call `act` with each file in the folder or next to it that this process changes."""
    sys.addaudithook(lambda event, args: act(str(args[0])) if _changes(event, args, folder) else None)


def _changes(event: str, args: tuple, folder: Path) -> bool:
    if event not in FILE_EVENTS:
        return False
    is_read = event == "open" and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    return not is_read and isinstance(args[0], (str, bytes, os.PathLike)) and str(folder.parent) in os.fsdecode(args[0])


def counting_events(command: Callable[[], None], folder: Path) -> Callable[[], None]:
    """Return the command, which prints the number of such events as its last line."""

    def run():
        count = []
        watch(folder, count.append)
        command()
        print(len(count))

    return run


def explained(outcome: Outcome, *names: str) -> str:
    """Return EXPLAINED if the command ended with one line for its user, which contains the names in any case; else raise."""
    if "Traceback (most recent call last)" in outcome.errors:
        raise Failed(f"bug: traceback: {outcome.message}")
    if outcome.status not in (1, 2):
        raise Failed(f"bug: exit status {outcome.status}, {outcome.message}")
    if not re.match(r"[\w./ -]+: \S", outcome.message):
        raise Failed(f"unexplained: the last line of standard error is {outcome.message!r}")
    if missing := [name for name in names if name.lower() not in outcome.message.lower()]:
        raise Failed(f"unexplained: {', '.join(missing)} is not in {outcome.message!r}")
    return EXPLAINED


def draw(seed: str, family: str, number: int) -> random.Random:
    return random.Random(f"{seed} {family} {number}")


def run_family(
    family: Family, bench: Any, seed: str, folder: Path, share: float = 1.0, only: int | None = None
) -> Iterator[Verdict]:
    """Run a share of the cases, at least one of each kind, or only one by its number; one per available core at a time.

    The files of failed cases stay in the folder, which is TMP in the note of a verdict.
    """
    plan, shared = family.prepare(bench)
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
        found["note"] = found["note"].replace(str(folder), "TMP")
        verdict = Verdict(family.name, number, kind, **found)
        if verdict.result != FAILED:
            shutil.rmtree(home)
        yield verdict


def _choose(plan: list[tuple[str, Any]], rng: random.Random, share: float) -> list[int]:
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


def report(verdicts: list[Verdict], seed: str, seconds: float) -> dict:
    """One row for each kind of case, with the number of cases and of each result, and the failed cases."""
    counts = {}
    for verdict in verdicts:
        counts.setdefault(verdict.kind, Counter())[verdict.result] += 1
    counts["all"] = sum(counts.values(), Counter())
    rows = [
        {"kind of case": kind, "cases": sum(found.values())}
        | {name: found[name] for name in (RIGHT, EXPLAINED, FAILED)}
        for kind, found in counts.items()
    ]
    failed = [asdict(verdict) for verdict in verdicts if verdict.result == FAILED]
    return {"seed": seed, "seconds": round(seconds), **provenance(), "rows": rows, "failed": failed}
