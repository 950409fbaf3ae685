"""Shared by all scripts: dataclasses as a command line with a short `--help`."""

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from transformers.hf_argparser import HfArgumentParser, string_to_bool

from neobert_cli.parser import Parser

from ..files.errors import correctable, one_line, run_command
from .machine import limit_threads


class CommandParser(Parser, HfArgumentParser):
    """HfArgumentParser whose errors are one line, also those that the dataclasses raise.

    The help of a command shows our arguments alone, by `options.json`.

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
        super().__init__(types, usage="%(prog)s --ARGUMENT VALUE ...", **kwargs)
        for action in self._actions:
            if action.type is string_to_bool:  # a switch whose default is None is one too
                action.nargs = "?"
                action.const = True

    def parse_args_into_dataclasses(self, args: Sequence[str] | None = None, **kwargs) -> tuple:
        """As HfArgumentParser's; an unknown argument is an error."""
        try:
            for dataclass_type in self.dataclass_types:  # defaults may follow from another argument
                if hasattr(dataclass_type, "defaults_of"):
                    self.set_defaults(**dataclass_type.defaults_of(self.parse_known_args(args)[0]))
            *parsed, rest = super().parse_args_into_dataclasses(args, return_remaining_strings=True, **kwargs)
        except correctable() as error:
            self.error(one_line(error))
        if rest:
            self.error(f"unknown argument {rest[0]}")
        return tuple(parsed)


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
