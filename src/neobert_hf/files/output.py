"""Places that may be written, atomic writes, checksums, and a lock that admits one writing process to a folder."""

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import filelock
from safetensors import SafetensorError
from transformers.utils import logging

logger = logging.get_logger(__name__)

UNCHANGED = "the previous content is unchanged"
FULL = (errno.ENOSPC, errno.EDQUOT)  # full disk, exceeded quota
NEARLY_FULL = 1 << 20  # free bytes, fewer than a write of torch.save needs
LOCK_SECONDS = 2  # the child processes of a killed process end within this time
ANOTHER_FILE = "name another file, or move this one away"
# Beside the files of `replacing` and `writing`: lines of JSON with name, writer and SHA-256.
WRITTEN = ".neobert_hf_written"


def check_target(
    target: Path,
    writer: str | None = None,
    replaceable: Sequence[str] = (),
    inputs: Iterable[str | Path | None] = (),
    way_out: str = "choose another folder",
) -> None:
    """Refuse a place that holds what somebody else wrote. Every command and every `save` asks it before it writes.

    Args:
        target: File or folder to write.
        writer: What writes a file; it may replace what it has written itself, unless that was changed. None for a folder.
        replaceable: Patterns, relative to the folder, of files that may be replaced in it.
        inputs: Files and folders that the writer reads, which it never replaces.
        way_out: End of the message: what to do.

    Raises:
        FileExistsError: The place is taken.
    """
    shown, target = target, target.parent.resolve() / target.name  # a folder before ".." may not exist yet
    if file := next((parent for parent in target.parents if parent.is_file()), None):
        raise FileExistsError(f"{file} is a file, so {shown} cannot be in it; {way_out}")
    if not os.path.lexists(target):
        return
    held = ""
    if target.exists() and any(each and Path(each).exists() and target.samefile(each) for each in inputs):
        held = " and is also an input"
    elif writer is not None:
        if target.is_file() and [target.name, writer, file_hash(target)] in _written(target.parent):
            return
        held = f", and its content is not of an earlier {writer}"
    elif target.is_dir():
        parts = (x for x in target.rglob("*") if x.is_symlink() or not x.is_dir() or not any(x.iterdir()))
        other = next((part for part in parts if not matches(part.relative_to(target), replaceable)), None)
        if other is None:
            return
        held = f" and holds {other.relative_to(target)}"
    raise FileExistsError(f"{shown} exists{held}; {way_out}")


def matches(path: PurePath, patterns: Iterable[str]) -> bool:
    """Return whether a relative path matches a pattern part by part, so that no wildcard stands for a slash."""
    parts = [PurePath(pattern).parts for pattern in patterns]
    return any(len(path.parts) == len(each) and all(map(fnmatchcase, path.parts, each)) for each in parts)


def _written(folder: Path) -> list[list[str]]:
    file = folder / WRITTEN
    try:
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); remove it, and move the files away that it tells of") from error


@contextmanager
def replacing(*files: Path, writer: str, way_out: str = ANOTHER_FILE) -> Iterator[None]:
    """Check files before the work that writes them, and note afterwards who wrote them; arguments are as of `check_target`.

    Raises:
        FileExistsError: A file is there that `writer` has not written.
        OSError: The note cannot be written.
    """
    for file in files:
        check_target(file, writer, way_out=way_out)
    try:
        yield
    finally:  # what is there was written here, also by work that was interrupted
        for file in filter(Path.is_file, files):
            _note(file, writer, file_hash(file))


def _note(file: Path, writer: str, digest: str) -> None:
    line = [file.name, writer, digest]
    if line not in _written(file.parent):
        with saving(file.parent / WRITTEN), (file.parent / WRITTEN).open("a", encoding="utf-8") as notes:
            notes.write(f"{json.dumps(line)}\n")


@contextmanager
def vacated(folder: Path, replaceable: Sequence[str] = (), **options: Any) -> Iterator[None]:
    """Move what a folder holds aside; it is removed after the work that writes a new content, or comes back after an error.

    Args:
        folder: Folder: new, empty, or with nothing but files that may be replaced.
        replaceable: As of `check_target`.
        options: Other arguments of `check_target`.

    Raises:
        FileExistsError: The folder is taken.
    """
    check_target(folder, None, replaceable, **options)
    aside = folder / f".{uuid.uuid4().hex}"  # inside, since the folder may be a link, a mount, or that of the shell
    held, moved = [*folder.iterdir()] if folder.is_dir() else [], []
    if not held:
        yield
        return
    aside.mkdir()
    try:
        for part in held:
            os.replace(part, aside / part.name)
            moved.append(part)
        yield
    except BaseException:
        for part in {*folder.iterdir()} - {aside, *held[len(moved) :]}:  # what the work has written
            shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink()
        for part in moved:
            os.replace(aside / part.name, part)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def keeping(file: Path) -> Iterator[None]:
    """Let a library work that writes a file which is not wanted: afterwards the file is as before."""
    before = file.read_bytes() if file.is_file() else None
    yield
    if before is None:
        file.unlink(missing_ok=True)
    else:
        file.write_bytes(before)


@contextmanager
def new_folder(target: Path, hint: str = "nothing is left of it", **options: Any) -> Iterator[Path]:
    """Give a temporary folder that becomes `target` when it is complete; after an error, `target` is as it was.

    Args:
        target: Folder to write, as of `vacated`.
        hint: As of `saving`.
        options: Other arguments of `vacated`.

    Raises:
        FileExistsError: The folder is taken.
        OSError: A file cannot be written.
    """
    check_target(target, **options)
    target = target.resolve()  # of a link, and of "."
    target.parent.mkdir(parents=True, exist_ok=True)
    with saving(target, hint), tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as beside:
        built = Path(beside, target.name)
        built.mkdir()
        yield built
        with vacated(target, **options):  # which checks again: others may have written to it
            if not target.exists():
                os.replace(built, target)
            else:
                for part in sorted(built.iterdir(), key=lambda part: part.name == "config.json"):
                    os.replace(part, target / part.name)  # config.json last: nothing loads a folder without it


@contextmanager
def writing(file: Path, hint: str = UNCHANGED, *, writer: str | None = None, **options: Any) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `file` after a complete write, or is removed after an error.

    Args:
        file: Path to write.
        hint: End of an error message: what the user still has.
        writer: What writes the file, as of `check_target`, if the place may hold a file of somebody else.
        options: Other arguments of `check_target`.

    Raises:
        FileExistsError: The file is there, and `writer` has not written it.
        OSError: The file cannot be written; the message names a full disk.
    """
    if writer:
        check_target(file, writer, **{"way_out": ANOTHER_FILE} | options)
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}.part")
    try:
        with partial.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        if writer:  # before: a process that is killed in between may replace the file when it runs again
            _note(file, writer, file_hash(partial))
        os.replace(partial, file)
    except OSError as error:
        raise write_error(error, file, hint) from error
    finally:
        partial.unlink(missing_ok=True)


def write_json(file: Path, content: Any, hint: str = UNCHANGED, writer: str | None = None) -> None:
    """Write JSON atomically; arguments and errors are those of `writing`."""
    with writing(file, hint, writer=writer) as handle:
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
        if isinstance(error, FileExistsError) and error.errno is None:  # of `check_target`
            raise
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
        held = holder.acquire(timeout=LOCK_SECONDS)
    except filelock.Timeout:
        if not wait:
            remedy = "wait until it has ended, or choose another folder"
            raise ValueError(f"another process writes to {folder}; {remedy}") from None
        logger.warning(f"another process writes to {folder}; waiting until it has ended")
        held = holder.acquire()
    with held:
        yield


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
