"""Each room has a budget: code lines of src, lines of tests, pages. Who needs more makes room first (CONTRIBUTING.md)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src/neobert_hf"
# Lines of code at most: without docstrings, comments, blank lines and imports.
CODE = {
    "model": 2100,
    "files": 765,
    "runs": 671,
    "pretraining": 1920,
    "finetuning": 1734,
    "embeddings": 996,
    "hub": 1113,
    "export": 947,
    "cli and __init__": 296,
}
TEST_LINES, PROJECT_TEST_LINES, PAGES, CHANGELOG_LINES = 25_500, 5_395, 20, 60


def code_lines(file):
    """The numbers of the lines of a file that hold code."""
    source = file.read_text("utf-8")
    numbered = enumerate(source.splitlines(), 1)
    kept = {number for number, line in numbered if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(ast.parse(source)):
        is_owner = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_owner and ast.get_docstring(node, clean=False) is not None:
            node = node.body[0]
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        kept -= set(range(node.lineno, node.end_lineno + 1))
    return kept


def num_lines(files):
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


@pytest.mark.parametrize("room", CODE)
def test_a_room_keeps_within_its_budget(room):
    of_cli = [ROOT / "src/neobert_cli.py", *SRC.glob("*.py")]
    files = of_cli if room == "cli and __init__" else [*(SRC / room).rglob("*.py")]
    counts = {file.name: len(code_lines(file)) for file in files}
    total = sum(counts.values())
    assert total <= CODE[room], f"{total} lines of code in {room}, at most {CODE[room]}: {counts}"


def test_every_room_has_a_budget():
    rooms = {file.parent.name for file in SRC.glob("*/*.py")} - {"mini"}  # links to the model
    assert rooms == CODE.keys() - {"cli and __init__"}


def test_tests_pages_and_changelog_keep_within_their_budgets():
    tests = num_lines([ROOT / "conftest.py", *(ROOT / "tests").rglob("*.py")])
    places = ("examples", "benchmarks", "hub_upload")
    projects = num_lines(file for name in places for file in (ROOT / name).glob("**/tests/*.py"))
    assert tests <= TEST_LINES and projects <= PROJECT_TEST_LINES, (tests, projects)
    pages, changelog = len([*(ROOT / "docs").glob("*.md")]), num_lines([ROOT / "CHANGELOG.md"])
    assert pages <= PAGES and changelog <= CHANGELOG_LINES, (pages, changelog)


CODE_OF_THREE_LINES = """
import a
from b import (
    c,
)

# why
def f():
    '''Doc

    More.
    '''
    return [
        c]
"""


def test_only_code_counts(tmp_path):
    (tmp_path / "a.py").write_text(CODE_OF_THREE_LINES)
    assert code_lines(tmp_path / "a.py") == {8, 13, 14}
