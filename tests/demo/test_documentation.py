"""Collection of documentation: names, signatures, duplicates, isolation of the reader, cache, and the written corpus."""

import contextlib
import errno
import functools
import hashlib
import inspect
import itertools
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from neobert_hf.data import files
from neobert_hf.data.arrays import CACHE
from neobert_hf.data.wordpiece import PreTrainedTokenizerFast
from neobert_hf.demo import docstrings, documentation
from neobert_hf.demo.documentation import collect_documentation, write_corpus

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


def test_a_new_corpus_removes_the_files_of_an_earlier_one(library, tmp_path, monkeypatch):
    """Otherwise held-out entries of the earlier corpus could be training entries of the new one."""
    folder = tmp_path / "corpus"
    monkeypatch.setattr(documentation, "collect_documentation", lambda: collect(library))
    done = write_corpus(folder, num_held_out=1, held_out_packages=["shop"][:0], vocab_size=64)
    assert done == {"held_out_packages": 0, "held_out": 1, "train": 3}
    write_corpus(folder, num_held_out=0, vocab_size=64)
    names = {file.stem for file in folder.glob("*.jsonl")}
    assert names == {"train", "train_pairs"}
    assert len({json.loads(line)["text"] for line in (folder / "train.jsonl").open()}) == 4


def corpus_in(folder):
    """Return names and contents of the files of a corpus, after a check against its marker."""
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    files = {name: content for name, content in files.items() if name != documentation.LOCK}
    hashes = json.loads(files[documentation.MARKER])
    found = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert found.pop(documentation.MARKER) and found == hashes and not (folder / documentation.PARTIAL).exists()
    return files


def fail_after(number, function, error):
    count = itertools.count(1)

    def fail(*arguments, **options):
        if next(count) == number:
            raise error
        return function(*arguments, **options)

    return fail


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, "tokenizer", "tokenizer's settings"])
def test_a_full_disk_leaves_the_earlier_corpus_unchanged(library, tmp_path, monkeypatch, number):
    """The write of each file fails in turn, also of the files that transformers writes in Rust and in Python."""
    folder = tmp_path / "corpus"
    monkeypatch.setattr(documentation, "collect_documentation", lambda: collect(library))
    write_corpus(folder, num_held_out=1, vocab_size=64)
    before = corpus_in(folder)
    error = OSError(errno.ENOSPC, "No space left on device")
    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match=f"the disk is full: .*{folder} is unchanged") as found,
    ):
        if number == "tokenizer":
            patch.setattr(
                PreTrainedTokenizerFast, "save_pretrained", fail_after(1, None, Exception(f"{error} (os error 28)"))
            )
        elif number == "tokenizer's settings":
            patch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail_after(1, None, error))
        else:
            patch.setattr(files.os, "fsync", fail_after(number, os.fsync, error))
        write_corpus(folder, num_held_out=2, vocab_size=64)
    assert found.value.errno == errno.ENOSPC
    assert corpus_in(folder) == before
    assert write_corpus(folder, num_held_out=2, vocab_size=64)["held_out"] == 2
    assert corpus_in(folder) != before


@pytest.mark.parametrize("number", [1, 3, 5, 7, 9, 11, 14])
def test_an_interrupted_corpus_is_never_a_mixture_and_the_next_call_completes(library, tmp_path, monkeypatch, number):
    """The interruption happens while files of the earlier corpus are removed or while new files are moved."""
    folder = tmp_path / "corpus"
    monkeypatch.setattr(documentation, "collect_documentation", lambda: collect(library))
    write_corpus(folder, num_held_out=1, vocab_size=64)
    before = corpus_in(folder)
    write_corpus(tmp_path / "other", num_held_out=2, vocab_size=64)
    wanted = corpus_in(tmp_path / "other")
    is_done = False
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        stop = fail_after(number, lambda function, *arguments: function(*arguments), KeyboardInterrupt())
        unlink, replace = Path.unlink, os.replace

        def unlink_or_stop(file, **options):
            is_ours = file.suffix == ".jsonl" or file.parent.name == "tokenizer"
            return stop(unlink, file) if is_ours else unlink(file, **options)

        def replace_or_stop(source, target):
            return (replace if documentation.PARTIAL in str(target) else functools.partial(stop, replace))(
                source, target
            )

        patch.setattr(Path, "unlink", unlink_or_stop)
        patch.setattr(documentation.os, "replace", replace_or_stop)
        write_corpus(folder, num_held_out=2, vocab_size=64)
        is_done = True
    left = {file.name: file.read_bytes() for file in folder.glob("*.jsonl")}
    is_old, is_new = (left.items() <= corpus.items() for corpus in (before, wanted))
    assert (is_old or is_new) and (is_done or is_old or "train.jsonl" not in left)
    write_corpus(folder, num_held_out=2, vocab_size=64)
    assert corpus_in(folder) == wanted


def test_the_errors_name_a_damaged_marker_and_numbers_out_of_bounds(library, tmp_path, monkeypatch):
    monkeypatch.setattr(documentation, "collect_documentation", lambda: collect(library))
    with pytest.raises(ValueError, match="num_held_out=-1 is below 0"):
        write_corpus(tmp_path / "corpus", num_held_out=-1, vocab_size=64)
    with pytest.raises(ValueError, match="vocab_size=5 is out of bounds; choose 6"):
        write_corpus(tmp_path / "corpus", vocab_size=5)
    assert not (tmp_path / "corpus").exists()
    write_corpus(tmp_path / "corpus", num_held_out=1, vocab_size=64)
    for content in ("{", "[1]", "5"):
        (tmp_path / "corpus" / documentation.MARKER).write_text(content)
        with pytest.raises(ValueError, match=rf"{documentation.MARKER} is damaged"):
            write_corpus(tmp_path / "corpus", num_held_out=1, vocab_size=64)
    with pytest.raises(ValueError, match=r"packages=\[\] has no name"):
        collect_documentation(False, [])


def test_foreign_files_with_the_names_of_a_corpus_are_never_replaced(library, tmp_path, monkeypatch):
    folder = tmp_path / "corpus"
    monkeypatch.setattr(documentation, "collect_documentation", lambda: collect(library))
    folder.mkdir()
    (folder / "held_out_packages.jsonl").write_text("mine")
    with pytest.raises(ValueError, match=r"held_out_packages.jsonl would be replaced, but .* did not write it"):
        write_corpus(folder, num_held_out=1, vocab_size=64)
    assert [file.name for file in folder.iterdir()] == ["held_out_packages.jsonl"]
    (folder / "held_out_packages.jsonl").unlink()
    write_corpus(folder, num_held_out=1, vocab_size=64)
    (folder / "train.jsonl").write_text("mine now")
    with pytest.raises(ValueError, match=r"train.jsonl would be replaced"):
        write_corpus(folder, num_held_out=1, vocab_size=64)
    assert (folder / "train.jsonl").read_text() == "mine now"


def test_the_error_names_a_package_that_is_not_installed(library):
    with pytest.raises(ValueError, match="no documentation found for nothing"):
        collect(library, ["shop", "nothing"])
    with pytest.raises(ValueError, match=r"no documentation found for shop\.nothing"):
        collect(library, ["shop.nothing"])
    assert [entry.name for entry in collect(library, ["shop.fast"])] == ["shop.fast.weigh"]
