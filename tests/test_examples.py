"""The examples are short, use public names only (names on the page docs/reference.md), and have a short help."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAPER = [file for name in ("evaluate", "finetune") for file in sorted((ROOT / "examples/paper").glob(f"{name}_*.py"))]
EXAMPLES = [*sorted((ROOT / "examples").glob("[!_]*.py")), *PAPER]
SHIPPED = "contextual_neobert.py"  # it is saved beside the files of the model, and imports those
NESTED = sorted((ROOT / "examples").glob("*/**/*.py"))
PROJECTS = [file for file in NESTED if file.name != SHIPPED and file.parent.name != "tests"]


def public_names():
    page = (ROOT / "docs/reference.md").read_text("utf-8")
    names, module = set(), ""
    for kind, name in re.findall(
        r"^\.\. (autoclass|autofunction|currentmodule|py:data):: ([\w.]+)", page, re.MULTILINE
    ):
        if kind == "currentmodule":
            module = name
        else:
            names.add(name if name.startswith("neobert_hf.") else f"{module}.{name}")
    return names


def used_names(source):
    """Full names that a script imports from the package, also as `neobert_hf.NAME` after `import neobert_hf`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "neobert_hf":
                    assert alias.name == "neobert_hf" and alias.asname is None, f"import {alias.name}: import its names"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "neobert_hf":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "neobert_hf":
            yield f"neobert_hf.{node.attr}"


def private_names(source):
    return set(used_names(source)) - public_names() - {"neobert_hf.__version__"}


# Programs that people run; the others are scripts that people copy.
LONGER = {"serve": 300}


@pytest.mark.parametrize("example", sorted({*EXAMPLES, *PROJECTS}), ids=lambda file: file.stem)
def test_an_example_uses_public_names_only(example):
    assert private_names(example.read_text("utf-8")) == set()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_has_at_most_100_lines(example):
    assert len(example.read_text("utf-8").splitlines()) <= LONGER.get(example.stem, 100)


def test_every_public_name_exists():
    for name in public_names():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
