"""Files that are written whole or not at all, and folders that one process writes at a time."""

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

UNCHANGED = "what stood there before is unchanged"
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk, or what its owner may fill of it
LOCK_SECONDS = 2  # the processes of one that was killed end within it


@contextmanager
def writing(file: Path, still_good: str = UNCHANGED) -> Iterator[BinaryIO]:
    """Open a temporary file beside this one, which takes its place when all is written, or is removed if that fails.

    Args:
        file: Where to.
        still_good: Ends the message of an error: what the user still has.

    Raises:
        OSError: It cannot be written; a full disk is named as such.
    """
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}.part")
    try:
        with partial.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, file)
    except OSError as error:
        raise write_error(error, file, still_good) from error
    finally:
        partial.unlink(missing_ok=True)


def write_error(error: OSError, file: Path, still_good: str) -> OSError:
    """The same error in words: what went wrong, which file, and what is still good."""
    reason = "the disk is full" if error.errno in FULL else error.strerror or str(error)
    message = f"{reason}: {file.name} could not be written; {still_good}"
    return OSError(error.errno or errno.EIO, message, str(file))


@contextmanager
def saving(target: Path, still_good: str = UNCHANGED) -> Iterator[None]:
    """Turn the errors of libraries that cannot write their files into an OSError in words.

    safetensors, tokenizers and torch.save have classes of their own for it. Other errors pass as they are.

    Args:
        target: The file or folder that is saved, for the message.
        still_good: Ends the message: what the user still has.

    Raises:
        OSError: A file cannot be written.
    """
    try:
        yield
    except Exception as error:
        cause = _as_os_error(error)
        if cause is None:
            raise
        raise write_error(cause, target, still_good) from error


def _as_os_error(error):
    """The error of the operating system that a library's error stands for, or None."""
    if isinstance(error, OSError):
        return error
    if code := re.search(r"\(os error (\d+)\)", str(error)):  # Rust's, which safetensors and tokenizers pass on
        return OSError(int(code[1]), os.strerror(int(code[1])))
    if isinstance(error, SafetensorError) or (type(error) is RuntimeError and _is_from_torch_save(error)):
        return OSError(str(error))
    return None


def _is_from_torch_save(error):
    """Whether torch.save raised it, by name: this module does not import torch."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__") == "torch.serialization"


def write_json(file: Path, content, still_good: str = UNCHANGED) -> None:
    """Write the whole file or none of it; arguments and errors are those of `writing`."""
    with writing(file, still_good) as handle:
        handle.write(json.dumps(content, indent=1).encode())


def sealed(content: dict) -> dict:
    """A copy with its own checksum, which `unsealed` compares."""
    return {**content, "checksum": _checksum(content)}


def unsealed(content: dict, must_be_sealed: bool = False) -> dict:
    """A copy without its checksum.

    Args:
        content: What `sealed` returned.
        must_be_sealed: Refuse content without a checksum. Otherwise it is taken as it is, as earlier versions wrote it.

    Raises:
        ValueError: It is not what was sealed.
    """
    content = dict(content)
    checksum = content.pop("checksum", None)
    if checksum is None and must_be_sealed:
        raise ValueError("it has no checksum")
    if checksum not in (None, _checksum(content)):
        raise ValueError("its checksum is wrong")
    return content


def _checksum(content):
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_hash(file: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while part := handle.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


@contextmanager
def only_writer(folder: Path, lock: str) -> Iterator[None]:
    """Hold a folder against other processes that write to it.

    The lock is the operating system's, so it ends with its process, however that ends. Its file stays and means nothing.

    Args:
        folder: It is made if it is not there.
        lock: Name of the lock's file in it.

    Raises:
        ValueError: Another process writes to the folder.
        OSError: The folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    holder = filelock.FileLock(folder / lock)
    try:
        holder.acquire(timeout=LOCK_SECONDS)
    except filelock.Timeout:
        raise ValueError(
            f"another process writes to {folder}; wait until it has ended, or choose another folder"
        ) from None
    except (OSError, NotImplementedError) as error:
        # A drive without locks: filelock raises the one or the other, by its version and by what the system says.
        raise OSError(
            getattr(error, "errno", None) or errno.ENOLCK,
            f"no lock can be held here ({error}), as on some network drives, so two processes could mix their files; choose a "
            "folder on another drive",
            str(folder),
        ) from error
    try:
        yield
    finally:
        holder.release()
