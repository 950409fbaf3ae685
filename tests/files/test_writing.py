"""Write errors of every library become an OSError that names the file; checksums are verified."""

import errno
import os
import threading
import time

import pytest
import torch
from conftest import largest_file
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from neobert_hf.files import writing
from neobert_hf.files.writing import only_writer, saving, sealed, unsealed

TENSORS = {"a": torch.zeros(9999)}
VOCABULARY = {f"w{number}": number for number in range(999)}
SAVES = {
    "plain": (lambda file: file.write_bytes(bytes(9999)), errno.EFBIG),
    "safetensors": (lambda file: save_file(TENSORS, file), errno.EFBIG),
    "torch": (lambda file: torch.save(TENSORS, file), errno.EIO),  # torch.save does not report the reason
    "tokenizers": (lambda file: Tokenizer(models.WordLevel(VOCABULARY, "w0")).save(str(file)), errno.EFBIG),
}


@pytest.mark.parametrize("library", SAVES)
def test_a_file_that_cannot_be_written_is_an_os_error_that_names_it(tmp_path, library):
    save, number = SAVES[library]
    message = "model could not be written; earlier ones are complete"
    saves = saving(tmp_path / "model", "earlier ones are complete")
    with pytest.raises(OSError, match=message) as found, largest_file(1000), saves:
        save(tmp_path / "file")
    assert found.value.errno == number and found.value.filename == str(tmp_path / "model")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), torch.OutOfMemoryError("no memory"), ValueError("a value")])
def test_other_errors_pass_unchanged(tmp_path, error):
    with pytest.raises(type(error)) as found, saving(tmp_path):
        raise error
    assert found.value is error


def test_content_without_a_checksum_is_refused():
    content = {"a": 1}
    assert unsealed(sealed(content)) == content
    for without in (content, content | {"checksum": None}):
        with pytest.raises(ValueError, match="it has no checksum"):
            unsealed(without)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_not_reported_as_a_drive_without_locks(tmp_path, monkeypatch, number):
    def refuse(*args, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(writing.filelock.FileLock, "_acquire", refuse)
    reason = "the disk is full" if number == errno.ENOSPC else os.strerror(number)
    with pytest.raises(OSError, match=f"{reason}: lock could not be written; make the folder writable") as found:
        only_writer(tmp_path, "lock").__enter__()
    assert found.value.errno == number


def test_a_long_wait_for_a_lock_is_logged_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(writing, "LOCK_SECONDS", 0.1)
    is_locked = threading.Event()

    def hold():
        with only_writer(tmp_path, "lock"):
            is_locked.set()
            time.sleep(0.5)

    other = threading.Thread(target=hold)
    other.start()
    is_locked.wait()
    with only_writer(tmp_path, "lock", wait=True):
        other.join()
    (record,) = caplog.records
    assert f"another process writes to {tmp_path}; waiting until it has ended" in record.getMessage()
