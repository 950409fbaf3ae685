"""Parts of all commands: bounds of numbers, and errors on one line."""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Annotated, ClassVar

import pytest
import torch
from transformers import TrainingArguments

from neobert_hf.runs.commands import Bounds, CommandParser, run_command


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Inherited:
    rate: float = field(default=0.1, metadata={"help": "A rate."})


@dataclass
class Arguments(Inherited):
    """Values."""

    BOUNDS: ClassVar = {"rate": Bounds(above=0, most=1)}
    count: Annotated[int, Bounds(2, 1000)] = field(default=None, metadata={"help": "A count."})
    many: Annotated[list[int], Bounds(1)] = field(default=None, metadata={"help": "Some counts."})
    name: str = field(default=None, metadata={"help": "A name."})
    maybe: str = field(default="", metadata={"help": "May be empty."})
    free: float = field(default=0.0, metadata={"help": "Any number."})
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

    GROUPS: ClassVar = {"Output": ("output_dir",), None: ("seed",)}
    output_dir: str = field(default="out", metadata={"help": "A folder."})
    own: bool = field(default=True, metadata={"help": "A switch."})
    learning_rate: float = 1e-3
    seed: int = 7


def parse(*argv):
    return CommandParser(Arguments, prog="tool").parse_args_into_dataclasses(list(argv))[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--count", "1"], "argument --count: 1 is out of bounds: at least 2, at most 1,000"),
        (["--count", "1001"], "at most 1,000"),
        (["--count", ""], "'' is not an integer"),
        (["--count", "2.5"], "'2.5' is not an integer"),
        (["--many", "3", "0"], "argument --many: 0 is out of bounds: at least 1"),
        (["--rate", "0"], "argument --rate: 0 is out of bounds: above 0, at most 1"),
        (["--rate", "nan"], "out of bounds"),
        (["--free", "inf"], "out of bounds: finite"),
        (["--many", "99999999999999999999"], "out of bounds"),
        (["--many", "9" * 400], "out of bounds"),
        (["--name", " "], "argument --name: an empty string"),
        (["--count", "13"], "tool: error: count=13 is unlucky; take 12"),
        (["--cuont", "3"], "--cuont"),
        (["--color", "green"], "argument --color: invalid choice: 'green' (choose from 'red', 'blue')"),
    ],
)
def test_an_invalid_value_ends_with_status_2_and_one_line_that_says_why(argv, words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and line.startswith("tool: error: ")


def test_values_within_bounds_and_defaults_are_accepted():
    found = parse("--count", "2", "--many", "1", "7", "--rate", "1e-3", "--maybe", "", "--free", "-1.5")
    assert (found.count, found.many, found.rate, found.name, found.maybe, found.free) == (
        2,
        [1, 7],
        1e-3,
        None,
        "",
        -1.5,
    )


def help_of(capsys, *argv, cls=Arguments):
    with pytest.raises(SystemExit) as ended:
        CommandParser(cls, prog="tool").parse_args_into_dataclasses(list(argv))
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_names_bounds_and_defaults_but_no_empty_default(capsys):
    out = help_of(capsys, "--help")
    assert "A count. (at least 2, at most 1,000)" in out and "A rate. (above 0, at most 1) (default: 0.1)" in out
    assert "--many INT ... Some counts." in out and "(default: red)" in out and "(default: 0.0)" in out
    assert "None" not in out and "(default: )" not in out and "--help_all" not in out
    assert "--needed TEXT Needed. (required)" in help_of(capsys, "--help", cls=Required)


def test_help_lists_our_arguments_by_group_and_help_all_adds_the_arguments_of_the_library(capsys):
    out, everything = help_of(capsys, "--help", cls=Training), help_of(capsys, "--help_all", cls=Training)
    titles = [out.index(title) for title in ("Output:", "Training of ours:")]
    assert titles == sorted(titles) and titles[0] < out.index("--output_dir") < titles[1] < out.index(
        "--own [BOOL], --no_own"
    )
    assert out.endswith("All arguments of transformers.TrainingArguments are accepted too; --help_all lists them.")
    assert "--weight_decay" not in out and "--weight_decay" in everything
    assert "--seed" not in out and "--seed" in everything  # our field, with the group title None
    (field_of_library,) = (each for each in fields(TrainingArguments) if each.name == "learning_rate")
    help_text = " ".join(field_of_library.metadata["help"].split())
    assert f"--learning_rate FLOAT {help_text}"[:60] in out  # our field without a help text takes the library's


def fail(error):
    raise error


@pytest.mark.parametrize("error", [ValueError("a\n  b"), OSError(28, "no space", "f"), torch.OutOfMemoryError("a b")])
def test_an_error_that_the_user_can_correct_ends_with_one_line_and_status_1(error):
    with pytest.raises(SystemExit) as ended:
        run_command("tool", fail, error)
    assert ended.value.code.startswith("tool: ") and "\n" not in ended.value.code


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
        ("sentence_transformers.util", r"-e '\.\[demo\]'"),
        ("mteb", r"-e '\.\[mteb\]'"),
        ("sklearn", r"-e '\.\[train\]'"),
        ("onnx", r"-e '\.\[export\]'"),
        ("Stemmer", r"-e '\.\[bench\]'"),
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
