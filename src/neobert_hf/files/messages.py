"""What a job tells the person who runs it: lines on the standard output, by the logger `neobert_hf.messages`."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from .texts import printable


class _Output(logging.StreamHandler[TextIO]):
    """Writes to the standard output of the moment, which a notebook or a test may have replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # nothing sets it
        return sys.stdout


_logger = logging.getLogger("neobert_hf.messages")
_logger.setLevel(logging.INFO)
_logger.propagate = False
_logger.addHandler(_Output())


def say(text: str) -> None:
    """Tell a text, each of its lines without what controls a terminal; nothing inside of `silence`."""
    _logger.info("\n".join(map(printable, text.split("\n"))))


@contextmanager
def silence(is_silent: bool = True) -> Iterator[None]:
    """Leave out all that `say` tells; warnings and errors stay."""
    level = _logger.level
    _logger.setLevel(logging.WARNING if is_silent else level)
    try:
        yield
    finally:
        _logger.setLevel(level)
