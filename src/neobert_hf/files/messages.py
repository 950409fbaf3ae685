"""What a job tells the person who runs it: lines on the standard output of its first process."""

import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .terminal import printable

logger = logging.getLogger(__name__)
_is_silent = False  # inside of `silence`


def is_first_process() -> bool:
    """Return whether this is the first process of a run, as launchers number them."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Tell a text in the first process, each of its lines without what controls a terminal."""
    if is_first_process() and not _is_silent:
        print("\n".join(map(printable, text.split("\n"))), flush=True)  # noqa: T201  (the one place that prints)


def warn(text: str) -> None:
    """Tell a warning; inside of `silence`, the logger of the library writes it to the standard error."""
    say(f"warning: {text}")
    if is_first_process() and _is_silent:
        logger.warning(printable(text))


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
