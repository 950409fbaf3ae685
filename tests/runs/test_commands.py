"""What all scripts share: help, and errors on one line."""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum

import pytest
import torch
from transformers import TrainingArguments

from neobert_hf.files import run_command
from neobert_hf.runs import CommandParser


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


def parse(*argv, cls=Arguments):
    return CommandParser(cls, prog="tool").parse_args_into_dataclasses(list(argv))[0]


INVALID = [  # arguments, their class, and the words of the error
    (["--count", "2.5"], Arguments, "argument --count: invalid int value: '2.5'"),
    (["--count", ""], Arguments, "an argument is an empty string; leave it out, or give it a value"),
    (["--count", "13"], Arguments, "count=13 is unlucky; take 12"),
    (["--cuont", "3"], Arguments, "unknown argument --cuont; did you mean --count?"),
    (["--cuont=3"], Arguments, "unknown argument --cuont; did you mean --count?"),
    (["--nothing_alike"], Arguments, "unknown argument --nothing_alike; --help"),
    (["value"], Arguments, "unknown argument value; --help"),
    (["--color", "green"], Arguments, "argument --color: invalid choice: 'green' (choose from"),
    (["--neede_d", "a"], Required, "unknown argument --neede_d; did you mean --needed?"),  # also if it is required
    (["--lerning_rat", "a"], Training, "unknown argument --lerning_rat; did you mean --learning_rate?"),
    (["--outdir", "a"], Training, "unknown argument --outdir; did you mean --output_dir?"),
    (["--device", "a"], Training, "unknown argument --device; --help lists"),
    (["--dropout", "a"], Training, "unknown argument --dropout; --help lists"),
]


@pytest.mark.parametrize(("argv", "cls", "words"), INVALID)
def test_an_invalid_value_ends_with_status_2_and_one_line_that_says_why(argv, cls, words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(*argv, cls=cls)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tool: error: {words}") and line.endswith("lists the arguments")


def test_values_and_defaults_are_accepted_and_a_switch_can_be_switched_off():
    found = parse("--count", "2", "--many", "1", "7", "--color", "blue")
    assert (found.count, found.many, found.rate, Color(found.color)) == (2, [1, 7], 0.1, Color.BLUE)
    for argv in (["--own", "false"], ["--no_own"]):
        assert parse(*argv, "--use_cpu", cls=Training).own is False


def help_of(capsys, option, cls):
    with pytest.raises(SystemExit) as ended:
        parse(option, cls=cls)
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_names_types_and_defaults(capsys):
    out = help_of(capsys, "--help", Arguments)
    assert "Values: --count INT A count. --many INT [INT ...] Some counts. --rate FLOAT A rate. (default: 0.1)" in out
    assert "None" not in out and "--own [BOOL]" in help_of(capsys, "--help", Training)


def fail(error):
    raise error


MISSING = "No module; install it: pip install 'neobert_hf[{}]'"
WHOLE = "install the package with its dependencies: pip install neobert_hf"
ENDS = [  # an error that the user can correct, and the line that ends the command
    (ValueError("a\n  b"), "a b"),
    (OSError(28, "no space", "f"), "no space"),  # and no "[Errno 28]"
    # of a library that looks itself
    (ImportError("Please install `ray`\nto use ray"), "Please install `ray` to use ray"),
    (torch.OutOfMemoryError("a b"), "a b"),
    *((ModuleNotFoundError("No module", name=name), MISSING.format("train")) for name in ("datasets", "sklearn")),
    (ModuleNotFoundError("No module", name="sentence_transformers.util"), MISSING.format("embed")),
    (ModuleNotFoundError("No module", name="mteb"), MISSING.format("mteb")),
    (ModuleNotFoundError("No module", name="torch"), f"No module; {WHOLE}"),
    # the name of a module may be the name of somebody else's distribution
    (ModuleNotFoundError("No module", name="no_extra_has_it"), "No module"),
]


@pytest.mark.parametrize(("error", "line"), ENDS)
def test_an_error_that_the_user_can_correct_ends_with_one_line_and_status_1(error, line):
    with pytest.raises(SystemExit) as ended:
        run_command("tool", fail, error)
    found = ended.value.code
    assert found == f"tool: {line}" if isinstance(error, ModuleNotFoundError) else found.startswith(f"tool: {line}")
    assert "\n" not in found


def test_the_extra_of_the_command_is_named_if_it_installs_the_module():
    for extra, module, named in [("embed", "datasets", "embed"), ("embed", "markitdown", "documents")]:
        with pytest.raises(SystemExit, match=re.escape(MISSING.format(named))):
            run_command("tool", fail, ModuleNotFoundError("No module", name=module), extra=extra)


def test_a_bug_keeps_its_traceback_and_every_error_with_neobert_traceback(monkeypatch):
    for error in (KeyError("run.json"), RuntimeError("shapes"), TypeError("no"), AssertionError()):
        with pytest.raises(type(error)):
            run_command("tool", fail, error)
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    with pytest.raises(ValueError, match="bad"):
        run_command("tool", fail, ValueError("bad"))


@pytest.mark.slow
def test_a_closed_pipe_ends_the_command_without_a_message():
    """As `neobert tokenize ... | head` closes it."""
    script = "from neobert_hf.runs.commands import run_command\n"
    script += "run_command('tool', lambda: [print(i, flush=True) for i in range(10**6)])"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", script], stdout=pipe, stderr=pipe, text=True)
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert (process.wait(timeout=120), process.stderr.read()) == (141, "")
