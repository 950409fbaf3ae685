"""The parser of a command line: errors on one line, and a help that keeps its line breaks. It imports nothing of neobert_hf."""

import argparse
import difflib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

METAVARS = {"int": "INT", "float": "FLOAT", "string_to_bool": "BOOL"}  # of the types of arguments, by name


def string_to_bool(text: str) -> bool:
    """Return the value of a switch; the words are those of transformers, which takes seconds to import."""
    if text.lower() not in ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("yes", "true", "t", "y", "1")


TYPES: dict[str, Any] = {"int": int, "float": float, "bool": string_to_bool}


def option(help: str, default: Any = None) -> Any:
    """Return a field of a dataclass of options. HfArg does the same; transformers takes seconds to import."""
    values = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**values, metadata={"help": help})


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the line breaks of the description, names the types, and shows the defaults that say something.

    The commands below the word COMMAND are not indented, so that a long name has its help beside it.
    """

    def _get_default_metavar_for_optional(self, action):
        return METAVARS.get(getattr(action.type, "__name__", ""), "TEXT")

    def _get_help_string(self, action):
        if action.default in (None, False, ""):
            return action.help
        return super()._get_help_string(action)

    def _iter_indented_subactions(self, action):
        return getattr(action, "_get_subactions", tuple)()


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line, with a suggestion for a mistyped argument; the scripts have it too."""

    shown_help = "`{} --help`"
    words: Sequence[str] = ()  # of the command line

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"formatter_class": HelpFormatter} | kwargs)

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's; an empty argument is an error."""
        self.words = sys.argv[1:] if args is None else list(args)
        if "" in self.words and self._subparsers is None:  # else the parser of the command says so
            self.error("an argument is an empty string; leave it out, or give it a value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with one line, without the usage that argparse prints before it, and status 2."""
        known = [option for option in self._option_string_actions if option.startswith("--")]
        for word in self.words:
            name = word.partition("=")[0]
            is_known = any(option.startswith(name) for option in known)
            if name.startswith("--") and not is_known:  # before an argument that is missing
                self.refuse("argument", name, known)
        self._end(message)

    def refuse(self, kind: str, word: str, known: Iterable[str]) -> NoReturn:
        """End with one line about an unknown argument or command, with a suggestion, and status 2."""
        message = f"unknown {kind} {word}"
        for name in difflib.get_close_matches(word, known, n=1, cutoff=0.7):
            message += f"; did you mean {name}?"
        self._end(message, kind)

    def _end(self, message: str, kind: str = "argument") -> NoReturn:
        shown_help = self.shown_help.format(self.prog)
        self.exit(2, f"{self.prog}: error: {message}; {shown_help} lists the {kind}s\n")


def add_table(parser: Parser, groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Declare the arguments of a script by the groups of its frozen table, which tests/test_options.py writes and compares."""
    for title, arguments in groups.items():
        add = parser.add_argument_group(title).add_argument
        for argument in arguments:
            options = {name: value for name, value in argument.items() if name not in ("names", "type")}
            if "type" in argument:
                options["type"] = TYPES[argument["type"]]
            add(*argument["names"], **options)
    if "--help" not in parser._option_string_actions:  # that of the library's arguments hides it
        parser.add_argument("--help", "-h", action="help", help=argparse.SUPPRESS)


def typed_options(parser: Parser, words: Sequence[str], has_library: bool) -> dict[str, Any]:
    """Return the options that a command line gives to a script, without their defaults.

    Args:
        parser: Parser with the arguments of the script.
        words: The command line.
        has_library: Whether the script takes the arguments of TrainingArguments too, in every form of HfArgumentParser.
    """
    if has_library:
        for name, kind in library_arguments():
            if f"--{name}" not in parser._option_string_actions:
                parser.add_argument(f"--{name}", nargs="*", type=TYPES.get(kind, str), help=argparse.SUPPRESS)
        words = [_in_table(word, parser._option_string_actions) for word in words]
    options = vars(parser.parse_args(words))
    return {name: value for name, value in options.items() if value is not parser.get_default(name)}


def library_arguments() -> Iterator[tuple[str, str]]:
    """Yield names and types of the arguments of TrainingArguments by the installed sources, whose import takes seconds."""
    for library in ("transformers", "sentence_transformers"):
        spec = find_spec(library)
        for folder in (spec and spec.submodule_search_locations) or ():
            for file in Path(folder).glob("**/training_args.py"):
                yield from re.findall(r"(?m)^    (\w+): (?:Optional\[)?(\w+)\b", file.read_text("utf-8"))


def _in_table(word: str, known: Collection[str]) -> str:
    """Return an option as the table names it: `--save_steps` for `--save-steps`, `--bf16=false` for `--no_bf16`."""
    name, equals, value = word.partition("=")
    name = "--" + name[2:].replace("-", "_")
    positive = name.replace("--no_", "--", 1)
    if not word.startswith("--"):
        return word
    if name in known:
        return name + equals + value
    return f"{positive}=false" if positive in known else word
