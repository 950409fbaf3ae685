"""The arguments of every command and script are frozen: who changes one changes `options.json`, and says so in the changelog.

PYTHONPATH=.:hub_upload:examples python tests/test_options.py writes the file again.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
from conftest import run_main

from neobert_cli import commands as neobert_cli

ROOT = Path(__file__).parents[1]
FILE = Path(neobert_cli.__file__).parents[1] / "neobert_hf/options.json"  # a shell completes by it
PLACES = ("examples", "examples/ablation", "examples/corpus", "examples/paper", "examples/paper/*", "hub_upload")
SCRIPTS = [script for place in PLACES for script in sorted(ROOT.glob(f"{place}/*.py"))]
SCRIPTS = [script for script in SCRIPTS if '"__main__"' in script.read_text("utf-8")]
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


def options(command):
    """The arguments of a command, in their order; of a script that is a command, its table."""
    if Path(command).stem.replace("_", "-") in neobert_cli.SCRIPTS:
        return table(*parsers(command))
    actions = [action for parser in parsers(command) for action in parser._actions if action.help != argparse.SUPPRESS]
    return [name for action in actions for name in action.option_strings if name.startswith("--")]


def table(parser):
    """The help of a script, and its arguments as `add_table` declares them."""
    groups = {group.title: list(map(argument, group._group_actions)) for group in parser._action_groups}
    groups = {title: list(filter(None, arguments)) for title, arguments in groups.items() if any(arguments)}
    has_library = any("--help_all" in action.option_strings for action in parser._actions)
    shown = {name: getattr(parser, name) for name in ("description", "usage", "epilog")}
    return {"parser": shown, "has_library": has_library, "groups": groups}


def argument(action):
    """The values of an argument that are not those of argparse's defaults; None for one that the help leaves out."""
    if action.help == argparse.SUPPRESS:
        return None
    values = {"names": action.option_strings or [action.dest], "help": action.help}
    if isinstance(action, argparse._HelpAction) or type(action).__name__ == "_ShortHelp":
        return {**values, "action": "store_true" if "--help_all" in values["names"] else "help"}
    kinds = {"int": "int", "float": "float", "string_to_bool": "bool"}
    values |= {"type": kinds.get(getattr(action.type, "__name__", "")), "required": action.required or None}
    if not action.option_strings:
        values["required"] = None
    values |= {name: getattr(action, name) for name in ("nargs", "const", "choices", "default", "metavar")}
    return {name: value for name, value in values.items() if value not in (None, False, ())}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_arguments_of_a_command_are_those_that_are_frozen(command):
    assert json.loads(json.dumps(options(command))) == json.loads(FILE.read_text("utf-8")).get(command)


def test_no_command_is_gone():
    assert COMMANDS.keys() == json.loads(FILE.read_text("utf-8")).keys()


if __name__ == "__main__":
    sys.path[:0] = {str(script.parent) for script in SCRIPTS}
    FILE.write_text(json.dumps({command: options(command) for command in COMMANDS}, indent=1) + "\n", "utf-8")
