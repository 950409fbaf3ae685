"""Installation: the extra `demo` installs all that the documentation search imports, and every folder of code is installed."""

import os
import re
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest

pytest.importorskip(
    "sentence_transformers", reason="the demo embeds with sentence-transformers (pip install -e .[demo])"
)

from packaging.requirements import Requirement
from setuptools import find_packages

import neobert_hf

ROOT = Path(__file__).parents[1]


def required_by(requirements, found, extras=("",)):
    """Add to `found` the names of the required distributions and, recursively, of the distributions that these require."""
    for requirement in map(Requirement, requirements):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        applies = not requirement.marker or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        if applies and name not in found:
            found.add(name)
            required_by(distribution(name).requires or (), found, ("", *requirement.extras))
    return found


def test_the_extra_demo_installs_all_that_search_imports(tmp_path):
    """Python sees only a folder of links to the packages of this extra."""
    for name in required_by(["neobert_hf[demo]"], set()) - {"neobert-hf"}:
        for file in distribution(name).files:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(distribution(name).locate_file(top))
    missing = set(packages_distributions()) - {path.stem for path in tmp_path.iterdir()}
    assert {"datasets", "accelerate", "pyarrow"} <= missing
    (tmp_path / "neobert_hf").symlink_to(Path(neobert_hf.__file__).parent)
    script = f"import sys; sys.prefix = {sys.prefix!r}; sys.path.insert(0, {str(tmp_path)!r})\n"
    search = ROOT / "examples/documentation_search/search.py"
    script += f"import runpy; sys.path.insert(0, {str(search.parent)!r}); runpy.run_path({str(search)!r}, run_name='__main__')"
    command = [sys.executable, "-I", "-S", "-c", script, "a bar of progress", "--package", "tqdm"]
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "tqdm" in done.stdout, done.stderr


def test_every_folder_of_code_is_a_package():
    """pip would not install a folder without `__init__.py`, or a folder that git ignores."""
    source = ROOT / "src/neobert_hf"
    folders = {str(file.parent.relative_to(source.parent)).replace(os.sep, ".") for file in source.rglob("*.py")}
    assert folders == set(find_packages(str(source.parent)))
    if (ROOT / ".git").exists():
        ignored = ["git", "check-ignore", *map(str, source.rglob("*.py"))]
        assert not subprocess.run(ignored, cwd=ROOT, capture_output=True, text=True).stdout
