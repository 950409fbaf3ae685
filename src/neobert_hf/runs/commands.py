"""Shared by all scripts: dataclasses as a command line with a short `--help`."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from inspect import get_annotations
from typing import Any, get_type_hints

from transformers.hf_argparser import HfArgumentParser, string_to_bool

from neobert_cli.parser import Parser

from ..checkpoints import MINI_MODEL_PATH
from ..files.errors import correctable, one_line, run_command
from .machine import limit_threads

LIBRARIES = ("transformers", "sentence_transformers")  # --help_all lists their arguments


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
        for dataclass_type in types:
            title, _, _ = dataclass_type.__doc__.partition(".")
            dataclass_type._argument_group_name = title
        super().__init__(types, usage="%(prog)s --ARGUMENT VALUE ...", add_help=False, **kwargs)
        self.own_options = set()
        texts = {}
        classes: list[Any] = [base for each in types for base in reversed(each.__mro__) if is_dataclass(base)]
        for base in classes:
            # a field that is declared again without a text keeps the text of the library
            texts |= {each.name: each.metadata["help"] for each in fields(base) if "help" in each.metadata}
            if base.__module__.split(".")[0] not in LIBRARIES:
                self.own_options |= {f"--{name}" for name in get_annotations(base)}
        for action in self._actions:
            action.help = texts.get(action.dest, "") + " (required)" * action.required
            if action.type is string_to_bool:  # a switch whose default is None is one too
                action.nargs = "?"
                action.const = True
        if not self.own_options.issuperset(f"--{name}" for name in texts):
            self.own_options.add("--help_all")
            self.epilog = "All arguments of the library's TrainingArguments are accepted too; --help_all lists them."
        self.add_argument("--help", "-h", action=_ShortHelp, nargs=0, help="Show our arguments, then exit.")
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
    """Show the help of a `CommandParser` without the arguments that only a library declares, then exit."""

    def __call__(self, parser, namespace, values, option_string=None):
        for action in parser._actions:
            action.option_strings = action.option_strings[:1]
            if action.option_strings[0] not in parser.own_options:
                action.help = argparse.SUPPRESS
            elif action.default == MINI_MODEL_PATH:
                action.default = "the mini model of this package"
        parser.print_help()
        parser.exit()


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
