"""Shared by all scripts: dataclasses as a command line with a short `--help`, and errors on one line.

Exit status 2 is for a wrong command line, 1 for every other error that the user can correct, 130 for Ctrl-C. A bug shows its
traceback; `NEOBERT_TRACEBACK=1` shows the traceback of every error.
"""

import argparse
import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import metadata
from inspect import get_annotations
from typing import Any, NoReturn

from transformers.hf_argparser import HfArgumentParser, string_to_bool

try:
    from torch import OutOfMemoryError
except ImportError:  # hidden by `neobert doctor`, which computes nothing
    OutOfMemoryError = MemoryError

# Errors that a user can correct: a value, a file, a missing package, a loss that is not finite, a device with too little memory.
CORRECTABLE = (ValueError, OSError, ImportError, FloatingPointError, OutOfMemoryError)
LIBRARIES = ("transformers", "sentence_transformers")  # --help_all lists their arguments
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", string_to_bool: "BOOL"}


class CommandParser(HfArgumentParser):
    """HfArgumentParser whose errors are one line, and whose `--help` leaves out the arguments that a library declares.

    An error that the dataclasses raise is an error of the command line as well: one line, exit status 2. The help has one group
    for each dataclass, titled by its docstring. `--help_all` lists the arguments of transformers and sentence-transformers too.

    Args:
        dataclass_types: A dataclass, or several.
        kwargs: Of `argparse.ArgumentParser`; the description keeps its line breaks.
    """

    def __init__(self, dataclass_types, **kwargs):
        types = [dataclass_types] if is_dataclass(dataclass_types) else list(dataclass_types)
        for dataclass_type in types:
            dataclass_type._argument_group_name = (dataclass_type.__doc__ or "").partition("\n")[0].partition(".")[0]
        defaults = {"formatter_class": _HelpFormatter, "usage": "%(prog)s --ARGUMENT VALUE ..."}
        super().__init__(types, **defaults | kwargs)
        helps = {name: text for dataclass_type in types for name, text in _helps(dataclass_type).items()}
        for action in self._actions:
            action.help = action.help or helps.get(action.dest)
            action.metavar = METAVARS.get(action.type, action.metavar)
        self.library_names = {name for dataclass_type in types for name in _library_names(dataclass_type)}
        if self.library_names:
            self.add_argument(
                "--help_all", action="help", help="Show these arguments and those of the library, then exit."
            )
            self.epilog = "All arguments of the library's TrainingArguments are accepted too; --help_all lists them."

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's; an unknown argument is an error that suggests a known one, before one that is missing."""
        args = sys.argv[1:] if args is None else list(args)
        if "" in args:
            self.error("an argument is an empty string; leave it out, or give it a value")
        for action in self._actions:
            is_opposite = action.nargs == 0 and action.const is False  # --no_NAME beside --NAME
            if is_opposite or (action.dest in self.library_names and "--help_all" not in args):
                action.help = argparse.SUPPRESS
        known = [name for action in self._actions for name in action.option_strings]
        names = [word.partition("=")[0] for word in args if word.startswith("--")]
        unknown = [name for name in names if not any(option.startswith(name) for option in known)]
        if not unknown:
            namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            close = difflib.get_close_matches(unknown[0], known, n=1)
            self.error(f"unknown argument {unknown[0]}" + "".join(f"; did you mean {name}?" for name in close))
        return namespace, unknown

    def parse_args_into_dataclasses(self, *args, **kwargs) -> tuple:
        """As HfArgumentParser's."""
        try:
            return super().parse_args_into_dataclasses(*args, **kwargs)
        except CORRECTABLE as error:
            if os.environ.get("NEOBERT_TRACEBACK") == "1":
                raise
            self.error(one_line(error))

    def error(self, message: str) -> NoReturn:
        """End with one line, without the usage that argparse prints before it, and status 2."""
        self.exit(2, f"{self.prog}: error: {message}; --help lists the arguments\n")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One spelling of an argument, and its default if it has one."""

    def _format_action_invocation(self, action):
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{action.option_strings[0]} {self._format_args(action, action.dest.upper())}"

    def _get_help_string(self, action):
        if action.required:
            return f"{action.help or ''} (required)"
        is_shown = action.default not in (None, "", [], False, argparse.SUPPRESS)
        return f"{action.help or ''} (default: %(default)s)" if is_shown else action.help


def _helps(dataclass_type: type) -> dict[str, str]:
    """Help texts by name; a field that is declared again without one keeps the text of the library."""
    bases = [base for base in reversed(dataclass_type.__mro__) if is_dataclass(base)]
    return {item.name: item.metadata["help"] for base in bases for item in fields(base) if item.metadata.get("help")}


def _library_names(dataclass_type: type) -> set[str]:
    """Names of the fields that only a library declares."""
    ours = [base for base in dataclass_type.__mro__ if base.__module__.partition(".")[0] not in LIBRARIES]
    return {item.name for item in fields(dataclass_type)} - {name for base in ours for name in get_annotations(base)}


def run_command(prog: str, command: Callable[..., Any], *args: Any) -> Any:
    """Call a command; an error that its user can correct ends the process with one line, and status 1.

    Args:
        prog: Name of the command, the first word of the line.
        command: The function to call.
        args: Its arguments.
    """
    try:
        return command(*args)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of the output has ended, as in `neobert tokenize ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the output once more at exit
        raise SystemExit(141) from None  # status of a process that SIGPIPE ends
    except Exception as error:
        if os.environ.get("NEOBERT_TRACEBACK") == "1" or not _is_correctable(error):
            raise
        raise SystemExit(f"{prog}: {one_line(error)}") from error  # Python prints it and ends with status 1


def _is_correctable(error):
    """Whether the error is for the user: of these classes, or a RuntimeError of this package, such as a killed process."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = frame.f_globals.get("__name__", "").startswith("neobert_hf.")
    return isinstance(error, CORRECTABLE) or (type(error) is RuntimeError and is_ours)


def one_line(error: object) -> str:
    """Return the message of an error without line breaks, and how to install a module that is missing."""
    text = re.sub(r"^\[Errno \d+\] ", "", " ".join(str(error).split()))
    if isinstance(error, ModuleNotFoundError) and "pip install" not in text:
        extra = _extra_with(error.name or "")
        text += f"; install it: pip install -e '.[{extra}]'" if extra else ""
    return text or type(error).__name__


def _extra_with(module: str) -> str | None:
    """The first extra of this package that installs a module; None if there is none, or the package is not installed."""
    name = module.partition(".")[0].replace("_", "-").lower()
    name = {"sklearn": "scikit-learn", "faiss": "faiss-cpu"}.get(name, name)
    try:
        requirements = metadata.requires("neobert_hf") or ()
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        distribution, _, extra = requirement.partition("; extra == ")
        if extra and re.match(r"[\w.-]+", distribution)[0].replace("_", "-").lower() == name:
            return extra.strip('"')
    return None
