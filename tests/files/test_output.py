"""Files are written as a whole or not at all, write errors of every library name the file, and a folder has one writer."""

import errno
import hashlib
import os
import re
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import largest_file
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from neobert_hf.files import output as writing
from neobert_hf.files.output import (
    check_target,
    file_hash,
    new_folder,
    only_writer,
    replacing,
    saving,
    vacated,
    write_error,
    write_json,
)

TENSORS = {"a": torch.zeros(9999)}
VOCABULARY = {f"w{number}": number for number in range(999)}
SAVES = {
    "plain": (lambda file: file.write_bytes(bytes(9999)), errno.EFBIG),
    "safetensors": (lambda file: save_file(TENSORS, file), errno.EFBIG),
    "torch": (lambda file: torch.save(TENSORS, file), errno.EIO),  # torch.save does not report the reason
    "tokenizers": (lambda file: Tokenizer(models.WordLevel(VOCABULARY, "w0")).save(str(file)), errno.EFBIG),
}


def test_a_file_is_replaced_after_a_complete_write_only(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})
    assert file_hash(file) == hashlib.sha256(b'{\n "a": 1\n}').hexdigest()
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    message = "File too large: a.json could not be written; the previous content is unchanged"
    with pytest.raises(OSError, match=message), largest_file(1000):
        write_json(file, "x" * 9999)
    assert file.read_text() == '{\n "a": 1\n}' and list(tmp_path.iterdir()) == [file]


def test_a_writer_replaces_what_it_wrote_and_nothing_else(tmp_path):
    """Not what it wrote under another name or what was changed since, no input, no link, no file of another writer."""
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    for content in ("first", "second"):
        with replacing(a, writer="one"):
            a.write_text(content)
    shutil.copy(a, b)
    (tmp_path / "link").symlink_to(a)
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    inputs = tmp_path / "folder/../a.csv", tmp_path / "link"
    refused = [(b, "one", ()), (a, "two", ()), *((a, "one", [each]) for each in inputs)]
    for file, writer, inputs in [*refused, *((tmp_path / name, "one", ()) for name in ("link", "broken", "folder"))]:
        with pytest.raises(FileExistsError, match=f"{file.name} exists.*; choose another folder$"):
            check_target(file, writer, inputs=inputs)
    a.write_text("changed")
    with pytest.raises(FileExistsError), replacing(a, writer="one"):
        a.write_text("third")
    assert a.read_text() == "changed"


@pytest.mark.parametrize("is_before", [True, False])
def test_a_writer_that_was_killed_may_write_its_file_when_it_runs_again(tmp_path, monkeypatch, is_before):
    file, replace = tmp_path / "a.json", os.replace
    if os.fork() == 0:
        monkeypatch.setattr(os, "replace", lambda *each: (is_before or replace(*each), os._exit(0)))
        write_json(file, 1, writer="one")
    assert os.wait()[1] == 0 and file.exists() != is_before
    write_json(file, 2, writer="one")
    assert file.read_text() == "2"
    with pytest.raises(FileExistsError):
        write_json(file, 3, writer="two")


@pytest.mark.parametrize(
    "name", ["mine.txt", ".hidden", "1_Pooling/mine.txt", "sub/config.json", "a/b/config.json", "empty/"]
)
def test_a_folder_is_replaced_only_if_all_that_it_holds_is_replaceable(tmp_path, name):
    folder, patterns = tmp_path / "folder", ("config.json", "[0-9]*_*/config.json")
    with new_folder(folder) as built:
        (built / "config.json").write_text("old")
    refusal = pytest.raises(FileExistsError, match=r"folder exists and holds config\.json; choose another folder")
    with refusal, new_folder(folder):
        pass
    with pytest.raises(KeyError), new_folder(folder, replaceable=patterns) as built:
        raise KeyError
    assert (folder / "config.json").read_text() == "old"
    with new_folder(folder, replaceable=patterns) as built:
        (built / "config.json").write_text("new")
    assert (folder / "config.json").read_text() == "new" and [*tmp_path.iterdir()] == [folder]

    def hold():
        target = folder / name
        (target if name.endswith("/") else target.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            target.write_text("years of work")

    for is_meanwhile in (True, False):
        refusal = pytest.raises(FileExistsError, match=f"holds {name.rstrip('/')}")
        with refusal, new_folder(folder, replaceable=patterns):
            assert is_meanwhile, "refused before the work"
            hold()
    assert (folder / name).exists() and (folder / "config.json").read_text() == "new"


def test_a_link_and_the_working_folder_stay_what_they_are_when_their_content_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    monkeypatch.chdir(tmp_path / "target")
    for content, place in (("old", tmp_path / "link"), ("new", tmp_path / "link"), ("last", Path("."))):
        with new_folder(place, replaceable=["config.json"]) as built:
            (built / "config.json").write_text(content)
        assert Path("config.json").read_text() == content
    with pytest.raises(KeyError), vacated(Path("."), replaceable=["config.json"]):
        Path("half").mkdir()
        raise KeyError
    assert Path("config.json").read_text() == "last" and [*Path(".").iterdir()] == [Path("config.json")]
    assert (tmp_path / "link").is_symlink() and {file.name for file in tmp_path.iterdir()} == {"target", "link"}


@pytest.mark.parametrize("library", SAVES)
def test_a_file_that_cannot_be_written_is_an_os_error_that_names_it(tmp_path, library):
    save, number = SAVES[library]
    message = "model could not be written; earlier ones are complete"
    saves = saving(tmp_path / "model", "earlier ones are complete")
    with pytest.raises(OSError, match=message) as found, largest_file(1000), saves:
        save(tmp_path / "file")
    assert found.value.errno == number and found.value.filename == str(tmp_path / "model")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_and_an_exceeded_quota_are_named(tmp_path, number):
    error = write_error(OSError(number, "No space left on device"), tmp_path / "model", "nothing is left of it")
    assert error.errno == number and "the disk is full: model could not be written; nothing is left of it" in str(error)
    assert re.search(rf"of it; the disk of {tmp_path} has [\d,]+ MB, of which [\d,]+ are free now: ", str(error))


@pytest.mark.parametrize(
    ("free", "reason"), [(4096, "the disk is full: model"), (1 << 30, "inline_container.*: model")]
)
def test_torch_does_not_name_a_full_disk_and_its_free_space_does(tmp_path, monkeypatch, free, reason):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free, total=1 << 40))
    with pytest.raises(OSError, match=reason), largest_file(1000), saving(tmp_path / "new/model"):
        torch.save(TENSORS, tmp_path / "file")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), torch.OutOfMemoryError("no memory"), ValueError("a value")])
def test_other_errors_pass_unchanged(tmp_path, error):
    with pytest.raises(type(error)) as found, saving(tmp_path):
        raise error
    assert found.value is error


def test_a_second_writer_is_refused_or_waits_and_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(writing, "LOCK_SECONDS", 0.1)
    is_locked = threading.Event()

    def hold():
        with only_writer(tmp_path, "lock"):
            is_locked.set()
            time.sleep(0.5)

    other = threading.Thread(target=hold)
    other.start()
    is_locked.wait()
    with pytest.raises(ValueError, match=f"another process writes to {tmp_path}; .*choose another folder"):
        only_writer(tmp_path, "lock").__enter__()
    with only_writer(tmp_path, "lock", wait=True):
        other.join()
    (record,) = caplog.records
    assert f"another process writes to {tmp_path}; waiting until it has ended" in record.getMessage()
