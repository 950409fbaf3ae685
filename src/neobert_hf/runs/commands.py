"""Shared by all commands: parsing of dataclasses with bounds and a short `--help`, and errors on one line.

Exit status 2 is for a wrong command line, 1 for every other error that the user can correct, 130 for Ctrl-C. A bug shows its
traceback; `NEOBERT_TRACEBACK=1` shows the traceback of every error.
"""

import argparse
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum
from importlib import metadata
from inspect import get_annotations
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import torch
from transformers import HfArgumentParser

# Errors that a user can correct: a value, a file, a missing package, a loss that is not finite, a device with too little memory.
CORRECTABLE = (ValueError, OSError, ModuleNotFoundError, FloatingPointError, torch.OutOfMemoryError)
HERE = Path(__file__).parent
LARGE = 100_000_000  # the help does not name upper bounds from here on; an error does
NOUNS = {int: "an integer", float: "a number"}
LIBRARIES = ("transformers", "sentence_transformers")  # their arguments are listed by --help_all only


@dataclass(frozen=True)
class Bounds:
    """The numbers that an argument accepts: `max_length: Annotated[int, Bounds(2, 1 << 20)]`.

    A dataclass sets the bounds of inherited fields in a class variable `BOUNDS`, a dict by name.

    Attributes:
        least: The smallest number.
        most: The largest one.
        above: Every number must be larger than this.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf

    def __contains__(self, value: float) -> bool:
        # math.isfinite raises OverflowError for an integer of 400 digits
        return -math.inf < value < math.inf and self.least <= value <= self.most and value > self.above

    def __str__(self) -> str:
        parts = [("above", self.above), ("at least", self.least), ("at most", self.most)]
        return ", ".join(f"{word} {value:,}" for word, value in parts if math.isfinite(value)) or "finite"


COUNT = Bounds(1, 1 << 30)
SHARE = Bounds(0, 1)


def check_bounds(values: object, bounds: dict[str, Bounds]) -> None:
    """Raise ValueError for the first number, or list of numbers, that is out of its bounds; None means not given."""
    for name, limits in bounds.items():
        value = getattr(values, name, None)
        numbers = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        if not all(number in limits for number in numbers):
            raise ValueError(f"{name}={value} is out of bounds: {limits}")


class CommandParser(HfArgumentParser):
    """HfArgumentParser with bounds of numbers, no empty strings, and a `--help` that lists our own arguments only.

    An error that the dataclasses raise is an error of the command line as well: one line, exit status 2. `--help` groups the
    arguments by the class variable `GROUPS` of the dataclasses, a dict of names by title, and else by dataclass. It leaves out
    fields that only transformers or sentence-transformers declares, and those with the title None; `--help_all` lists them.

    Args:
        dataclass_types: A dataclass, or several.
        kwargs: Of `argparse.ArgumentParser`; the description keeps its line breaks.
    """

    def __init__(self, dataclass_types, **kwargs):
        super().__init__(dataclass_types, **{"formatter_class": _HelpFormatter, **kwargs})
        bounds = {
            name: each for dataclass_type in self.dataclass_types for name, each in _bounds(dataclass_type).items()
        }
        inherited_help = {
            each.name: each.metadata["help"]
            for dataclass_type in self.dataclass_types
            for base in reversed(dataclass_type.__mro__)
            for each in vars(base).get("__dataclass_fields__", {}).values()
            if each.metadata.get("help")
        }
        hints = {name: hint for each in self.dataclass_types for name, hint in get_type_hints(each).items()}
        for action in self._actions:
            limits = bounds.get(action.dest, Bounds())
            action.help = action.help or inherited_help.get(action.dest)
            if action.type in (int, float):
                action.metavar = action.type.__name__.upper()
                action.type = _number(action.type, limits)
                if (shown := replace(limits, most=limits.most if limits.most < LARGE else math.inf)) != Bounds():
                    action.help = f"{action.help or ''} ({shown})".strip()
            elif kind := _enum(hints.get(action.dest)):
                action.type, action.choices = str, [member.value for member in kind]
                # argparse would take the name of a default that is an Enum and a str.
                action.default = getattr(action.default, "value", action.default)
            elif action.type is str:
                action.metavar = "TEXT"
                if action.default != "":
                    action.type = some_text
            elif action.nargs == "?":  # a flag that also takes true or false
                action.metavar = "BOOL"
        self._library_actions = self._group_actions_of_dataclasses()
        if self._library_actions:
            library = _library_class(self.dataclass_types)
            self.epilog = f"All arguments of {library} are accepted too; --help_all lists them."
            text = f"Show these arguments and those of {library}, then exit."
            self.add_argument("--help_all", action=_HelpAll, const=library, help=text)
        if self.usage is None:
            required = [f"{each.option_strings[0]} {each.metavar}" for each in self._actions if each.required]
            self.usage = " ".join(["%(prog)s", *required, "[--ARGUMENT VALUE ...]"])

    def _group_actions_of_dataclasses(self) -> list[argparse.Action]:
        """Put the actions into titled groups; return those that the help does not list."""
        titles = {name: title for each in self.dataclass_types for name, title in _titles(each).items()}
        # the group of positional arguments comes before the one of options
        options, groups = self._action_groups[1], {None: []}
        for action in [each for each in options._group_actions if each.dest in titles]:
            options._group_actions.remove(action)
            title = titles[action.dest]
            if title not in groups:
                groups[title] = self.add_argument_group(title)._group_actions
            if not isinstance(action, argparse._StoreFalseAction):  # --no_NAME, which is shown with --NAME
                groups[title].append(action)
        return groups[None]

    def parse_args_into_dataclasses(self, *args, **kwargs) -> tuple:
        """As HfArgumentParser's."""
        try:
            return super().parse_args_into_dataclasses(*args, **kwargs)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            if os.environ.get("NEOBERT_TRACEBACK") == "1":
                raise
            self.error(one_line(error))

    def error(self, message: str) -> NoReturn:
        """End with one line, without the usage that argparse prints before it, and status 2."""
        self.exit(2, f"{self.prog}: error: {message}; --help lists the arguments\n")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One spelling of each argument, and its default if it has one."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=32)

    def _format_action_invocation(self, action):
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        names = [
            name for name in action.option_strings if not name.startswith("--") or name == action.option_strings[0]
        ]
        opposite = f", --no_{action.dest}" if action.nargs == "?" and action.default is True else ""
        return f"{', '.join(names)} {self._format_args(action, action.metavar or action.dest.upper())}{opposite}"

    def _format_args(self, action, default_metavar):
        if action.nargs == "+":
            return f"{action.metavar or default_metavar} ..."
        return super()._format_args(action, default_metavar)

    def _get_help_string(self, action):
        text = action.help or ""
        if action.required:
            return f"{text} (required)"
        is_shown = action.default not in (None, "", [], argparse.SUPPRESS) and action.default is not False
        return f"{text} (default: %(default)s)" if is_shown and "%(default)" not in text else text


class _HelpAll(argparse.Action):
    """Show the arguments of the library's class as well; `const` is the name of this class."""

    def __init__(self, option_strings, dest, const, help=None):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, const=const, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser, namespace, values, option_string=None):
        group = parser.add_argument_group(self.const)
        group._group_actions.extend(parser._library_actions)
        parser.epilog = None
        parser.print_help()
        parser.exit()


def _library(class_: type) -> str | None:
    """The library that defines a class, if it is one of `LIBRARIES`."""
    package = class_.__module__.partition(".")[0]
    return package if package in LIBRARIES else None


def _library_class(dataclass_types: list[type]) -> str:
    """The class of a library from which a dataclass derives, such as transformers.TrainingArguments."""
    return next(
        f"{_library(base)}.{base.__name__}" for each in dataclass_types for base in each.__mro__ if _library(base)
    )


def _titles(dataclass_type: type) -> dict[str, str | None]:
    """The title of the group of each field: that of `GROUPS`, or the dataclass's own; None is for --help_all only."""
    doc = (dataclass_type.__doc__ or "").split("\n")[0].split(". ")[0].rstrip(".")
    titles = {}
    for each in fields(dataclass_type):
        declared_in = next(base for base in dataclass_type.__mro__ if each.name in get_annotations(base))
        titles[each.name] = None if _library(declared_in) else doc
    for base in reversed(dataclass_type.__mro__):
        for title, names in vars(base).get("GROUPS", {}).items():
            titles |= dict.fromkeys(names, title)
    return titles


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


def _is_correctable(error: Exception) -> bool:
    """A RuntimeError that this package raised is for its user; a RuntimeError of a library is a bug here."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, CORRECTABLE) or (type(error) is RuntimeError and HERE in raised_in.parents)


def one_line(error: object) -> str:
    """The message of an error without line breaks, and how to install a module that is missing."""
    text = " ".join(str(error).split())
    if (
        isinstance(error, ModuleNotFoundError)
        and "pip install" not in text
        and (extra := _extra_with(error.name or ""))
    ):
        text += f"; install it: pip install -e '.[{extra}]'"
    return text or type(error).__name__


def _extra_with(module: str) -> str | None:
    """The first extra of this package that installs a module; None if there is none, or the package is not installed."""
    name = module.partition(".")[0]
    name = {"sklearn": "scikit-learn", "faiss": "faiss-cpu", "Stemmer": "pystemmer"}.get(name, name)
    try:
        requirements = metadata.requires("neobert_hf") or ()
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        distribution, _, extra = requirement.partition("; extra == ")
        if extra and re.match(r"[\w.-]+", distribution)[0].replace("_", "-").lower() == name.replace("_", "-").lower():
            return extra.strip('"')
    return None


def _bounds(dataclass_type: type) -> dict[str, Bounds]:
    """The bounds of a dataclass's fields, by name."""
    found = dict(getattr(dataclass_type, "BOUNDS", {}))
    hints = get_type_hints(dataclass_type, include_extras=True)
    for each in fields(dataclass_type):
        hint = hints[each.name]
        if get_origin(hint) is Annotated:
            found[each.name] = next(extra for extra in get_args(hint)[1:] if isinstance(extra, Bounds))
    return found


def _enum(hint: Any) -> type[Enum] | None:
    """The Enum among the types of a field, which transformers declares as `SchedulerType | str`."""
    return next((each for each in get_args(hint) or (hint,) if isinstance(each, type) and issubclass(each, Enum)), None)


def _number(kind: type, limits: Bounds) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {NOUNS[kind]}") from None
        if value not in limits or abs(value) >= 1 << 63:  # larger numbers overflow in torch and NumPy
            raise argparse.ArgumentTypeError(f"{text} is out of bounds: {limits}")
        return value

    return parse


def some_text(text: str) -> str:
    """Parse an argument that must not be an empty string."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty string; leave the argument out, or give a value")
    return text
