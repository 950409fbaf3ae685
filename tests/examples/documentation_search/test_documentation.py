"""Collection of documentation: names, signatures, duplicates, isolation of the reader, and cache."""

import contextlib
import importlib
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
from neobert_hf.demo.documentation import collect_documentation, first_sentence

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
    with contextlib.suppress(OSError):  # Windows may refuse links
        (library / "shop/.#copy.py").symlink_to("user@host.123")  # the lock of an editor
    (library / "shop/deep.py").write_text(
        f'def add(x={" + ".join("1" * 3000)}):\n    """Add up as many numbers as you like."""'
    )
    with caplog.at_level("WARNING", logger="neobert_hf.demo.documentation"):
        assert len(collect(library)) == 4
    assert re.search(
        r"2 of 5 Python files cannot be parsed by Python 3\.\d+ and are left out, such as .*broken\.py", caplog.text
    )


def test_names_in_code_are_globals_attributes_and_imports_at_any_depth():
    source = """
import a.b as short
from c.d import e
def f(x):
    local = x.g
    "h"  # i
    return lambda: [j.k(local) for local in short]
"""
    expected = {"a", "b", "short", "c", "d", "e", "f", "g", "j", "k"}
    assert docstrings._names_in(compile(source, "source", "exec")) == expected


def test_mentions_are_the_modules_whose_code_has_every_part_of_the_name(standard_library):
    """Modules that call the function by its full name are a lower bound; sources with these words are an upper bound."""
    root = Path(os.__file__).parent
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "distutils", "encodings", "ensurepip"}
    sources = [
        file.read_text("utf-8", "replace")
        for file in root.rglob("*.py")
        if not skipped & set(file.relative_to(root).parts)
    ]
    for name in ("os.remove", "shutil.rmtree", "collections.Counter", "warnings.warn", "time.sleep"):
        words = [re.compile(rf"\b{part}\b") for part in name.split(".")]
        with_words = sum(all(word.search(source) for word in words) for source in sources)
        calls = sum(
            re.search(rf"^ +.*\b{re.escape(name)}\(", source, re.MULTILINE) is not None
            for source in _public_sources(root)
        )
        assert calls <= standard_library[name].mentions <= with_words, name
    assert standard_library["os.remove"].mentions > 5 > standard_library["ftplib.FTP.delete"].mentions
    assert standard_library["list.append"].mentions > 100 and standard_library["while"].mentions == 0


def _public_sources(root):
    """The sources of the modules at the top of the standard library that have a public name."""
    for file in root.glob("*.py"):
        if not file.name.startswith("_") and file.stem not in docstrings.LEFT_OUT:
            yield file.read_text("utf-8", "replace")


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


def test_the_standard_library_is_read_again_when_a_module_is_installed(tmp_path, monkeypatch):
    """Debian has tkinter in a package of its own, with _tkinter in lib-dynload."""
    (tmp_path / "lib/lib-dynload").mkdir(parents=True)
    monkeypatch.setattr(documentation.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    reads = []
    monkeypatch.setattr(documentation, "_run_reader", lambda job: reads.append(job) or [])
    for new in (None, "tkinter", "lib-dynload/_tkinter.so"):
        if new:
            (tmp_path / "lib" / new).touch()
        for _ in range(2):
            assert documentation._standard_library(tmp_path / "cache") == []
    assert len(reads) == 3


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the statement `type` is new in Python 3.12")
def test_a_type_statement_in_a_class_is_no_member(library):
    (library / "shop/types.py").write_text(
        'class Box:\n    """A box with things in it, of any type."""\n\n    type Item = int\n'
    )
    assert "shop.types.Box" in {entry.name for entry in collect(library)}


def test_the_first_sentence_of_a_topic_is_its_heading(standard_library):
    assert first_sentence(standard_library["assert"].text)[0] == 'The "assert" statement'
    topics = [entry for entry in standard_library.values() if entry.package == "python"]
    assert len(topics) > 50
    assert [entry.name for entry in topics if re.search(r"([*=~^-])\1\1", first_sentence(entry.text)[0])] == []


def test_private_duplicates_and_internal_modules_are_skipped(standard_library):
    entries = [entry for entry in standard_library.values() if entry.package != "python"]
    tops = {entry.package for entry in entries}
    assert (
        not tops & {"distutils", "idlelib", "lib2to3", "posix", "posixpath", "test", "antigravity"} and len(tops) > 120
    )
    assert not [entry.name for entry in entries if any(part.startswith("_") for part in entry.name.split("."))]
    assert not {"json.encoder.JSONEncoder", "random.Random.choice", "unittest.case.TestCase"} & set(standard_library)


def test_the_public_api_adds_what_all_lists_without_a_docstring_each_under_one_name(cache, standard_library):
    entries = collect_documentation(False, ["python"], cache, public_api=True)
    silent = {entry.name: entry for entry in entries if not entry.text}
    assert {entry.name for entry in entries} - set(standard_library) == set(silent) and len(silent) > 100
    signatures = {
        "csv.DictReader": "(f, fieldnames=None, restkey=None, restval=None, dialect='excel', *args, **kwds)",
        "colorsys.rgb_to_hsv": "(r, g, b)",
        "collections.UserDict": "(dict=None, /, **kwargs)",
        "types.FrameType": "",
    }
    assert {name: silent[name].signature for name in signatures} == signatures
    # the first has a docstring, the second is a number, and no `__all__` lists the third
    assert not {"json.JSONDecodeError", "csv.QUOTE_ALL", "csv.DictReader.fieldnames"} & set(silent)
    things = {}
    for name in set(silent) - {"pdb.set_trace"}:  # pytest replaces it
        entry = silent[name]
        module = importlib.import_module(entry.module)
        things[name] = thing = getattr(module, entry.qualname)
        assert entry.qualname in module.__all__ and callable(thing), name
        own = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
        assert not isinstance(own, str), name  # some types have a descriptor for the docstrings of their instances
    assert len(set(map(id, things.values()))) == len(things)
    assert {"weakref.ReferenceType", "multiprocessing.Process"} <= set(silent)  # not weakref.ref, nor .context.Process
    assert not {"weakref.ref", "multiprocessing.context.Process"} & set(silent)


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
from neobert_hf.demo.documentation import collect_documentation, first_sentence
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


def test_a_package_outside_the_folders_of_installed_packages_is_found_and_not_imported(library, tmp_path, monkeypatch):
    """As `pip install -e` and a path file leave them; `raise SystemExit` in the source would end this process."""
    (library / "shop").rename(tmp_path / "stall")
    (tmp_path / "kiosk.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    assert "stall.Thing.do" in {entry.name for entry in collect(library, ["stall"])}
    assert "kiosk.Thing.do" in {entry.name for entry in collect(library, ["kiosk"])}


def test_a_module_is_found_by_the_public_name_of_its_entries_too(library):
    """`numpy.strings.upper` is defined in `numpy._core.strings`."""
    (library / "shop/_core.py").write_text(
        'def sell(x):\n    """Sell what somebody wants to buy, today or tomorrow."""\n'
    )
    (library / "shop/api.py").write_text('from ._core import sell\n__all__ = ["sell"]\n')
    for name in ("shop.api", "shop._core"):
        (entry,) = collect(library, [name])
        assert (entry.name, entry.public_name) == ("shop._core.sell", "shop.api.sell")


def test_the_error_names_a_package_that_is_not_installed(library):
    with pytest.raises(ValueError, match="no documentation found for nothing"):
        collect(library, ["shop", "nothing"])
    with pytest.raises(ValueError, match=r"no documentation found for shop\.nothing"):
        collect(library, ["shop.nothing"])
    assert [entry.name for entry in collect(library, ["shop.fast"])] == ["shop.fast.weigh"]
    with pytest.raises(ValueError, match=r"packages=\[\] has no name"):
        collect_documentation(False, [])
