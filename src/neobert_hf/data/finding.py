"""Files of paths, patterns and folders, as every command that reads texts finds them."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from ..files.messages import first_of
from .lengths import as_list


def find_texts(paths: str | Path | Sequence[str | Path] | None) -> tuple[dict[Path, bool], Counter]:
    """Find files of texts, as `find_files` does.

    Raises:
        ValueError: A folder holds none.
        OSError: As of `find_files`.
    """
    from .rows import SUFFIXES, suffix_of  # pyarrow, whose import takes longer than the search

    names = as_list(paths)
    suffixes = (".txt", *SUFFIXES)
    found, skipped = find_files(names, lambda file: suffix_of(file) in suffixes)
    if names and not found:
        raise ValueError(f"{first_of(names)}: no file ends in {', '.join(suffixes)}; choose files of texts")
    return found, skipped


def find_files(
    paths: Sequence[str], is_read: Callable[[Path], bool], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[dict[Path, bool], Counter]:
    """Find the files of paths and patterns such as `notes/**/*.md`, and those of folders that are read.

    Args:
        paths: Files, folders and patterns.
        is_read: Whether a file of a folder is read.
        include: Patterns such as `*.py`. A file of a folder must match one of them: by its name, by that of a folder above it, or
            by its path in the folder that is searched.
        exclude: Patterns that a file of a folder must not match.

    Returns:
        The files, and whether a path or a pattern names the file itself; and how many entries of folders were skipped, by reason.

    Raises:
        OSError: A path does not exist, or a pattern has no match.
    """
    files = {}
    skipped = Counter()
    for path in map(Path, paths):
        matches = [path] if os.path.lexists(path) else _matches(path)
        if not matches:
            raise FileNotFoundError(errno.ENOENT, "No such file or folder", str(path))
        for match in matches:
            if not match.is_dir():
                files[match] = True
                continue
            for file in _files_of_folder(match, skipped):
                inside = file.relative_to(match)
                if not _fits(inside, include or ["*"]) or _fits(inside, exclude):
                    skipped["excluded"] += 1
                elif is_read(file):
                    files.setdefault(file, False)
                else:
                    skipped[file.suffix.lower() or "without a suffix"] += 1
    return files, skipped


def _fits(path: Path, patterns: Sequence[str]) -> bool:
    names = (*path.parts, path.as_posix())
    return any(fnmatch(name, pattern.rstrip("/")) for pattern in patterns for name in names)


def _matches(pattern: Path) -> list[Path]:
    """Files and folders that match a pattern; hidden ones must be named. Unlike `glob.glob`, ** does not follow links."""
    found = []
    for each in Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))):
        hidden = {part for part in each.parts if part.startswith(".")}
        if hidden.issubset(pattern.parts):
            found.append(each)
    return sorted(found)


def _files_of_folder(folder: Path, skipped: Counter) -> Iterator[Path]:
    for root, folders, names in os.walk(folder, onerror=lambda _: skipped.update(["folders without access"])):
        skipped["hidden"] += sum(name.startswith(".") for name in folders + names)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        skipped["links to folders"] += sum(os.path.islink(os.path.join(root, name)) for name in folders)
        for file in sorted(Path(root, name) for name in names if not name.startswith(".")):
            if os.path.isfile(file):
                yield file
            else:
                skipped["pipes and broken links"] += 1
