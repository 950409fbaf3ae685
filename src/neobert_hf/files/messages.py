"""What a job tells the person who runs it: lines on the standard output, by the logger `neobert_hf.messages`."""

import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from transformers.utils.logging import get_logger

from .terminal import printable

logger = get_logger(__name__)


class _Output(logging.StreamHandler[TextIO]):
    """Writes to the standard output of the moment, which a notebook or a test may have replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # nothing sets it
        return sys.stdout

    def handleError(self, record: logging.LogRecord) -> None:
        """Raise the error of the write, which logging would print and forget."""
        raise


_logger = logging.getLogger("neobert_hf.messages")
_logger.setLevel(logging.INFO)
_logger.propagate = False
_logger.addHandler(_Output())


def is_first_process() -> bool:
    """Return whether this is the first process of a run, as launchers number them."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Tell a text in the first process, each of its lines without what controls a terminal."""
    if is_first_process():
        _logger.info("\n".join(map(printable, text.split("\n"))))


def warn(text: str) -> None:
    """Tell a warning; inside of `silence`, the logger of the library writes it to the standard error."""
    if _logger.isEnabledFor(logging.INFO):
        say(f"warning: {text}")
    elif is_first_process():
        logger.warning(printable(text))


def say_next(*commands: Sequence[object]) -> None:
    """Tell commands that may follow, each as a list of words, in the form in which a shell takes them."""
    say("\n".join(["next:", *(f"  {shlex.join(map(str, command))}" for command in commands)]))


@contextmanager
def silence(is_silent: bool = True) -> Iterator[None]:
    """Leave out what `say` tells."""
    level = _logger.level
    _logger.setLevel(logging.WARNING if is_silent else level)
    try:
        yield
    finally:
        _logger.setLevel(level)
