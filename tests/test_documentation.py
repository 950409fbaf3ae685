"""The documentation corpus: what `ast` finds, each entry once, nothing run."""

import inspect
import json
import sysconfig
from pathlib import Path

import pytest

from neobert_hf import documentation
from neobert_hf.documentation import Entry, collect_documentation, write_corpus

SOURCE = '''"""A module that says what it is for, at some length."""
raise SystemExit("this must not run")

class Thing:
    """A thing that can be used for this and for that."""

    async def do(self, x: int, *, y=1) -> None:
        """Do the thing with x and, if it is given, with y."""

def silent():
    return 1

def short():
    """Too short."""
'''


@pytest.fixture
def library(tmp_path, monkeypatch):
    """An installed library of four files, one of them not Python, in place of this machine's."""
    (tmp_path / "shop/tests").mkdir(parents=True)
    (tmp_path / "shop/__init__.py").write_text(SOURCE)
    (tmp_path / "shop/copy.py").write_text(SOURCE)
    (tmp_path / "shop/broken.py").write_text("def (:")
    (tmp_path / "shop/tests/test_shop.py").write_text('"""Tests are not documentation for users, so leave them."""')
    monkeypatch.setattr(sysconfig, "get_paths", lambda: dict.fromkeys(("stdlib", "purelib", "platlib"), str(tmp_path)))
    return tmp_path


def test_docstrings_come_with_package_name_and_signature_and_each_once(library):
    entries = collect_documentation(show_progress=False)
    assert sorted(entry.text for entry in entries) == [
        "A module that says what it is for, at some length.",
        "A thing that can be used for this and for that.",
        "Do the thing with x and, if it is given, with y.",
    ]
    method = next(entry for entry in entries if entry.signature)
    assert (
        method.package == "shop" and method.name.endswith("Thing.do") and method.signature == "(self, x: int, *, y=1)"
    )


def test_a_file_that_is_not_python_is_left_out_and_counted(library, caplog):
    with caplog.at_level("INFO", logger="neobert_hf.documentation"):
        collect_documentation(show_progress=False)
    assert "1 of 3 Python files could not be parsed" in caplog.text


def test_docstrings_are_those_that_python_itself_sees():
    root = Path(sysconfig.get_paths()["stdlib"])
    entries = documentation._read_file((root, root / "json/__init__.py"))
    by_name = {entry.name: entry for entry in entries}
    assert by_name["json.loads"].text == inspect.getdoc(json.loads)
    assert by_name["json"].text == inspect.getdoc(json)


def test_the_topics_of_the_language_are_there():
    root = Path(sysconfig.get_paths()["stdlib"])
    topics = documentation._read_file((root, root / "pydoc_data/topics.py"))
    assert len(topics) > 50
    assert all(isinstance(entry, Entry) and entry.package == "python" and entry.text for entry in topics)
    assert "while" in {entry.name for entry in topics}


def test_a_corpus_leaves_nothing_of_an_earlier_one_in_its_folder(library, tmp_path):
    """Else what an earlier corpus held out would be measured on although this one trains on it."""
    folder = tmp_path / "corpus"
    assert write_corpus(folder, num_held_out=1, vocab_size=64) == {"held_out_packages": 0, "held_out": 1, "train": 2}
    for name in ("held_out_packages", "held_out_packages_pairs"):
        (folder / f"{name}.jsonl").write_text("old")
    write_corpus(folder, num_held_out=1, vocab_size=64)
    names = {file.stem for file in folder.glob("*.jsonl")}
    assert names == {"held_out", "held_out_pairs", "train", "train_pairs"}
    texts = [json.loads(line)["text"] for name in ("train", "held_out") for line in (folder / f"{name}.jsonl").open()]
    assert len(set(texts)) == 3


def test_only_the_packages_that_are_asked_for_are_read(library):
    entries = collect_documentation(show_progress=False, packages=["python"])
    assert len(entries) == 3  # one folder stands for all roots here, and the standard library comes first
    with pytest.raises(ValueError, match="no Python files here of nothing"):
        collect_documentation(show_progress=False, packages=["nothing"])
