"""What all commands share: arguments within their bounds, and one line for what their user can mend.

Exit status 2 is for a wrong command line, 1 for everything else that the user can mend, 130 for Ctrl-C. A bug shows its
traceback; `NEOBERT_TRACEBACK=1` shows it for every error.
"""

import argparse
import math
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import torch
from transformers import HfArgumentParser

# What a user can mend: a value, a file, a missing package, a loss that is not finite, a device that is too small.
MENDABLE = (ValueError, OSError, ModuleNotFoundError, FloatingPointError, torch.OutOfMemoryError)
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Bounds:
    """The numbers that an argument takes: `max_length: Annotated[int, Bounds(2, 1 << 20)]`.

    A dataclass that inherits fields gives theirs in a class variable `BOUNDS`, a dict by name.

    Attributes:
        least: The smallest number.
        most: The largest one.
        above: Every number must be larger than this, which none is.
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
    """HfArgumentParser that checks the bounds of numbers, refuses empty strings and names the bounds in `--help`.

    Whatever the dataclasses themselves refuse is an error of the command line as well: one line, exit status 2.
    """

    def __init__(self, dataclass_types, **kwargs):
        super().__init__(dataclass_types, **kwargs)
        bounds = {
            name: each for dataclass_type in self.dataclass_types for name, each in _bounds(dataclass_type).items()
        }
        hints = {name: hint for each in self.dataclass_types for name, hint in get_type_hints(each).items()}
        for action in self._actions:
            limits = bounds.get(action.dest, Bounds())
            if action.type in (int, float):
                action.type = _number(action.type, limits)
                if limits != Bounds():
                    action.help = f"{action.help or ''} ({limits})".strip()
            elif kind := _enum(hints.get(action.dest)):
                action.type, action.choices = str, [member.value for member in kind]
                # argparse would take the name of a default that is an Enum and a str.
                action.default = getattr(action.default, "value", action.default)
            elif action.type is str and action.default != "":
                action.type = some_text

    def parse_args_into_dataclasses(self, *args, **kwargs) -> tuple:
        """As HfArgumentParser's."""
        try:
            return super().parse_args_into_dataclasses(*args, **kwargs)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            if os.environ.get("NEOBERT_TRACEBACK") == "1":
                raise
            self.error(_one_line(error))

    def error(self, message: str) -> NoReturn:
        """End with one line, where argparse would print all arguments as well, and status 2."""
        self.exit(2, f"{self.prog}: error: {message}; --help names every argument\n")


def run_command(prog: str, command: Callable[..., Any], *args: Any) -> Any:
    """Call the command; an error that its user can mend ends the process with one line, and status 1.

    Args:
        prog: Name of the command, which begins the line.
        command: What to call.
        args: Its arguments.
    """
    try:
        return command(*args)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if os.environ.get("NEOBERT_TRACEBACK") == "1" or not _is_mendable(error):
            raise
        raise SystemExit(f"{prog}: {_one_line(error)}") from error  # Python prints it and ends with status 1


def _is_mendable(error: Exception) -> bool:
    """A RuntimeError that this package raised tells its user something; that of a library is a bug here."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, MENDABLE) or (type(error) is RuntimeError and HERE in raised_in.parents)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        text += "; pip install 'neobert_hf[train,embed]' has it"
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
            raise argparse.ArgumentTypeError(f"{text!r} is no {kind.__name__}") from None
        if value not in limits or abs(value) >= 1 << 63:  # larger ones overflow wherever they go
            raise argparse.ArgumentTypeError(f"{text} is out of bounds: {limits}")
        return value

    return parse


def some_text(text: str) -> str:
    """Type of an argument that is not an empty string."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty string; leave the argument out, or name something")
    return text
