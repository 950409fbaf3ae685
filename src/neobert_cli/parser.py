"""The parser of a command line: errors on one line, and a help that keeps its line breaks. It imports nothing of neobert_hf."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

# Of the types of arguments, by name: transformers is not imported here.
METAVARS = {"int": "INT", "float": "FLOAT", "string_to_bool": "BOOL"}


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
        known = re.findall(r"--[\w-]+", self.format_help())
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
