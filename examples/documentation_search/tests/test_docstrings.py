"""Reading of documentation: names, signatures, mentions, and isolation of the process that reads."""

import importlib
import inspect
import json
import os
import random
import re
import subprocess
import sys

import docstrings
import pytest
from docstrings import Entry, first_sentence, read, views
from search import import_line

SOURCE = '''"""A module that says what it is for."""
from ._inner import offered, Base
import json

def own(x: int, *, y=1, z=object()) -> None:
    """Do the thing with x and y."""

class Thing(Base):
    """A thing for this and for that."""

    @classmethod
    def make(cls):
        """Make one of them."""

def silent():
    return 1

class _Expression:
    """An expression of polars: every attribute is an expression, and none is true or false."""
    __getattr__ = __eq__ = __ne__ = lambda self, _: self

    def __bool__(self):
        raise TypeError("the truth value of an expression is ambiguous")

expression = _Expression()
'''
INNER = '''class Base:
    """The base of a thing."""

    def shared(self):
        """Do what all things do."""

def offered():
    """Do this or that."""
'''


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A package with a public module, a private one, and one that its import does not load."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/__init__.py").write_text(SOURCE)
    (tmp_path / "shop/_inner.py").write_text(INNER)
    (tmp_path / "shop/exits.py").write_text('"""Importing this ends the process."""\nraise SystemExit(3)\n')
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(scope="module")
def library():
    return {entry.name: entry for entry in read()}


def test_a_package_is_read_under_the_names_that_its_public_modules_offer(shop):
    entries = {entry.name: entry for entry in read(("shop",))}
    names = ("own", "offered", "Base", "Base.shared", "Thing", "Thing.make")
    assert set(entries) == {"shop", *(f"shop.{name}" for name in names)}
    assert entries["shop.own"].signature == "(x: int, *, y=1, z=...)"
    made = Entry("shop", "shop.Thing.make", "(cls)", "Make one of them.", "shop", "Thing.make")
    assert entries["shop.Thing.make"] == made
    assert "shop" not in sys.modules


def test_an_error_names_the_package_that_has_no_documentation():
    with pytest.raises(ValueError, match="no_such_package has no documentation in this Python"):
        read(("json", "no_such_package"))


def test_an_error_shows_why_the_reader_failed(shop):
    with pytest.raises(RuntimeError, match=r"reading shop\.exits failed: exit status 3"):
        read(("shop.exits",))


@pytest.mark.parametrize(
    ("name", "signature", "words"),
    [
        ("time.sleep", None, "Delay execution"),
        ("sorted", "(iterable, /, *, key=None, reverse=False)", "new list"),
        ("len", "(obj, /)", "number of items"),
        ("os.mkdir", "(path, mode=511, *, dir_fd=None)", "Create a directory"),
        ("dict.get", "(self, key, default=None, /)", "value for key"),
        ("socket.socket.connect", "(address)", "Connect the socket"),
        ("os.path.join", None, "pathname components"),
        ("json.JSONEncoder", "", "encoder"),
        ("random.choice", "(seq)", "random element"),
        ("while", "", "while"),
    ],
)
def test_functions_in_c_are_found_under_the_names_that_users_write(library, name, signature, words):
    entry = library[name]
    assert words in entry.text and (signature is None or entry.signature == signature)


def test_the_first_sentence_of_a_topic_is_its_heading(library):
    assert first_sentence(library["assert"].text)[0] == 'The "assert" statement'
    topics = [entry for entry in library.values() if entry.package == "python"]
    assert len(topics) > 50
    assert [entry.name for entry in topics if re.search(r"([*=~^-])\1\1", first_sentence(entry.text)[0])] == []


def test_private_duplicates_and_internal_modules_are_skipped(library):
    entries = [entry for entry in library.values() if entry.package != "python"]
    tops = {entry.package for entry in entries}
    assert not tops & {"distutils", "idlelib", "lib2to3", "posix", "posixpath", "test", "antigravity"}
    assert len(tops) > 120
    assert not [entry.name for entry in entries if any(part.startswith("_") for part in entry.name.split("."))]
    assert not {"json.encoder.JSONEncoder", "random.Random.choice", "unittest.case.TestCase"} & set(library)
    texts = [entry.text for entry in entries if entry.text]
    assert len(set(texts)) == len(texts)


def test_what_all_lists_without_a_docstring_is_an_entry_each_object_once(library):
    silent = {name: entry for name, entry in library.items() if not entry.text}
    assert {"csv.DictReader", "colorsys.rgb_to_hsv", "weakref.ReferenceType", "multiprocessing.Process"} <= set(silent)
    # the first has a docstring, the second is a number, no `__all__` lists the third, and the others are other names
    others = {"json.JSONDecodeError", "csv.QUOTE_ALL", "csv.DictReader.fieldnames", "weakref.ref"}
    assert not others & set(silent) and len(silent) > 100
    things = {}
    for name in set(silent) - {"pdb.set_trace"}:  # pytest replaces it
        module = importlib.import_module(silent[name].module)
        things[name] = thing = getattr(module, silent[name].qualname)
        assert silent[name].qualname in module.__all__ and callable(thing), name
        own = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
        assert not isinstance(own, str), name  # some types have a descriptor for the docstrings of their instances
    assert len(set(map(id, things.values()))) == len(things)


def test_the_text_of_an_entry_is_the_docstring_that_inspect_returns(library):
    for name in ("json.loads", "json", "os.path.join", "shutil.copy", "glob.glob", "statistics.mean", "heapq.nlargest"):
        module, _, attribute = name.rpartition(".")
        thing = getattr(importlib.import_module(module), attribute) if module else importlib.import_module(name)
        assert library[name].text == inspect.getdoc(thing)


@pytest.mark.slow
def test_the_reader_leaves_no_file_ignores_the_environment_and_prints_the_same_twice(tmp_path):
    command = [sys.executable, "-I", "-S", "-B", docstrings.__file__]
    outputs = []
    for secret in ("not-to-be-read", "nor-this"):
        environment = {**os.environ, "HOME": str(tmp_path), "USERPROFILE": str(tmp_path), "SECRET": secret}
        job = json.dumps({"package": "python", "path": []})
        done = subprocess.run(command, input=job, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0 and done.stderr == "" and not list(tmp_path.iterdir())
        assert secret not in done.stdout and str(tmp_path) not in done.stdout
        outputs.append(done.stdout)
    assert len(json.loads(outputs[0])) > 4000 and outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Store a\n  file.  Then more.\n\nEnd.", ["Store a file.", "Then more.\n\nEnd."]),
        ("One sentence", ["One sentence"]),
        ("", [""]),
    ],
)
def test_an_entry_has_a_view_of_its_first_sentence_and_one_of_the_rest(text, expected):
    name = "ftplib FTP stor Binary file"
    found = views(Entry("ftplib", "ftplib.FTP.storBinary_file", "(x)", text))
    assert found == [f"{name}\n{part}" if part else name for part in expected]


STATEMENTS = """
import inspect
failed = []
for line, qualname in {cases!r}:
    scope = {{}}
    try:
        exec(line, scope)
        first, *rest = qualname.split(".")
        found = scope[first] if first else None
        for name in rest:  # enum.property has no value on the class
            found = inspect.getattr_static(found, name)
    except BaseException as error:
        failed.append((line, qualname, repr(error)))
print(failed)
"""


def test_the_import_lines_of_the_standard_library_run_and_give_the_object(library):
    lines = {name: import_line(entry) for name, entry in library.items()}
    assert lines["assert"] == "language topic" and lines["len"] == lines["str.join"] == "built in"
    assert lines["os.path.join"] == "from os.path import join" and lines["os.path"] == "import os.path"
    assert lines["datetime.datetime.now"] == "from datetime import datetime"
    cases = [(line, library[name].qualname) for name, line in lines.items() if line.startswith(("import ", "from "))]
    assert len(cases) > 5000
    script = STATEMENTS.format(cases=random.Random(0).sample(cases, 200))
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=os.path.dirname(sys.executable), timeout=170)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
