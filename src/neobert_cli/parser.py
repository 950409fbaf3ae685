"""The parser of a command line: errors on one line, and a help that keeps its line breaks. It imports nothing of neobert_hf."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line, with a suggestion for a mistyped argument; the scripts have it too."""

    shown_help = "`{} --help`"
    words: Sequence[str] = ()  # of the command line

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's; an empty argument is an error."""
        self.words = sys.argv[1:] if args is None else list(args)
        if "" in self.words and self._subparsers is None:  # else the parser of the command says so
            self.error("an argument is an empty string; leave it out, or give it a value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with one line, without the usage that argparse prints before it, and status 2."""
        known = re.findall(r"--[\w-]+", self.format_help())
        names = [word.partition("=")[0] for word in self.words if word.startswith("--")]
        unknown = [name for name in names if not any(option.startswith(name) for option in known)]
        if unknown:  # before an argument that is missing
            self.refuse("argument", unknown[0], known)
        self._end(message)

    def refuse(self, kind: str, word: str, known: Iterable[str]) -> NoReturn:
        """End with one line about an unknown argument or command, with a suggestion, and status 2."""
        close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
        self._end(f"unknown {kind} {word}" + "".join(f"; did you mean {name}?" for name in close), kind)

    def _end(self, message: str, kind: str = "argument") -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; {self.shown_help.format(self.prog)} lists the {kind}s\n")


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the line breaks of the description, and shows the defaults that say something; the scripts have it too.

    The commands below the word COMMAND are not indented, so that a long name has its help beside it.
    """

    def _get_help_string(self, action):
        return action.help if action.default in (None, False, "") else super()._get_help_string(action)

    def _iter_indented_subactions(self, action):
        return getattr(action, "_get_subactions", tuple)()
