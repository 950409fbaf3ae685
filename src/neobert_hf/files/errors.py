"""Errors of commands on one line, also where torch and transformers are not installed.

Exit status 2 is for a wrong command line, 1 for every other error that the user can correct, 130 for Ctrl-C. A bug shows its
traceback; `NEOBERT_TRACEBACK=1` shows the traceback of every error.
"""

import os
import re
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from .terminal import as_typed, printable


def correctable() -> tuple[type[BaseException], ...]:
    """Return the errors that a user can correct: a value, a file, a missing package, a loss that is not finite, little memory.

    There are none if the user asks for tracebacks.
    """
    if os.environ.get("NEOBERT_TRACEBACK") == "1":
        return ()
    of_torch = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)  # only what has imported torch raises it
    return (ValueError, OSError, ImportError, FloatingPointError, *filter(None, [of_torch]))


def run_command(prog: str, command: Callable[..., Any], *args: Any, extra: str = "") -> Any:
    """Call a command; an error that its user can correct ends the process with one line, and status 1.

    Args:
        prog: Name of the command, the first word of the line.
        command: The function to call.
        args: Its arguments.
        extra: The extra of this package that the command needs; a missing module that it has is installed by it.
    """
    try:
        return command(*args)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of the output has ended, as in `neobert tokenize ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the output once more at exit
        raise SystemExit(141) from None  # status of a process that SIGPIPE ends
    except correctable() as error:
        raise SystemExit(f"{prog}: {one_line(error, extra)}") from error  # Python prints it and ends with status 1


def one_line(error: object, extra: str = "") -> str:
    """Return the message of an error without line breaks, and how to install a module that is missing.

    Args:
        error: The error, or its message.
        extra: The extra to name if several install the module; by default the first of them.
    """
    text = re.sub(r"^\[Errno \d+\] ", "", " ".join(str(error).split()))
    extras = []
    if isinstance(error, ModuleNotFoundError) and "pip install" not in text:
        extras = _extras_with(error.name or "")
    if "" in extras:
        text += "; install the package with its dependencies: pip install neobert_hf"
    elif extras:
        text += f"; install it: pip install 'neobert_hf[{extra if extra in extras else extras[0]}]'"
    return as_typed(printable(text)) or type(error).__name__  # it may quote a column or a file of other people


def _extras_with(module: str) -> list[str]:
    """The extras of this package that install a module, "" for the package without extras; none if it is not installed."""
    name = module.partition(".")[0].replace("_", "-").lower()
    name = {"sklearn": "scikit-learn"}.get(name, name)
    pattern = re.compile(rf'{re.escape(name)}(?![\w.-])[^;]*(?:; extra == "(.+)")?$', re.IGNORECASE)
    matches = []
    for found in metadata.distributions(name="neobert_hf"):  # also of an editable install
        matches += [pattern.match(requirement.replace("_", "-")) for requirement in found.requires or ()]
    return [match[1] or "" for match in matches if match]
