"""What of the text of somebody else may reach a terminal."""

import io
import logging
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stdout

LINE_ENDS = re.compile(r"\r\n|[\t\n\v\f\r\x85\u2028\u2029]")
# ECMA-48: ESC or one C1 character begins a sequence. A sequence without its end loses its beginning only, so no text is hidden.
CONTROLS = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor, clearing the screen
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x00-\x1f\x7f-\x9f]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS: titles, links, clipboard
    r"|\x1b[ -/]*[0-~]"  # other escape sequences: reset, character sets
    r"|[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"  # C0, DEL, C1, and bidi overrides
)
_options: Collection[str] = ()  # names of the options of the command that runs
LONE_SURROGATES = re.compile("[\ud800-\udfff]")  # of file names that are not UTF-8; some terminals get their raw bytes


@contextmanager
def naming(options: Collection[str]) -> Iterator[None]:
    """Let messages name arguments as one types them on a command line that has these options: --skip_bad_rows."""
    global _options
    _options = options
    try:
        yield
    finally:
        _options = ()


def as_typed(text: str) -> str:
    """Return a message with `--` before the names that contain _ or have a value, inside of `naming`."""
    if not _options:
        return text
    name = rf"(?=\w+_|\w+=)(?:{'|'.join(_options)})"
    return re.sub(rf"(?<![\w./'\"-]){name}(?![\w/'\"-]|\.\w)", r"--\g<0>", text)


def printable(text: str) -> str:
    """Return the text of somebody else as one line that cannot control a terminal or reorder what stands around it.

    Control characters, escape sequences and bidi overrides are removed. A line end or a tab becomes a space, half of a
    surrogate pair the character U+FFFD. All other characters stay.
    """
    return LONE_SURROGATES.sub("\ufffd", CONTROLS.sub("", LINE_ENDS.sub(" ", text)))


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what libraries print and warn of while they load and export a model; errors pass."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
