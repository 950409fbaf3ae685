"""Installation: an extra installs all that its commands and examples import, and all code is installed; editors see its names."""

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools.config.pyprojecttoml import load_file

import neobert_hf
from neobert_cli import commands as neobert_cli

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


def linked(folder, requirement):
    """A folder of links to the packages that a requirement of this package installs, without this package."""
    folder.mkdir()
    for name in {name for name, *_ in required_by([requirement], set())} - {"neobert-hf"}:
        for file in distribution(name).files:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(distribution(name).locate_file(top))
    return folder


EMBED = "embed {0}/a.txt -o {0}/a.npy"
TOKENIZE = "tokenize --files {0}/a.txt --tokenizer_name {1} --output_dir {0}/documents --workers 1"
EXAMPLES = {
    "embed": ("train_contrastive", "train_reranker"),
    "train": ("pretrain_mlm", "finetune_classifier", "finetune_glue", "finetune_tagger", "evaluate_pseudo_perplexity"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "command", "words", "missing"),
    [
        ("embed", EMBED, '"texts": 1', {"mteb", "peft", "matplotlib"}),
        ("train", TOKENIZE, "has 1 documents of", {"mteb", "sentence_transformers", "hypothesis"}),
    ],
)
def test_an_extra_installs_all_that_its_command_and_its_examples_import(tmp_path, extra, command, words, missing):
    """Python sees only a folder of links to the packages of this extra."""
    packages = linked(tmp_path / "packages", f"neobert_hf[{extra}]")
    assert missing <= set(packages_distributions()) - {path.stem for path in packages.iterdir()}
    (packages / "neobert_hf").symlink_to(Path(neobert_hf.__file__).parent)
    (packages / "neobert_cli").symlink_to(Path(neobert_cli.__file__).parent)
    (packages / "neobert_hf.dist-info").mkdir()
    (packages / "neobert_hf.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: neobert_hf\nVersion: 0.0\n")
    folders = [str(packages), str(ROOT / "examples"), str(ROOT / "examples/paper")]
    script = f"import sys; sys.prefix = {sys.prefix!r}; sys.path[:0] = {folders!r}\n"
    script += f"import {', '.join(EXAMPLES[extra])}; from neobert_cli.commands import main; main()"
    (tmp_path / "a.txt").write_text("the quick brown fox\n")
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    argv = command.format(tmp_path, neobert_hf.MINI_MODEL_PATH).split()
    run = [sys.executable, "-I", "-S", "-c", script, *argv]
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and words in done.stdout, done.stderr


@pytest.mark.slow
def test_the_wheel_has_the_scripts_and_no_tests(installed):
    files = {str(file.relative_to(installed / "neobert_hf")) for file in installed.glob("neobert_hf/**/*.*")}
    scripts = {f"examples/{file.name}" for file in (ROOT / "examples").glob("*.py")}
    assert scripts | {"options.json", "examples/accelerate/ddp.yaml", "mini/model.safetensors"} <= files
    assert not [file for file in files if "tests/" in file or "conftest" in file]


@pytest.mark.slow
def test_the_description_names_files_that_the_wheel_installs(installed):
    """An index shows it alone, where a link to a file leads nowhere."""
    (metadata,) = installed.glob("neobert_hf-*.dist-info/METADATA")
    text = metadata.read_text("utf-8")
    named = re.findall(r" \(`([\w./]+)`\)", text)
    assert len(named) > 15 and not re.findall(r"\]\((?!https?:|#)", text)
    assert not [file for file in named if not (installed / "share/doc/neobert_hf" / file).is_file()]


MISSING = [  # what is installed beside the wheel, the command, and the end of its line
    ("neobert_hf", "finetune-classifier", "'pyarrow'; install it: pip install 'neobert_hf[train]'\n"),
    ("neobert_hf", "train-contrastive", "'datasets'; install it: pip install 'neobert_hf[embed]'\n"),
    ("tokenizers", "pretrain-mlm", "; install the package with its dependencies: pip install neobert_hf\n"),
    ("tokenizers", "embed a.txt -o a.npy", "; install the package with its dependencies: pip install neobert_hf\n"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("packages", "command", "line"), MISSING)
def test_a_command_without_its_packages_names_what_installs_them(installed, tmp_path, packages, command, line):
    (tmp_path / "a.txt").write_text("a")
    places = [str(installed), str(linked(tmp_path / "packages", packages))]
    script = f"import sys; sys.path[:0] = {places!r}; from neobert_cli.commands import main; main()"
    run = [sys.executable, "-I", "-S", "-c", script, *command.split()]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and done.stderr.endswith(line), done.stderr


def test_every_folder_of_code_is_a_package():
    """pip would not install a folder without `__init__.py`, or a folder that git ignores."""
    source = ROOT / "src"
    folders = {str(file.parent.relative_to(source)).replace(os.sep, ".") for file in source.rglob("*.py")}
    folders.remove("neobert_hf.mini")  # its code is data, and tests/checkpoints/test_mini.py installs it
    settings = load_file(ROOT / "pyproject.toml")["tool"]["setuptools"]
    assert {*folders, "neobert_hf.examples"} == set(settings["packages"])
    if (ROOT / ".git").exists():
        ignored = ["git", "check-ignore", *map(str, source.rglob("*.py"))]
        assert not subprocess.run(ignored, cwd=ROOT, capture_output=True, text=True).stdout


@pytest.mark.parametrize("room", neobert_hf.NAMESPACES)
def test_the_names_that_editors_see_are_those_of_the_package(room):
    package = import_module(f"neobert_hf.{room}")
    tree = ast.parse(Path(package.__file__).read_text("utf-8"))
    (block,) = [node.body for node in tree.body if isinstance(node, ast.If)]
    seen = [each for node in block for each in node.names]
    assert all(each.name == each.asname for each in seen)  # such a name is public
    assert {each.name for each in seen} == {*package.__all__} - {"MINI_MODEL_PATH"}
    assert all(hasattr(package, each.name) for each in seen)


def test_editors_see_the_namespaces():
    tree = ast.parse(Path(neobert_hf.__file__).read_text("utf-8"))
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
    assert tuple(each.asname for each in blocks[0][0].names) == neobert_hf.NAMESPACES
