"""Shared by all scripts: dataclasses as a command line with a short `--help`."""

import argparse
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import get_annotations
from typing import Any, get_args, get_type_hints

from transformers.hf_argparser import HfArgumentParser

from neobert_cli import Parser

from . import MINI_MODEL_PATH
from .errors import correctable, one_line, run_command
from .machine import limit_threads

LIBRARIES = ("transformers", "sentence_transformers")  # --help_all lists their arguments
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", bool: "BOOL"}


class CommandParser(Parser, HfArgumentParser):
    """HfArgumentParser whose errors are one line, and whose `--help` leaves out the arguments that a library declares.

    An error that the dataclasses raise is an error of the command line as well. `--help_all` lists the arguments of transformers
    and sentence-transformers too.

    Args:
        dataclass_types: A dataclass, or several.
        kwargs: Of `argparse.ArgumentParser`.
    """

    shown_help = "--help"

    def __init__(self, dataclass_types, **kwargs: Any):
        types: list[Any] = [dataclass_types] if is_dataclass(dataclass_types) else list(dataclass_types)
        shape = {"usage": "%(prog)s --ARGUMENT VALUE ...", "formatter_class": RawDescriptionHelpFormatter}
        options: dict[str, Any] = {"add_help": False} | shape | kwargs
        super().__init__(types, **options)  # type: ignore[arg-type]  # of HfArgumentParser
        self.short_help = argparse.ArgumentParser(**options)
        has_more = [_add_help(self.short_help, dataclass_type) for dataclass_type in types]
        if any(has_more):
            text = "Show these arguments and those of the library, then exit."
            self.short_help.add_argument("--help_all", action="store_true", help=text)
            text = "All arguments of the library's TrainingArguments are accepted too; --help_all lists them."
            self.short_help.epilog = text
        self.add_argument("--help", "-h", action=_ShortHelp, help="Show our arguments, then exit.")
        self.add_argument("--help_all", action="help", help="Show all arguments, then exit.")

    def parse_args_into_dataclasses(self, args: Sequence[str] | None = None, **kwargs) -> tuple:
        """As HfArgumentParser's; an unknown argument is an error."""
        try:
            for dataclass_type in self.dataclass_types:  # defaults may follow from another argument
                if hasattr(dataclass_type, "defaults_of"):
                    self.set_defaults(**dataclass_type.defaults_of(self.parse_known_args(args)[0]))
            *parsed, _, rest = super().parse_args_into_dataclasses(args, return_remaining_strings=True, **kwargs)
        except correctable() as error:
            self.error(one_line(error))
        if rest:
            self.error(f"unknown argument {rest[0]}")
        return tuple(parsed)


class _ShortHelp(argparse.Action):
    """Show the short help of a `CommandParser`, then exit."""

    def __init__(self, option_strings, dest, **kwargs):
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        parser.short_help.print_help()
        parser.exit()


def _add_help(parser: argparse.ArgumentParser, dataclass_type: type) -> bool:
    """Add the fields of a dataclass that no library declares, for their help; return whether there are others."""
    classes = [base for base in reversed(dataclass_type.__mro__) if is_dataclass(base)]
    # a field that is declared again without a text keeps the text of the library
    texts = {item.name: item.metadata["help"] for base in classes for item in fields(base) if item.metadata.get("help")}
    own = [base for base in classes if base.__module__.split(".")[0] not in LIBRARIES]
    ours = {name for base in own for name in get_annotations(base)}
    types = get_type_hints(dataclass_type)
    group = parser.add_argument_group((dataclass_type.__doc__ or "").partition("\n")[0].partition(".")[0])
    for item in fields(dataclass_type):
        if item.name not in ours:
            continue
        text = texts.get(item.name, "")
        if item.default is MISSING and item.default_factory is MISSING:
            text += " (required)"
        elif item.default is not MISSING and item.default not in (None, "", False):
            shown = "the mini model of this package" if item.default == MINI_MODEL_PATH else item.default
            text += f" (default: {shown})"
        group.add_argument(f"--{item.name}", help=text.strip(), **_shape(types[item.name]))
    return any(item.name not in ours for item in fields(dataclass_type))


def _shape(annotation: Any) -> dict:
    """How the help shows the value of an argument: its choices, or its type, once or several times."""
    inner = [part for part in get_args(annotation) if part is not type(None)]
    if inner and all(isinstance(part, str) for part in inner):  # Literal
        return {"choices": inner}
    if str(annotation).startswith("list"):
        return {"nargs": "+", "metavar": METAVARS.get(inner[0], "TEXT")}
    return _shape(inner[0]) if inner else {"metavar": METAVARS.get(annotation, "TEXT")}


def run_script(function: Callable[..., Any], description: str) -> None:
    """Read the command line of a script into the dataclasses that annotate the arguments of `function`, and call it.

    Args:
        function: The work of the script.
        description: The docstring of the script, which `--help` shows.
    """
    types = [value for name, value in get_type_hints(function).items() if name != "return"]
    parser = CommandParser(types, description=description)
    limit_threads()
    run_command(parser.prog, function, *parser.parse_args_into_dataclasses())
