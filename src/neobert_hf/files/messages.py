"""What a job tells the person who runs it: lines on the standard output of its first process."""

import logging
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .terminal import as_typed, printable

logger = logging.getLogger(__name__)
SHOWN = 10  # names in a message
_is_silent = False  # inside of `silence`


def is_first_process() -> bool:
    """Return whether this is the first process of a run, as launchers number them."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Tell a text in the first process, each of its lines without what controls a terminal."""
    if is_first_process() and not _is_silent:
        print("\n".join(as_typed(printable(line)) for line in text.split("\n")), flush=True)  # noqa: T201  (the one place that prints)


def warn(text: str) -> None:
    """Tell a warning; inside of `silence`, the logger of the library writes it to the standard error."""
    say(f"warning: {text}")
    if is_first_process() and _is_silent:
        logger.warning(printable(text))


def first_of(names: Iterable[object], separator: str = ", ") -> str:
    """Return the first ten names as one text, and how many more there are."""
    shown = list(map(str, names))
    num_more = len(shown) - SHOWN
    if num_more > 0:
        shown[SHOWN:] = [f"and {num_more:,} more"]
    return separator.join(shown)


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Return a sentence with the beginnings of both values for each value of two records that differs, by its name."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [f"{name} was {before!s:.80} and is {now!s:.80}"] * (before != now)
    found = []
    for key in sorted({*before, *now}):
        found += differences(before.get(key), now.get(key), f"{name}.{key}".removeprefix("."))
    return found


def say_next(*commands: Sequence[object]) -> None:
    """Tell commands that may follow, each as a list of words, in the form in which a shell takes them."""
    say("\n".join(["next:", *(f"  {shlex.join(map(str, command))}" for command in commands)]))


@contextmanager
def silence(is_silent: bool = True) -> Iterator[None]:
    """Leave out what `say` tells."""
    global _is_silent
    before = _is_silent
    _is_silent = before or is_silent
    try:
        yield
    finally:
        _is_silent = before
