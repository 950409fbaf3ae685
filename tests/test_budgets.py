"""The size of the project, by numbers of pyproject.toml that only fall: who adds something removes as much (CONTRIBUTING.md)."""

import ast
import io
import tokenize
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
LIMITS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["neobert_hf"]["size"]
LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER", "ENCODING"}


def num_tokens(source):
    """Tokens of Python without docstrings, comments and imports, so that a line with four ideas counts as four lines."""
    left_out = set()
    for node in ast.walk(ast.parse(source)):
        is_owner = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_owner and ast.get_docstring(node, clean=False) is not None:
            node = node.body[0]
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        left_out |= set(range(node.lineno, node.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(tokenize.tok_name[each.type] not in LAYOUT and each.start[0] not in left_out for each in tokens)


def num_lines(files):
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


def test_the_library_and_its_scripts_have_at_most_the_tokens_of_pyproject():
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    found = sum(num_tokens(file.read_text("utf-8")) for file in files if not file.is_symlink())
    assert found <= LIMITS["tokens"], f"{found} tokens, at most {LIMITS['tokens']}; remove as many"
    assert found > LIMITS["tokens"] - 1000, f"{found} tokens; lower the number in pyproject.toml"


def test_tests_pages_and_changelog_have_at_most_the_lines_of_pyproject():
    roots = (ROOT / name for name in ("examples", "benchmarks", "hub_upload"))
    projects = [file for root in roots for file in root.glob("**/tests/*.py")]
    pages = [*(ROOT / "docs").glob("*.md")]
    found = {"test_lines": num_lines([ROOT / "conftest.py", *(ROOT / "tests").rglob("*.py"), *projects])}
    found |= {"pages": len(pages), "changelog_lines": num_lines([ROOT / "CHANGELOG.md"])}
    found["page_kilobytes"] = sum(page.stat().st_size for page in pages) // 1000
    assert {name: value for name, value in found.items() if value > LIMITS[name]} == {}
