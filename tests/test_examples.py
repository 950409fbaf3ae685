"""The examples are short, and use public names only: those that docs/reference.md lists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def public_names():
    """Full names of the reference: `neobert_hf.sentence_transformer`, `neobert_hf.runs.folders.lock_run`, ..."""
    page = (ROOT / "docs/reference.md").read_text("utf-8")
    names = re.findall(r"^\.\. auto(?:class|function|data):: ([\w.]+)", page, re.MULTILINE)
    return {name if name.startswith("neobert_hf.") else f"neobert_hf.{name}" for name in names}


def used_names(source):
    """Full names that a script imports from the package, also as `neobert_hf.NAME` after `import neobert_hf`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == "neobert_hf":
                    assert each.name == "neobert_hf" and each.asname is None, f"import {each.name}: import its names"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "neobert_hf":
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "neobert_hf":
            yield f"neobert_hf.{node.attr}"


def private_names(source):
    return set(used_names(source)) - public_names() - {"neobert_hf.__version__"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_uses_public_names_only(example):
    assert private_names(example.read_text("utf-8")) == set()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_has_at_most_100_lines(example):
    assert len(example.read_text("utf-8").splitlines()) <= 100


def test_a_private_name_is_found_however_it_is_imported():
    source = "import neobert_hf\nfrom neobert_hf.runs.folders import lock_run, _check_run\n"
    source += "neobert_hf.best_dtype(), neobert_hf.transformers, neobert_hf.__version__\n"
    assert private_names(source) == {"neobert_hf.runs.folders._check_run", "neobert_hf.transformers"}
