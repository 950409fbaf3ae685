"""Where a run may write: new folders and files, or what this library wrote; whole files, checksums, one writer of a folder.

Whatever else a place holds is kept, or refused before the work.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import filelock

from .json_files import read_json

logger = logging.getLogger(__name__)

RECORD = "training.json"  # "files" in it are what this library wrote into the folder
LOCK_SECONDS = 2  # the child processes of a killed process end within this time
FAULTS = re.compile("os error|inline_container|iostream error")  # of safetensors and tokenizers, and of torch


def check_folder(folder: Path, *own: str, overwrite: bool = False) -> None:
    """Refuse a folder that holds what somebody else wrote. Every command and every `save` asks it before it writes.

    Args:
        folder: Folder to write, new or empty.
        own: Names of files by which a run knows its own folder.
        overwrite: The folder may hold the files that its record lists.

    Raises:
        OSError: The folder holds another file, or is a file.
    """
    place = folder.resolve()  # also of "new/.."
    if not place.exists() or not {*own}.isdisjoint(os.listdir(place)):
        return
    files = [part for part in place.rglob("*") if part.is_symlink() or not part.is_dir()]
    names = {part.relative_to(place).as_posix() for part in files}
    listed = listed_files(place)
    others = names.difference(listed) if overwrite else names
    if not others:
        return
    remedy = "choose a new or empty folder"
    if overwrite:
        remedy += f", since overwrite removes only what its {RECORD} lists"
    elif listed:
        remedy += ", or give overwrite=True"
    raise FileExistsError(f"{folder} holds {min(others)}; {remedy}")


def check_file(file: Path, overwrite: bool = False, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuse a file that exists.

    Args:
        file: File to write.
        overwrite: The file may exist.
        inputs: Files that are read, which are never replaced.

    Raises:
        FileExistsError: The file exists, or a folder has its name.
    """
    check_is_no_input(file, inputs)
    place = file.parent.resolve() / file.name  # of "new/../file"
    if os.path.lexists(place) and not (overwrite and place.is_file()):
        raise FileExistsError(f"{file} exists; name another file, or give overwrite to replace a file")


def check_is_no_input(target: Path, inputs: Iterable[str | Path | None]) -> None:
    """Refuse to write to a place that is read, also with `overwrite`.

    Raises:
        FileExistsError: The place is one of the inputs.
    """
    for each in inputs:
        if each and target.exists() and Path(each).exists() and target.samefile(each):
            raise FileExistsError(f"{target} is also an input; name another place")


def listed_files(folder: Path) -> list[str]:
    """Return what the record of a folder lists as written by this library; nothing without a record."""
    file = folder / RECORD
    return read_json(file).get("files", []) if file.is_file() else []


def list_files(folder: Path, names: Iterable[str]) -> None:
    """Add names to those that the record of a folder lists; the record is made if there is none."""
    file = folder / RECORD
    record = read_json(file) if file.is_file() else {}
    write_json(file, record | {"files": sorted({RECORD, *listed_files(folder), *names})})


@contextmanager
def new_folder(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder that becomes `target` when it is complete; after an error, `target` is as it was.

    Args:
        target: Folder to write, as of `check_folder`.
        overwrite: As of `check_folder`; what the folder holds is removed at the end.

    Raises:
        OSError: The folder is taken, or a file cannot be written.
    """
    check_folder(target, overwrite=overwrite)
    target = target.resolve()  # of a link, and of "."
    place = target if os.path.ismount(target) else target.parent  # nothing is moved to another disk
    place.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=place, prefix=f"{target.name}.unfinished-"))
    built, earlier = part / target.name, part / "earlier"
    built.mkdir()
    try:
        with saving(target):
            yield built
        if place != target:  # others may have written to it
            check_folder(target, overwrite=overwrite)
        if target.exists():
            _exchange(target, built, earlier)
        else:
            os.replace(built, target)
    finally:
        if not earlier.exists():
            shutil.rmtree(part, ignore_errors=True)


def _exchange(target: Path, built: Path, earlier: Path) -> None:
    """Move what a folder holds to `earlier`, and what was built into the folder, or nothing; then remove `earlier`."""
    earlier.mkdir()
    # config.json goes first and comes last: nothing loads a folder without it
    old = sorted(target.iterdir(), key=lambda part: part.name != "config.json")
    new = sorted(built.iterdir(), key=lambda part: part.name == "config.json")
    moves = [(part, earlier / part.name) for part in old if part != built.parent]
    moves += [(part, target / part.name) for part in new]
    done = []
    try:
        for source, goal in moves:
            os.replace(source, goal)
            done.append((source, goal))
    except BaseException:
        for source, goal in reversed(done):
            os.replace(goal, source)
        earlier.rmdir()
        raise
    shutil.rmtree(earlier, ignore_errors=True)


@contextmanager
def writing(file: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `file` after a complete write, or is removed after an error.

    Raises:
        OSError: The file cannot be written.
    """
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}.part")
    try:
        with saving(file), partial.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def write_json(file: Path, content: Any) -> None:
    """Write JSON atomically; errors are those of `writing`."""
    with writing(file) as handle:
        handle.write(json.dumps(content, indent=1).encode())


@contextmanager
def saving(target: Path) -> Iterator[None]:
    """Name what is written in an error of the disk that does not; other errors pass unchanged.

    Raises:
        OSError: A file cannot be written.
    """
    try:
        yield
    except Exception as error:
        is_nameless = isinstance(error, OSError) and error.errno and error.filename is None
        if is_nameless or FAULTS.search(str(error)):
            raise OSError(f"{target} cannot be written ({error})") from error
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
