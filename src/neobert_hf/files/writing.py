"""Atomic file writes, checksums, and a lock that admits one writing process to a folder."""

import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import filelock
from safetensors import SafetensorError
from transformers.utils import logging

logger = logging.get_logger(__name__)

UNCHANGED = "the previous content is unchanged"
FULL = (errno.ENOSPC, errno.EDQUOT)  # full disk, exceeded quota
NEARLY_FULL = 1 << 20  # free bytes, fewer than a write of torch.save needs
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


def write_json(file: Path, content: Any, hint: str = UNCHANGED) -> None:
    """Write JSON atomically; arguments and errors are those of `writing`."""
    with writing(file, hint) as handle:
        handle.write(json.dumps(content, indent=1).encode())


def write_error(error: OSError, file: Path, hint: str) -> OSError:
    """Return the same error with a message that says what went wrong, which file, what is still good, and which disk is full."""
    is_full = error.errno in FULL
    reason = "the disk is full" if is_full else error.strerror or str(error)
    message = f"{reason}: {file.name} could not be written; {hint}"
    if is_full:
        folder, free, total = _disk_of(file)
        message += f"; the disk of {folder} has {total / 1e6:,.0f} MB, of which {free / 1e6:,.0f} are free now"
    return OSError(error.errno or errno.EIO, message, str(file))


def _disk_of(file: Path) -> tuple[Path, int, int]:
    """Return the folder of a file, or the first one above it that exists, and the free and the total bytes of its disk."""
    folder = next(each for each in file.absolute().parents if each.is_dir())
    usage = shutil.disk_usage(folder)
    return folder, usage.free, usage.total


@contextmanager
def saving(target: Path, hint: str = UNCHANGED) -> Iterator[None]:
    """Convert the write errors of libraries into an OSError with a readable message. Other errors pass unchanged.

    Args:
        target: File or folder that is saved, for the message.
        hint: End of the message: what the user still has.

    Raises:
        OSError: A file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise write_error(error, target, hint) from error
    except Exception as error:
        text = str(error)
        if code := re.search(r"\(os error (\d+)\)", text):  # a Rust error of safetensors or tokenizers
            number = int(code[1])
            raise write_error(OSError(number, os.strerror(number)), target, hint) from error
        is_of_torch = "inline_container.cc" in text or "iostream error" in text  # the writer of torch.save
        if isinstance(error, SafetensorError) or is_of_torch:
            # torch.save does not say why it failed; what it has written is still there
            is_full = is_of_torch and _disk_of(target)[1] < NEARLY_FULL
            reason = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if is_full else OSError(text)
            raise write_error(reason, target, hint) from error
        raise


@contextmanager
def only_writer(folder: Path, lock: str, wait: bool = False) -> Iterator[None]:
    """Lock a folder against other processes that write to it.

    The operating system holds the lock, so it ends with the process, also after a crash. The file remains; it locks nothing.

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
        holder.acquire(timeout=LOCK_SECONDS)
    except filelock.Timeout:
        if not wait:
            raise ValueError(
                f"another process writes to {folder}; wait until it has ended, or choose another folder"
            ) from None
        logger.warning(f"another process writes to {folder}; waiting until it has ended")
        holder.acquire()
    try:
        yield
    finally:
        holder.release()


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
