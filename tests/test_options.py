"""The arguments of every command and script are frozen: who changes one changes `options.json`, and says so in the changelog.

python tests/test_options.py writes the file again.
"""

import importlib
import json
import re
from pathlib import Path

import pytest
from conftest import run_main

import neobert_cli

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("options.json")
SCRIPTS = [
    script
    for pattern in (
        "examples/*.py",
        "examples/ablation/*.py",
        "examples/paper/*.py",
        "examples/paper/*/*.py",
        "hub_upload/*.py",
    )
    for script in sorted(ROOT.glob(pattern))
    if '"__main__"' in script.read_text("utf-8")
]
COMMANDS = {f"neobert {command.__name__.replace('_', '-')}": neobert_cli for command in neobert_cli.COMMANDS}
COMMANDS |= {script.relative_to(ROOT).as_posix(): script.stem for script in SCRIPTS}


def options(command):
    """The arguments that the help of a command lists, in their order."""
    module = COMMANDS[command]
    words = command.split()[1:] if module is neobert_cli else []
    text = run_main(importlib.import_module(module) if isinstance(module, str) else module, *words, "--help")
    return re.findall(r"^ +(?:-\w, )?(--[\w-]+)", text, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_arguments_of_a_command_are_those_that_are_frozen(command):
    assert options(command) == json.loads(FILE.read_text("utf-8")).get(command)


def test_no_command_is_gone():
    assert COMMANDS.keys() == json.loads(FILE.read_text("utf-8")).keys()


if __name__ == "__main__":
    FILE.write_text(json.dumps({command: options(command) for command in COMMANDS}, indent=1) + "\n", "utf-8")
