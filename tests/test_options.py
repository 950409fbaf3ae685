"""The arguments of every command and script are frozen: who changes one changes `options.json`, and says so in the changelog.

PYTHONPATH=.:hub_upload:examples python tests/test_options.py writes the file again.
"""

import argparse
import importlib
import json
import re
import sys
from dataclasses import fields, is_dataclass
from inspect import get_annotations
from pathlib import Path

import pytest
from conftest import run_main

from neobert_cli import commands as neobert_cli
from neobert_hf import MINI_MODEL_PATH

ROOT = Path(__file__).parents[1]
FILE = Path(neobert_cli.__file__).parents[1] / "neobert_hf/options.json"  # a shell completes by it
PLACES = ("examples", "examples/ablation", "examples/corpus", "examples/paper", "examples/paper/*", "hub_upload")
SCRIPTS = [script for place in PLACES for script in sorted(ROOT.glob(f"{place}/*.py"))]
SCRIPTS = [script for script in SCRIPTS if '"__main__"' in script.read_text("utf-8")]
KINDS = {"int": "int", "float": "float", "string_to_bool": "bool"}
COMMANDS = {f"neobert {command.__name__.replace('_', '-')}": neobert_cli for command in neobert_cli.COMMANDS}
COMMANDS |= {script.relative_to(ROOT).as_posix(): script.stem for script in SCRIPTS}


def parsers(command):
    """The parsers that show the help of a command."""
    module, shown = COMMANDS[command], []
    words = command.split()[1:] if module is neobert_cli else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "print_help", lambda parser, file=None: shown.append(parser))
        run_main(importlib.import_module(module) if isinstance(module, str) else module, *words, "--help")
    return shown


def own_texts(parser):
    """Names and texts of our arguments, of the library if it declares one too, and whether it declares more."""
    if not hasattr(parser, "dataclass_types"):
        return {action.dest: action.help for action in parser._actions if action.help != argparse.SUPPRESS}, False
    texts, own = {}, set()
    for base in [base for kind in parser.dataclass_types for base in reversed(kind.__mro__) if is_dataclass(base)]:
        texts |= {field.name: field.metadata["help"] for field in fields(base) if "help" in field.metadata}
        if base.__module__.split(".")[0] not in ("transformers", "sentence_transformers"):
            own |= get_annotations(base).keys()
    return {name: texts.get(name, "") for name in own}, not own.issuperset(texts)


def own_actions(parser, actions):
    """Those of our arguments, without the second form `--no_...` of a switch."""
    names, _ = own_texts(parser)
    return [action for action in actions if action.dest in names and not isinstance(action, argparse._StoreFalseAction)]


def options(command):
    """The arguments of a command, in their order; of a script that is a command, its table."""
    if Path(command).stem.replace("_", "-") in neobert_cli.SCRIPTS:
        return table(*parsers(command))
    names = []
    for parser in parsers(command):
        for action in own_actions(parser, parser._actions):
            names += action.option_strings[: 1 if hasattr(parser, "dataclass_types") else None]
    return [name for name in names if name.startswith("--")]


def table(parser):
    """The help of a script, and its arguments as `add_table` declares them."""
    texts, has_library = own_texts(parser)
    shown = {"description": parser.description, "usage": parser.usage, "epilog": None}
    groups = {}
    for group in parser._action_groups:
        if actions := own_actions(parser, group._group_actions):
            groups[group.title] = [argument(action, texts[action.dest]) for action in actions]
    if has_library:
        shown["epilog"] = "All arguments of the library's TrainingArguments are accepted too; --help_all lists them."
        every = {"names": ["--help_all"], "help": "Show all arguments, then exit.", "action": "store_true"}
        groups = {"options": [every], **groups}
    return {"parser": shown, "has_library": has_library, "groups": groups}


def argument(action, text):
    """The values of an argument that are not those of argparse's defaults."""
    if isinstance(action, argparse._HelpAction):
        return {"names": action.option_strings, "help": text, "action": "help"}
    is_required = action.required and bool(action.option_strings)
    values = {"names": action.option_strings[:1] or [action.dest], "help": text + " (required)" * is_required}
    values |= {"type": KINDS.get(getattr(action.type, "__name__", "")), "required": is_required}
    values |= {name: getattr(action, name) for name in ("nargs", "const", "choices", "default", "metavar")}
    if values["default"] == MINI_MODEL_PATH:
        values["default"] = "the mini model of this package"
    return {name: value for name, value in values.items() if value not in (None, False, ())}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_arguments_of_a_command_are_those_that_are_frozen(command):
    assert json.loads(json.dumps(options(command))) == json.loads(FILE.read_text("utf-8")).get(command)


def test_no_command_is_gone():
    assert COMMANDS.keys() == json.loads(FILE.read_text("utf-8")).keys()


if __name__ == "__main__":
    sys.path[:0] = {str(script.parent) for script in SCRIPTS}
    text = json.dumps({command: options(command) for command in COMMANDS}, indent=1)
    FILE.write_text(re.sub(r"\{\n[^{}]*\}", lambda inner: re.sub(r"\n *", " ", inner[0]), text) + "\n", "utf-8")
