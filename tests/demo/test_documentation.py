"""Collection of documentation: names, signatures, duplicates, isolation of the reader, and cache."""

import inspect
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from neobert_hf.data.arrays import CACHE
from neobert_hf.demo import docstrings, documentation
from neobert_hf.demo.documentation import collect_documentation

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
    """One installed package of five files, one of them invalid, instead of the packages of this machine."""
    (tmp_path / "site/shop/tests").mkdir(parents=True)
    (tmp_path / "site/shop/__init__.py").write_text(SOURCE)
    (tmp_path / "site/shop/copy.py").write_text(SOURCE)
    (tmp_path / "site/shop/broken.py").write_text("def (:")
    (tmp_path / "site/shop/fast.pyi").write_text(
        'def weigh(thing: Thing) -> float:\n    """Tell how heavy a thing is, which compiled code finds out."""\n'
    )
    (tmp_path / "site/shop/tests/test_shop.py").write_text(
        '"""Tests are not documentation for users, so leave them."""'
    )
    paths = sysconfig.get_paths() | dict.fromkeys(("purelib", "platlib"), str(tmp_path / "site"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    return tmp_path / "site"


@pytest.fixture(scope="module")
def cache():
    """The cache that all tests share, since reading the standard library takes seconds."""
    return CACHE


@pytest.fixture(scope="module")
def standard_library(cache):
    """The entries of the standard library, by name."""
    entries = collect_documentation(False, ["python"], cache)
    return {entry.name: entry for entry in entries}


def collect(library, packages=("shop",)):
    return collect_documentation(False, packages, library.parent / "cache")


def test_each_docstring_of_sources_and_stubs_is_found_once_with_package_name_and_signature(library):
    entries = collect(library)
    assert sorted(entry.text for entry in entries) == [
        "A module that says what it is for, at some length.",
        "A thing that can be used for this and for that.",
        "Do the thing with x and, if it is given, with y.",
        "Tell how heavy a thing is, which compiled code finds out.",
    ]
    signatures = {entry.name: entry.signature for entry in entries if entry.signature}
    assert signatures == {"shop.Thing.do": "(self, x: int, *, y=1)", "shop.fast.weigh": "(thing: Thing)"}
    assert {entry.package for entry in entries} == {"shop"}


def test_a_file_that_is_not_python_is_skipped_and_counted(library, caplog):
    with caplog.at_level("INFO", logger="neobert_hf.demo.documentation"):
        collect(library)
    assert "1 of 4 Python files could not be parsed" in caplog.text


def test_uses_are_the_files_of_the_package_whose_code_has_every_part_of_the_public_name(library):
    """Imports, calls and attributes count; local variables, strings and files outside the package do not."""
    runs = SOURCE.replace('raise SystemExit("this must not run")', "")  # code after it would count as never used
    (library / "shop/__init__.py").write_text(runs)
    (library / "shop/copy.py").unlink()
    (library / "shop/a.py").write_text("from . import Thing\nThing().do(1)")
    (library / "shop/b.py").write_text("import shop.fast as quick\n\ndef f(thing):\n    return quick.weigh(thing.do)")
    (library / "shop/c.py").write_text(
        "def f():\n    weigh = 'Thing.do'  # Thing.do, shop.fast.weigh\n    return weigh"
    )
    (library / "other.py").write_text("from shop import Thing\nfrom shop.fast import weigh")
    uses = {entry.public_name: entry.uses for entry in collect(library)}
    # `__init__.py` defines Thing and do, `a.py` uses both; only `b.py` imports shop, and weighs
    assert uses == {"shop": 1, "shop.Thing": 2, "shop.Thing.do": 2, "shop.fast.weigh": 1}


def test_uses_of_the_standard_library_are_counted_in_its_modules(standard_library):
    """Compared with a count of words in the sources, which also sees comments, strings and local variables."""
    sources = [
        file.read_text("utf-8", "replace")
        for file in Path(os.__file__).parent.rglob("*.py")
        if not {"site-packages", "test", "tests", "idlelib"} & set(file.parts)
    ]
    for name, words in {
        "os.remove": ("os", "remove"),
        "list.append": ("append",),
        "shutil.rmtree": ("shutil", "rmtree"),
        "collections.Counter": ("collections", "Counter"),
    }.items():
        containing = sum(all(re.search(rf"\b{word}\b", source) for word in words) for source in sources)
        assert 0 < standard_library[name].uses <= containing, name
    assert standard_library["os.remove"].uses > 5 > standard_library["ftplib.FTP.delete"].uses
    assert standard_library["while"].uses == 0


@pytest.mark.parametrize(
    ("name", "signature", "words"),
    [
        ("time.sleep", None, "Delay execution"),
        ("sorted", "(iterable, /, *, key=None, reverse=False)", "new list"),
        ("len", "(obj, /)", "number of items"),
        ("math.sqrt", "(x, /)", "square root"),
        ("os.mkdir", "(path, mode=511, *, dir_fd=None)", "Create a directory"),
        ("dict.get", "(self, key, default=None, /)", "value for key"),
        ("list.append", "(self, object, /)", "end of the list"),
        ("str.join", "(self, iterable, /)", "Concatenate"),
        ("socket.socket.connect", "(address)", "Connect the socket"),
        ("os.path.join", None, "pathname components"),
        ("json.dumps", None, "Serialize"),
        ("json.JSONEncoder", None, "encoder"),
        ("type", "", "the object's type"),
        ("random.choice", "(seq)", "random element"),
        ("while", "", "while"),
    ],
)
def test_functions_in_c_are_found_under_the_names_that_users_write(standard_library, name, signature, words):
    entry = standard_library[name]
    assert words in entry.text and (signature is None or entry.signature == signature)


def test_private_duplicates_and_internal_modules_are_skipped(standard_library):
    entries = [entry for entry in standard_library.values() if entry.package != "python"]
    tops = {entry.package for entry in entries}
    assert (
        not tops & {"distutils", "idlelib", "lib2to3", "posix", "posixpath", "test", "antigravity"} and len(tops) > 120
    )
    assert not [entry.name for entry in entries if any(part.startswith("_") for part in entry.name.split("."))]
    assert not {"json.encoder.JSONEncoder", "random.Random.choice", "unittest.case.TestCase"} & set(standard_library)


def test_every_entry_equals_the_docstring_that_inspect_returns(standard_library):
    checked = 0
    for name in ("json.loads", "json", "os.path.join", "shutil.copy", "glob.glob", "statistics.mean", "heapq.nlargest"):
        module, _, attribute = name.rpartition(".")
        thing = getattr(sys.modules[module], attribute) if module else __import__(name)
        assert standard_library[name].text == inspect.getdoc(thing)
        checked += 1
    assert checked == 7


@pytest.mark.parametrize("package", ["json", "os.path", "builtins"])
def test_a_single_module_of_the_standard_library_can_be_collected(standard_library, cache, package):
    entries = collect_documentation(False, [package], cache)
    assert len(entries) > 5 and all(entry in standard_library.values() for entry in entries)
    if package != "builtins":
        assert all(f"{entry.name}.".startswith(f"{package}.") for entry in entries)


def test_the_reader_prints_nothing_leaves_no_file_and_ignores_the_environment(tmp_path):
    command = [sys.executable, "-I", "-S", "-B", docstrings.__file__]
    outputs = []
    for secret in ("not-to-be-read", "nor-this"):
        environment = {**os.environ, "HOME": str(tmp_path), "USERPROFILE": str(tmp_path), "SECRET": secret}
        done = subprocess.run(command, input="{}", capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0 and done.stderr == "" and not list(tmp_path.iterdir())
        assert secret not in done.stdout and str(tmp_path) not in done.stdout
        outputs.append(done.stdout)
    assert len(json.loads(outputs[0])) > 4000 and outputs[0] == outputs[1]


def test_a_script_without_a_main_guard_is_not_started_again(library, tmp_path):
    """Under spawn, as on macOS and Windows, a process pool would run the script again in each worker."""
    script = f"""import multiprocessing, sysconfig
multiprocessing.set_start_method("spawn")
print("started")
paths = sysconfig.get_paths() | dict.fromkeys(("purelib", "platlib"), {str(library)!r})
sysconfig.get_paths = lambda *arguments, **options: paths
from neobert_hf.demo.documentation import collect_documentation
print(len(collect_documentation(False, ["shop"], {str(tmp_path / "cache")!r})))
"""
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(documentation.__file__).parents[2])}
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.split() == ["started", "4"], done.stderr


def test_entries_are_cached_until_a_file_changes_and_recomputed_after_damage(library, monkeypatch, caplog):
    first = collect(library)
    read = documentation._run_reader
    monkeypatch.setattr(documentation, "_run_reader", None)
    assert collect(library) == first
    monkeypatch.setattr(documentation, "_run_reader", read)
    (kept,) = (library.parent / "cache").iterdir()
    content = kept.read_bytes()
    kept.write_bytes(content[:-20] + b"X" + content[-19:])
    with caplog.at_level("WARNING", logger="neobert_hf.data.arrays"):
        assert collect(library) == first
    assert f"{kept} is damaged and will be recomputed: its checksum is wrong" in caplog.text
    (library / "shop/new.py").write_text('"""One more module, which was not there before at all."""')
    assert len(collect(library)) == len(first) + 1


def test_the_error_for_a_failed_reader_shows_the_cause(library, monkeypatch):
    monkeypatch.setattr(docstrings, "__file__", str(library / "shop/broken.py"))
    with pytest.raises(RuntimeError, match=r"(?s)reading the documentation with .*SyntaxError"):
        collect(library)


def test_the_error_names_a_package_that_is_not_installed(library):
    with pytest.raises(ValueError, match="no documentation found for nothing"):
        collect(library, ["shop", "nothing"])
    with pytest.raises(ValueError, match=r"no documentation found for shop\.nothing"):
        collect(library, ["shop.nothing"])
    assert [entry.name for entry in collect(library, ["shop.fast"])] == ["shop.fast.weigh"]
    with pytest.raises(ValueError, match=r"packages=\[\] has no name"):
        collect_documentation(False, [])
