"""Shared by all commands: parsing of dataclasses with bounds and a short `--help`, and errors on one line.

Exit status 2 is for a wrong command line, 1 for every other error that the user can mend, 130 for Ctrl-C. A bug shows its
traceback; `NEOBERT_TRACEBACK=1` shows the traceback of every error.
"""

import argparse
import math
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from inspect import get_annotations
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import torch
from transformers import HfArgumentParser

# What a user can mend: a value, a file, a missing package, a loss that is not finite, a device with too little memory.
MENDABLE = (ValueError, OSError, ModuleNotFoundError, FloatingPointError, torch.OutOfMemoryError)
HERE = Path(__file__).parent
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
        return math.isfinite(value) and self.least <= value <= self.most and value > self.above

    def __str__(self) -> str:
        parts = [("above", self.above), ("at least", self.least), ("at most", self.most)]
        return ", ".join(f"{word} {value:,}" for word, value in parts if math.isfinite(value)) or "finite"


class CommandParser(HfArgumentParser):
    """HfArgumentParser with bounds of numbers, no empty strings, and a `--help` that lists our own arguments only.

    An error that the dataclasses raise is an error of the command line as well: one line, exit status 2. `--help` groups the
    arguments by the class variable `GROUPS` of the dataclasses, a dict of names by title, and else by dataclass. Fields that only
    a dataclass of transformers or sentence-transformers declares are accepted, and listed by `--help_all`.

    Args:
        dataclass_types: A dataclass, or several.
        kwargs: Of `argparse.ArgumentParser`; the description keeps its line breaks.
    """

    def __init__(self, dataclass_types, **kwargs):
        super().__init__(dataclass_types, **{"formatter_class": _HelpFormatter, **kwargs})
        bounds = {
            name: each for dataclass_type in self.dataclass_types for name, each in _bounds(dataclass_type).items()
        }
        hints = {name: hint for each in self.dataclass_types for name, hint in get_type_hints(each).items()}
        for action in self._actions:
            limits = bounds.get(action.dest, Bounds())
            if action.type in (int, float):
                action.metavar = action.type.__name__.upper()
                action.type = _number(action.type, limits)
                if limits != Bounds():
                    action.help = f"{action.help or ''} ({limits})".strip()
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
            self.epilog = "All arguments of transformers.TrainingArguments are accepted too; --help_all lists them."
            text = "Show these arguments and those of transformers.TrainingArguments, then exit."
            self.add_argument("--help_all", action=_HelpAll, help=text)
        if self.usage is None:
            required = [f"{each.option_strings[0]} {each.metavar}" for each in self._actions if each.required]
            self.usage = " ".join(["%(prog)s", *required, "[--ARGUMENT VALUE ...]"])

    def _group_actions_of_dataclasses(self) -> list[argparse.Action]:
        """Put the actions into titled groups; return those that only libraries declare, hidden from the help."""
        (options,) = (group for group in self._action_groups if group.title in ("options", "optional arguments"))
        titles, hidden = {}, []
        for dataclass_type in self.dataclass_types:
            groups = {
                name: title
                for base in reversed(dataclass_type.__mro__)
                for title, names in vars(base).get("GROUPS", {}).items()
                for name in names
            }
            for name in (each.name for each in fields(dataclass_type)):
                own = [base for base in dataclass_type.__mro__ if name in get_annotations(base)]
                is_library = own[0].__module__.partition(".")[0] in LIBRARIES
                titles[name] = None if is_library else groups.get(name) or (dataclass_type.__doc__ or "").split("\n")[0]
                for action in self._actions:
                    if action.dest == name and not action.help:  # redeclared with another default only
                        action.help = _inherited_help(own, name)
        groups = {}
        for action in list(options._group_actions):
            if action.dest not in titles:
                continue
            options._group_actions.remove(action)
            title = titles[action.dest]
            if title is None:
                hidden.append(action)
            else:
                groups.setdefault(title, self.add_argument_group(title) if title not in groups else groups[title])
                groups[title]._group_actions.append(action)
        return hidden

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
        return f"{', '.join(names)} {self._format_args(action, action.metavar or action.dest.upper())}"

    def _format_args(self, action, default_metavar):
        if action.nargs == "+":
            return f"{action.metavar or default_metavar} ..."
        return super()._format_args(action, default_metavar)

    def _get_help_string(self, action):
        text = action.help or ""
        if action.required:
            return f"{text} (required)"
        is_shown = action.option_strings and action.default not in (None, "", [], False, argparse.SUPPRESS)
        return f"{text} (default: %(default)s)" if is_shown and "%(default)" not in text else text


class _HelpAll(argparse.Action):
    """Show the arguments of transformers.TrainingArguments as well."""

    def __init__(self, option_strings, dest, help=None):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser, namespace, values, option_string=None):
        group = parser.add_argument_group("transformers.TrainingArguments")
        group._group_actions.extend(parser._library_actions)
        parser.epilog = None
        parser.print_help()
        parser.exit()


def _inherited_help(classes: list[type], name: str) -> str | None:
    """The help text of the nearest dataclass that has one for the field."""
    found = (vars(each).get("__dataclass_fields__", {}).get(name) for each in classes)
    return next((each.metadata["help"] for each in found if each is not None and each.metadata.get("help")), None)


def run_command(prog: str, command: Callable[..., Any], *args: Any) -> Any:
    """Call a command; an error that its user can mend ends the process with one line, and status 1.

    Args:
        prog: Name of the command, the first word of the line.
        command: The function to call.
        args: Its arguments.
    """
    try:
        return command(*args)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if os.environ.get("NEOBERT_TRACEBACK") == "1" or not _is_mendable(error):
            raise
        raise SystemExit(f"{prog}: {one_line(error)}") from error  # Python prints it and ends with status 1


def _is_mendable(error: Exception) -> bool:
    """A RuntimeError that this package raised is for its user; a RuntimeError of a library is a bug here."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, MENDABLE) or (type(error) is RuntimeError and HERE in raised_in.parents)


def one_line(error: object) -> str:
    """The message of an error without line breaks, and how to install a module that is missing."""
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        text += "; install it: pip install 'neobert_hf[train,embed]'"
    return text or type(error).__name__


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
