"""Installation: an extra installs all that its command imports, every folder of code is installed, and imports go down."""

import os
import re
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest

pytest.importorskip("sentence_transformers", reason="this test runs neobert embed (pip install -e .[embed])")

from packaging.requirements import Requirement
from setuptools import find_packages

import neobert_cli
import neobert_hf

ROOT = Path(__file__).parents[1]


def required_by(requirements, found, extras=("",)):
    """Add to `found` the names, with extras, of the required distributions and, recursively, of those that these require."""
    for requirement in map(Requirement, requirements):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        applies = not requirement.marker or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
        if applies and (name, *requirement.extras) not in found:
            found.add((name, *requirement.extras))
            required_by(distribution(name).requires or (), found, ("", *requirement.extras))
    return found


def test_the_extra_embed_installs_all_that_neobert_embed_imports(tmp_path):
    """Python sees only a folder of links to the packages of this extra."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in {name for name, *_ in required_by(["neobert_hf[embed]"], set())} - {"neobert-hf"}:
        for file in distribution(name).files:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(distribution(name).locate_file(top))
    missing = set(packages_distributions()) - {path.stem for path in packages.iterdir()}
    assert {"mteb", "peft", "matplotlib"} <= missing
    (packages / "neobert_hf").symlink_to(Path(neobert_hf.__file__).parent)
    (packages / "neobert_cli.py").symlink_to(neobert_cli.__file__)
    (packages / "neobert_hf.dist-info").mkdir()
    (packages / "neobert_hf.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: neobert_hf\nVersion: 0.0\n")
    script = f"import sys; sys.prefix = {sys.prefix!r}; sys.path.insert(0, {str(packages)!r})\n"
    script += "from neobert_cli import main; main()"
    (tmp_path / "a.txt").write_text("the quick brown fox\n")
    embed = ["embed", str(tmp_path / "a.txt"), "-o", str(tmp_path / "a.npy")]
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-S", "-c", script, *embed]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and '"texts": 1' in done.stdout, done.stderr


def test_every_folder_of_code_is_a_package():
    """pip would not install a folder without `__init__.py`, or a folder that git ignores."""
    source = ROOT / "src/neobert_hf"
    folders = {str(file.parent.relative_to(source.parent)).replace(os.sep, ".") for file in source.rglob("*.py")}
    assert folders == set(find_packages(str(source.parent)))
    if (ROOT / ".git").exists():
        ignored = ["git", "check-ignore", *map(str, source.rglob("*.py"))]
        assert not subprocess.run(ignored, cwd=ROOT, capture_output=True, text=True).stdout
