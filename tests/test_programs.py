"""The page "In other programs": each program is installed into an environment of its own, and prints what the page shows.

make test-programs                     (all; .venv-programs keeps the environments)
python -m pytest -m runtime tests/test_programs.py -k KeyBERT
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import pytest
from compat import install, share

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/other_programs.md").read_text("utf-8")
ENVIRONMENTS = ROOT / ".venv-programs"
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
FOLDERS = re.search(r"```python\n(.*?)```", SECTIONS.pop("The folders"), re.DOTALL)[1]
ROWS = re.findall(r"^\| \[(.+?)\]\(#.+?\) \| (\S+) (\S+) \| ([^ |,]+)", PAGE, re.MULTILINE)
TESTED = {title: (package, tested, transformers) for title, package, tested, transformers in ROWS}
SNIPPETS = [
    pytest.param(title, code, shown, id=f"{title} {number}")
    for title, text in SECTIONS.items()
    for number, (code, shown) in enumerate(re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL), 1)
]


def environment(title: str) -> Path:
    lines = re.findall(r"^pip install (.+)", SECTIONS[title], re.MULTILINE)
    if not lines:
        return Path(sys.executable)
    package, tested, transformers = TESTED[title]
    folder = ENVIRONMENTS / package
    python, installed = folder / "bin/python", folder / "installed"
    constraints = f"{package}=={tested}\ntorch=={version('torch')}\n"
    # the running environment's datasets needs the huggingface_hub of transformers 5
    datasets = ["datasets<4.5"] if transformers.startswith("4.") else []
    wanted = "\n".join([constraints, *lines, *datasets])
    if not installed.exists() or installed.read_text() != wanted:
        venv.create(folder, clear=True)
        share(folder, [sysconfig.get_paths()["purelib"]])
        (folder / "constraints.txt").write_text(constraints)
        for line in lines:
            install(python, "--constraint", folder / "constraints.txt", *shlex.split(line), *datasets)
        installed.write_text(wanted)
    return python


def run(python: Path, code: str, folder: Path) -> str:
    """Run a snippet as a file, offline; it sees this library only if it names it."""
    own = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules"), "PYTHONPATH": ""}
    if "neobert_hf" in code:
        own["PYTHONPATH"] = str(ROOT / "src")
    (folder / "snippet.py").write_text(code, "utf-8")
    options = {"cwd": folder, "env": os.environ | own, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([python, "snippet.py"], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    run(Path(sys.executable), FOLDERS, folder)
    return folder


@pytest.mark.runtime
@pytest.mark.parametrize("title, code, shown", SNIPPETS)
def test_a_program_prints_what_the_page_shows(title, code, shown, folders, tmp_path):
    """With the versions of the page's table."""
    python = environment(title)
    package, tested, transformers = TESTED[title]
    versions = f"from importlib.metadata import version; print(version({package!r}), version('transformers'))"
    found = run(python, versions, tmp_path).split()
    assert found == [tested, version("transformers") if transformers == "none" else transformers]
    shutil.copytree(folders, tmp_path, dirs_exist_ok=True)
    printed = run(python, code, tmp_path)
    assert f"\n{printed}".endswith(f"\n{shown}"), printed


def test_each_program_has_a_row_and_each_row_a_program():
    """And each snippet has its output: otherwise no test would run it."""
    assert [*TESTED] == [*SECTIONS]
    assert len(SNIPPETS) == PAGE.count("```python") - 1
    assert all(param.values[-1] for param in SNIPPETS)
