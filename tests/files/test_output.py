"""No file of somebody is replaced, files are written as a whole or not at all, errors name them, a folder has one writer."""

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import largest_file
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from neobert_hf.files import output

TENSORS = {"a": torch.zeros(9999)}
VOCABULARY = {f"w{number}": number for number in range(999)}
SAVES = {
    "python": lambda file: file.open("wb").write(bytes(99999)),
    "safetensors": lambda file: save_file(TENSORS, file),
    "torch": lambda file: torch.save(TENSORS, file),
    "tokenizers": lambda file: Tokenizer(models.WordLevel(VOCABULARY, "w0")).save(str(file)),
}


def test_a_file_is_replaced_after_a_complete_write_only(tmp_path):
    file = tmp_path / "a.json"
    output.write_json(file, {"a": 1})
    assert output.file_hash(file) == hashlib.sha256(b'{\n "a": 1\n}').hexdigest()
    with pytest.raises(TypeError):
        output.write_json(file, {"a": object()})
    with pytest.raises(OSError, match=r"a\.json cannot be written \(.*File too large"), largest_file(1000):
        output.write_json(file, "x" * 9999)
    assert file.read_text() == '{\n "a": 1\n}' and list(tmp_path.iterdir()) == [file]


def test_a_file_that_exists_is_refused_and_replaced_only_if_this_is_asked_for(tmp_path):
    """Never a folder, a link without a target, or an input."""
    file = tmp_path / "a.csv"
    output.check_file(file)
    file.touch()
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "broken").symlink_to("nowhere")
    output.check_file(file, overwrite=True)
    for place, overwrite in ((file, False), (tmp_path / "link", False), (tmp_path / "broken", True), (tmp_path, True)):
        with pytest.raises(FileExistsError, match=f"{place.name} exists; name another file"):
            output.check_file(place, overwrite)
    output.check_is_no_input(file, [None, tmp_path / "new.csv", tmp_path])
    for each in (tmp_path / "link", f"{tmp_path}/../{tmp_path.name}/a.csv"):
        with pytest.raises(FileExistsError, match=r"a\.csv is also an input"):
            output.check_is_no_input(file, [each])


def contents(folder):
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def written(folder, **files):
    """Write a folder whose record lists its files; two underscores stand for a slash."""
    with output.new_folder(folder, overwrite=True) as built:
        for name, text in files.items():
            file = built / name.replace("__", "/")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        output.list_files(built, [name.replace("__", "/") for name in files])
    return contents(folder)


@pytest.mark.parametrize("name", ["mine.txt", ".hidden", "1_Pooling/mine.txt", "a/b/config", "link"])
def test_overwrite_removes_what_the_record_lists_and_refuses_a_folder_with_anything_else(tmp_path, name):
    folder = tmp_path / "folder"
    old = written(folder, config="old", more="old", **{"1_Pooling__config": "old"})
    with pytest.raises(FileExistsError, match=r"folder holds 1_Pooling/config; .*, or give overwrite=True"):
        output.check_folder(folder)
    with pytest.raises(KeyError), output.new_folder(folder, overwrite=True):
        raise KeyError
    assert contents(folder) == old
    new = written(folder, config="new")
    assert new.keys() == {"config", "training.json"} and [*tmp_path.iterdir()] == [folder]

    def hold():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to("config") if name == "link" else (folder / name).write_text("years of work")

    for is_meanwhile in (True, False):
        refusal = pytest.raises(FileExistsError, match=rf"holds {name}; .* removes only what its training\.json lists")
        with refusal, output.new_folder(folder, overwrite=True):
            assert is_meanwhile, "refused before the work"
            hold()
    assert new.items() <= contents(folder).items() and (folder / name).exists() and len(list(tmp_path.iterdir())) == 1


def test_a_folder_is_known_by_a_file_of_its_run_and_is_not_a_file(tmp_path):
    (tmp_path / "a").touch()
    output.check_folder(tmp_path, "run.json", "a")
    for folder in (tmp_path, tmp_path / "new/.."):
        with pytest.raises(FileExistsError, match="holds a; choose a new or empty folder"):
            output.check_folder(folder, "run.json")
    for place in (tmp_path / "a", tmp_path / "a/b"):
        with pytest.raises(OSError, match="a'"), output.new_folder(place):
            pytest.fail("refused before the work")


@pytest.mark.parametrize("failing", range(6))
def test_an_error_of_any_move_leaves_the_earlier_files_and_config_json_comes_last(tmp_path, monkeypatch, failing):
    folder, moves, replace = tmp_path / "folder", [], os.replace
    old = written(folder, **{"a": "old", "config.json": "old", "z": "old"})

    def move(source, target):
        moves.append((Path(source).name, Path(target).parent == folder))
        if len(moves) == failing + 1:
            raise OSError("of the disk")
        replace(source, target)

    with pytest.raises(OSError, match="of the disk"), output.new_folder(folder, overwrite=True) as built:
        for name in ("a", "config.json"):
            (built / name).write_text("new")
        monkeypatch.setattr(os, "replace", move)
    assert contents(folder) == old and [*tmp_path.iterdir()] == [folder]
    assert moves[0] == ("config.json", False) and (failing < 5 or moves[5] == ("config.json", True))


def test_a_killed_overwrite_leaves_the_earlier_files_and_the_next_one_succeeds(tmp_path):
    folder = tmp_path / "folder"
    old = written(folder, config="old")
    if os.fork() == 0:
        with output.new_folder(folder, overwrite=True) as built:
            (built / "config").write_text("half")
            os._exit(0)
    os.wait()
    assert contents(folder) == old
    assert written(folder, config="new")["config"] == "new"


def test_a_link_and_the_working_folder_and_a_mount_point_stay_what_they_are(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    monkeypatch.chdir(tmp_path / "target")
    for place in (tmp_path / "link", tmp_path / "link", Path(".")):
        written(place, config=str(place))
        assert Path("config").read_text() == str(place)
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(KeyError), output.new_folder(Path("."), overwrite=True) as built:
        assert built.is_relative_to(Path.cwd()), "nothing is moved to another disk"
        raise KeyError
    written(Path("."), config="last")
    assert {file.name for file in Path.cwd().iterdir()} == {"config", "training.json"}
    assert (tmp_path / "link").is_symlink() and {file.name for file in tmp_path.iterdir()} == {"target", "link"}


@pytest.mark.parametrize("library", SAVES)
def test_a_file_that_cannot_be_written_is_an_os_error_that_names_it(tmp_path, library):
    with pytest.raises(OSError, match="model cannot be written"), largest_file(1000), output.saving(tmp_path / "model"):
        SAVES[library](tmp_path / "file")


@pytest.mark.parametrize(
    "error", [RuntimeError("a"), torch.OutOfMemoryError("a"), ValueError("a"), OSError(2, "a", "a")]
)
def test_other_errors_pass_unchanged(tmp_path, error):
    with pytest.raises(type(error)) as found, output.saving(tmp_path):
        raise error
    assert found.value is error


def test_a_second_writer_is_refused_or_waits_and_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(output, "LOCK_SECONDS", 0.1)
    is_locked = threading.Event()

    def hold():
        with output.only_writer(tmp_path, "lock"):
            is_locked.set()
            time.sleep(0.5)

    other = threading.Thread(target=hold)
    other.start()
    is_locked.wait()
    with pytest.raises(ValueError, match=f"another process writes to {tmp_path}; .*choose another folder"):
        output.only_writer(tmp_path, "lock").__enter__()
    with output.only_writer(tmp_path, "lock", wait=True):
        other.join()
    (record,) = caplog.records
    assert f"another process writes to {tmp_path}; waiting until it has ended" in record.getMessage()
