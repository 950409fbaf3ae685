"""What all scripts share: a short help, and errors on one line."""

import re
import subprocess
import sys
from dataclasses import dataclass, field, fields
from enum import Enum

import pytest
import torch
from transformers import TrainingArguments

from neobert_hf.runs import CommandParser, run_command, run_script


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Arguments:
    """Values. Of a test."""

    count: int = field(default=None, metadata={"help": "A count."})
    many: list[int] = field(default=None, metadata={"help": "Some counts."})
    rate: float = field(default=0.1, metadata={"help": "A rate."})
    color: Color | str = field(default="red", metadata={"help": "Declared like the choices of transformers."})

    def __post_init__(self):
        if self.count == 13:
            raise ValueError("count=13 is\nunlucky; take 12")


@dataclass
class Required:
    """Values."""

    needed: str = field(metadata={"help": "Needed."})


@dataclass
class Training(TrainingArguments):
    """Training of ours."""

    output_dir: str = field(default="out", metadata={"help": "A folder."})
    own: bool = field(default=True, metadata={"help": "A switch."})
    learning_rate: float = 1e-3


def parse(*argv):
    return CommandParser(Arguments, prog="tool").parse_args_into_dataclasses(list(argv))[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--count", "2.5"], "argument --count: invalid int value: '2.5'"),
        (["--count", ""], "an argument is an empty string; leave it out, or give it a value"),
        (["--count", "13"], "count=13 is unlucky; take 12"),
        (["--cuont", "3"], "unknown argument --cuont; did you mean --count?"),
        (["--cuont=3"], "unknown argument --cuont; did you mean --count?"),
        (["--nothing_alike"], "unknown argument --nothing_alike; --help"),
        (["value"], "unknown argument value; --help"),
        (["--color", "green"], "argument --color: invalid choice: 'green' (choose from"),
    ],
)
def test_an_invalid_value_ends_with_status_2_and_one_line_that_says_why(argv, words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tool: error: {words}") and line.endswith("--help lists the arguments")


@pytest.mark.parametrize(
    ("cls", "argument", "hint"),
    [
        (Required, "--neede_d", "did you mean --needed?"),  # also if it is required
        (Training, "--lerning_rat", "did you mean --learning_rate?"),
        (Training, "--outdir", "did you mean --output_dir?"),
        (Training, "--device", "--help lists"),
        (Training, "--dropout", "--help lists"),
    ],
)
def test_a_mistyped_argument_gets_the_argument_that_is_meant_and_another_word_none(cls, argument, hint, capsys):
    with pytest.raises(SystemExit, match="2"):
        CommandParser(cls, prog="tool").parse_args_into_dataclasses([argument, "a"])
    assert f"error: unknown argument {argument}; {hint}" in capsys.readouterr().err


def test_values_and_defaults_are_accepted():
    found = parse("--count", "2", "--many", "1", "7", "--color", "blue")
    assert (found.count, found.many, found.rate, Color(found.color)) == (2, [1, 7], 0.1, Color.BLUE)


def help_of(capsys, *argv, cls):
    with pytest.raises(SystemExit) as ended:
        CommandParser(cls, prog="tool").parse_args_into_dataclasses(list(argv))
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_names_types_and_defaults_but_no_empty_default(capsys):
    out = help_of(capsys, "--help", cls=Arguments)
    assert "Values: --count INT A count. --many INT [INT ...] Some counts. --rate FLOAT A rate. (default: 0.1)" in out
    assert "None" not in out and "--help_all" not in out
    assert "--needed TEXT Needed. (required)" in help_of(capsys, "--help", cls=Required)


def test_help_lists_our_arguments_and_help_all_adds_the_arguments_of_the_library(capsys):
    out, everything = help_of(capsys, "--help", cls=Training), help_of(capsys, "--help_all", cls=Training)
    assert "Training of ours: --output_dir TEXT A folder." in out and "--own BOOL A switch. (default: True)" in out
    assert out.endswith("TrainingArguments are accepted too; --help_all lists them.")
    assert "--weight_decay" not in out and "--weight_decay" in everything
    (field_of_library,) = (item for item in fields(TrainingArguments) if item.name == "learning_rate")
    help_text = " ".join(field_of_library.metadata["help"].split())
    assert f"--learning_rate FLOAT {help_text}"[:60] in out  # our field without a help text takes the library's


def test_a_switch_that_is_on_by_default_can_be_switched_off():
    for argv in (["--own", "false"], ["--no_own"]):
        (training,) = CommandParser(Training).parse_args_into_dataclasses([*argv, "--use_cpu"])
        assert training.own is False


def test_a_script_gets_the_dataclasses_that_annotate_its_function(monkeypatch):
    found = []

    def work(arguments: Arguments, training: Training):
        found.extend([arguments.count, training.output_dir])

    monkeypatch.setattr(sys, "argv", ["tool", "--count", "3", "--output_dir", "there", "--use_cpu"])
    run_script(work, "A tool.")
    assert found == [3, "there"]


def fail(error):
    raise error


CORRECTABLE = (
    ValueError("a\n  b"),
    OSError(28, "no space", "f"),
    ImportError("Please install `ray`\nto use ray"),  # of a library that looks for a package itself
    torch.OutOfMemoryError("a b"),
)


@pytest.mark.parametrize("error", CORRECTABLE)
def test_an_error_that_the_user_can_correct_ends_with_one_line_and_status_1(error):
    with pytest.raises(SystemExit) as ended:
        run_command("tool", fail, error)
    assert re.match(r"tool: \w", ended.value.code) and "\n" not in ended.value.code  # nor "[Errno 28]"


@pytest.mark.parametrize("error", [KeyError("run.json"), RuntimeError("shapes"), TypeError("no"), AssertionError()])
def test_a_bug_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        run_command("tool", fail, error)


def test_every_error_keeps_its_traceback_with_neobert_traceback(monkeypatch):
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    with pytest.raises(ValueError, match="bad"):
        run_command("tool", fail, ValueError("bad"))


@pytest.mark.parametrize(
    "module, installed",
    [
        ("datasets", r"-e '\.\[train\]'"),
        ("sentence_transformers.util", r"-e '\.\[embed\]'"),
        ("mteb", r"-e '\.\[mteb\]'"),
        ("sklearn", r"-e '\.\[train\]'"),
    ],
)
def test_the_error_of_a_missing_package_names_the_extra_that_has_it(module, installed):
    with pytest.raises(SystemExit, match=f"No module; install it: pip install {installed}$"):
        run_command("tool", fail, ModuleNotFoundError("No module", name=module))


def test_the_error_of_a_package_that_no_extra_has_names_no_distribution():
    """The name of a module may be the name of somebody else's distribution."""
    with pytest.raises(SystemExit, match=r"^tool: No module$"):
        run_command("tool", fail, ModuleNotFoundError("No module", name="no_extra_has_it"))


def test_ctrl_c_ends_with_status_130():
    with pytest.raises(SystemExit) as ended:
        run_command("tool", fail, KeyboardInterrupt())
    assert ended.value.code == 130


@pytest.mark.slow
def test_a_closed_pipe_ends_the_command_without_a_message():
    """As `neobert tokenize ... | head` closes it."""
    script = "from neobert_hf.runs.commands import run_command\n"
    script += "run_command('tool', lambda: [print(i, flush=True) for i in range(10**6)])"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert (process.wait(timeout=120), process.stderr.read()) == (141, "")
