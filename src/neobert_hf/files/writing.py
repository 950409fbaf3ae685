"""Atomic file writes, checksums, and a lock that admits one writing process to a folder."""

import errno
import hashlib
import json
import os
import re
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import filelock
from safetensors import SafetensorError
from transformers.utils import logging

logger = logging.get_logger(__name__)

UNCHANGED = "the previous content is unchanged"
FULL = (errno.ENOSPC, errno.EDQUOT)  # full disk, exceeded quota
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, *FULL)  # the folder refuses new files
LOCK_SECONDS = 2  # the child processes of a killed process end within this time


@contextmanager
def writing(file: Path, hint: str = UNCHANGED) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `file` after a complete write, or is removed after an error.

    Args:
        file: Path to write.
        hint: End of an error message: what the user still has.

    Raises:
        OSError: The file cannot be written; the message names a full disk.
    """
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}.part")
    try:
        with partial.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, file)
    except OSError as error:
        raise write_error(error, file, hint) from error
    finally:
        partial.unlink(missing_ok=True)


def write_error(error: OSError, file: Path, hint: str) -> OSError:
    """Return the same error with a message that says what went wrong, which file, and what is still good."""
    reason = "the disk is full" if error.errno in FULL else error.strerror or str(error)
    message = f"{reason}: {file.name} could not be written; {hint}"
    return OSError(error.errno or errno.EIO, message, str(file))


@contextmanager
def saving(target: Path, hint: str = UNCHANGED) -> Iterator[None]:
    """Convert the write errors of libraries into an OSError with a readable message.

    safetensors, tokenizers and torch.save raise their own classes for write errors. Other errors pass unchanged.

    Args:
        target: File or folder that is saved, for the message.
        hint: End of the message: what the user still has.

    Raises:
        OSError: A file cannot be written.
    """
    try:
        yield
    except Exception as error:
        cause = _as_os_error(error)
        if cause is None:
            raise
        raise write_error(cause, target, hint) from error


def _as_os_error(error):
    """Return the operating system's error behind a library's error, or None."""
    if isinstance(error, OSError):
        return error
    if code := re.search(r"\(os error (\d+)\)", str(error)):  # the text of a Rust error in safetensors and tokenizers
        return OSError(int(code[1]), os.strerror(int(code[1])))
    if isinstance(error, SafetensorError) or (type(error) is RuntimeError and _is_from_torch_save(error)):
        return OSError(str(error))
    return None


def _is_from_torch_save(error):
    """Whether torch.save raised the error; compares module names, since this module does not import torch."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__") == "torch.serialization"


def write_json(file: Path, content, hint: str = UNCHANGED) -> None:
    """Write JSON atomically; arguments and errors are those of `writing`."""
    with writing(file, hint) as handle:
        handle.write(json.dumps(content, indent=1).encode())


def sealed(content: dict) -> dict:
    """Return a copy with a checksum of the content, which `unsealed` verifies."""
    return {**content, "checksum": content_hash(content)}


def unsealed(content: dict) -> dict:
    """Return a copy of what `sealed` returned, without the checksum.

    Raises:
        ValueError: The checksum is missing or wrong.
    """
    content = dict(content)
    checksum = content.pop("checksum", None)
    if checksum != content_hash(content):
        raise ValueError("its checksum is wrong" if checksum else "it has no checksum")
    return content


def read_sealed(file: Path, remedy: str) -> dict:
    """Return the content of a JSON file that was `sealed`.

    Args:
        file: File to read.
        remedy: End of an error message: what the user can do.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file does not hold one JSON object with the right checksum.
    """
    try:
        return unsealed(dict(json.loads(file.read_text("utf-8"))))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); {remedy}") from error


def content_hash(content: object) -> str:
    """Return the SHA-256 of content that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_hash(file: Path) -> str:
    """Return the SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while part := handle.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


@contextmanager
def only_writer(folder: Path, lock: str, wait: bool = False) -> Iterator[None]:
    """Lock a folder against other processes that write to it.

    The operating system holds the lock, so it ends with the process, also after a crash. The lock file remains; it locks
    nothing.

    Args:
        folder: Folder to lock; created if it does not exist.
        lock: Name of the lock file in the folder.
        wait: Wait until the other process has ended instead of raising an error; a long wait is logged.

    Raises:
        ValueError: Another process writes to the folder.
        OSError: The folder cannot be written, or its drive supports no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    holder = filelock.FileLock(folder / lock)
    try:
        try:
            holder.acquire(timeout=LOCK_SECONDS)
        except filelock.Timeout:
            if not wait:
                raise ValueError(
                    f"another process writes to {folder}; wait until it has ended, or choose another folder"
                ) from None
            logger.warning(f"another process writes to {folder}; waiting until it has ended")
            holder.acquire()
    # On a drive without locks, filelock raises an OSError, and older versions raise NotImplementedError.
    except (OSError, NotImplementedError) as error:
        if getattr(error, "errno", None) in REFUSED:
            raise write_error(error, folder / lock, "make the folder writable, or choose another folder") from error
        raise OSError(
            getattr(error, "errno", None) or errno.ENOLCK,
            f"this drive supports no file locks ({error}), so two processes could mix their files; choose a folder on another "
            "drive",
            str(folder),
        ) from error
    try:
        yield
    finally:
        holder.release()
