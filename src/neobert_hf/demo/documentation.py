"""Real text that every machine has: the documentation inside its own Python.

The standard library by introspection, functions in C included, and the language topics of `help()`; other packages by parsing
their sources and stubs, so that no code of theirs runs. `docstrings.py` reads, in processes of its own; this module chooses what
is read, keeps it, and makes corpora of it.
"""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm
from transformers.utils import logging

from ..data.files import file_hash, only_writer, write_error, write_json, writing
from ..data.wordpiece import check_vocab_size, train_wordpiece
from . import docstrings
from .cache import CACHE, load_arrays, save_arrays

logger = logging.get_logger(__name__)

# Folders without documentation for users.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "testing", "__pycache__"}
MIN_CHARACTERS = docstrings.MIN_CHARACTERS
MARKER = "neobert_documentation.json"  # in a folder that write_corpus has written: its files and their hashes
PARTIAL = ".neobert_documentation.partial"  # where it writes until all of them are whole
LOCK = ".neobert_documentation.lock"
SUFFIXES = (".py", ".pyi")
FILES_AT_ONCE = 128  # read by one process
ROWS = {"rows": (np.uint8, (None,))}  # what the cache has of a package: JSON


@dataclass(frozen=True)
class Entry:
    """One documented thing.

    Attributes:
        package: Top-level package or module; "builtins", and "python" for the topics of the language.
        name: Public name, without "builtins", or the topic.
        signature: Parameters as `inspect` or the source has them; often "" for what is not a function.
        text: The docstring, dedented.
    """

    package: str
    name: str
    signature: str
    text: str

    @property
    def full_text(self) -> str:
        """Name, signature and docstring: what a model reads."""
        return f"{self.name}{self.signature}\n{self.text}"


def collect_documentation(
    show_progress: bool = True, packages: Collection[str] | None = None, cache_dir: str | Path | None = CACHE
) -> list[Entry]:
    """Read the documentation of the running Python, without duplicates, in a fixed order.

    What was read is kept, and read again when it changes: the standard library with Python's version or place, another package
    with the size or time of any of its files.

    Args:
        show_progress: Show a progress bar over files.
        packages: Packages and modules, each with all below it: "json", "os.path", "torch.nn"; "python" is the standard library
            with the topics of the language. All that is installed, by default.
        cache_dir: Folder where it is kept; None keeps nothing.

    Raises:
        ValueError: A package is not installed, or has no documentation, or its name is empty.
        RuntimeError: The process that reads did not end well.
    """
    if packages is not None and not (packages and all(name.strip() for name in packages)):
        raise ValueError(f"packages={list(packages)} has no name, or an empty one; name packages such as 'json'")
    installed = _installed_packages()
    wanted = None if packages is None else {name.split(".")[0] for name in packages}
    library = _standard_library(cache_dir) if wanted is None or wanted - set(installed) else []
    chosen = {name: _python_files(paths) for name, paths in installed.items() if wanted is None or name in wanted}
    entries = library + _read_packages(chosen, show_progress, cache_dir)
    if packages is not None:
        found = {
            name: library if name == "python" else [entry for entry in entries if _is_within(entry, name)]
            for name in packages
        }
        if missing := sorted(name for name, each in found.items() if not each):
            raise ValueError(
                f"no documentation here of {', '.join(missing)}: not installed, not public, or without docstrings; "
                "'python' is the standard library"
            )
        entries = [entry for each in found.values() for entry in each]
    unique: dict[str, Entry] = {}
    for entry in entries:
        unique.setdefault(entry.text, entry)
    return list(unique.values())


def first_sentence(text: str) -> tuple[str, str]:
    """Split off the first sentence, on one line; without a full stop it is the first paragraph."""
    paragraph = re.split(r"\n\s*\n", text, maxsplit=1)[0]
    found = re.match(r".+?[.!?](?=\s|$)", paragraph, re.DOTALL)
    end = found.end() if found else len(paragraph)
    return " ".join(text[:end].split()), text[end:].strip()


def retrieval_pairs(entries: Iterable[Entry]) -> list[dict[str, str]]:
    """Questions and answers: the first sentence of a docstring, and its name, signature and rest.

    Left out are sentences of fewer than 4 words or more than 300 characters, those that stand in several entries, since they
    have no one answer, and entries without a rest.
    """
    split = [(entry, *first_sentence(entry.text)) for entry in entries]
    counts = Counter(sentence.lower() for _, sentence, _ in split)
    return [
        {"query": sentence, "document": f"{entry.name}{entry.signature}\n{rest}"}
        for entry, sentence, rest in split
        if counts[sentence.lower()] == 1
        and len(sentence.split()) >= 4
        and len(sentence) <= 300
        and len(rest) >= MIN_CHARACTERS
    ]


def training_pairs(entries: Iterable[Entry]) -> list[dict[str, str]]:
    """`retrieval_pairs`, and the name with the signature to the docstring, for entries that have a signature."""
    entries = list(entries)
    named = [{"query": f"{e.name}{e.signature}", "document": e.text} for e in entries if e.signature]
    return retrieval_pairs(entries) + named


def write_corpus(
    output_dir: str | Path,
    num_held_out: int = 1000,
    held_out_packages: list[str] | None = None,
    vocab_size: int = 8192,
    seed: int = 0,
) -> dict[str, int]:
    """Write the documentation as JSON lines for pretraining, and a tokenizer trained on it.

    Each line has `package`, `name` and `text`, the latter with name and signature first. `train.jsonl` is what may be
    trained on, `held_out.jsonl` holds entries of the same packages, `held_out_packages.jsonl` the packages that are held out
    whole, `tokenizer/` a WordPiece tokenizer of the training text. For embeddings, each has pairs beside it, with `query` and
    `document`: `train_pairs.jsonl`, of `training_pairs`, and `held_out_pairs.jsonl` and `held_out_packages_pairs.jsonl`, of
    `retrieval_pairs`.

    Files take their places when all of them are written. An interrupted call leaves those of the earlier corpus, or a part of the
    new one without `train.jsonl`, never some of both; the next call goes on from either.

    Args:
        output_dir: Folder to write to; made if it is not there.
        num_held_out: Entries that are held out, 0 or more.
        held_out_packages: Names of top-level packages.
        vocab_size: Size of the vocabulary, as for `train_wordpiece`.
        seed: Of the order.

    Returns:
        Number of entries in each file.

    Raises:
        ValueError: A package has no documentation here, everything would be held out, a number is out of bounds, another process
            writes to the folder, or it has a file of such a name that an earlier call has not left so.
        OSError: The folder cannot be written to; an earlier corpus in it is unchanged.
    """
    check_vocab_size(vocab_size)
    if num_held_out < 0:
        raise ValueError(f"num_held_out={num_held_out} is below 0; 0 holds none out")
    folder, held_out = Path(output_dir), set(held_out_packages or ())
    _files_written_before(folder)  # refuses files of others before it reads for minutes
    entries = collect_documentation()
    if missing := held_out - {entry.package for entry in entries}:
        raise ValueError(f"held_out_packages: {', '.join(sorted(missing))} has no documentation in this Python")
    random.Random(seed).shuffle(entries)
    files = {"held_out_packages": [entry for entry in entries if entry.package in held_out]}
    rest = [entry for entry in entries if entry.package not in held_out]
    if not 0 <= num_held_out < len(rest):
        raise ValueError(f"num_held_out={num_held_out} leaves nothing of {len(rest)} entries; hold out fewer")
    files |= {"held_out": rest[:num_held_out], "train": rest[num_held_out:]}
    with only_writer(folder, LOCK):
        written = _files_written_before(folder)
        partial = folder / PARTIAL
        shutil.rmtree(partial, ignore_errors=True)  # of a call that was killed
        try:
            partial.mkdir()
            _write_files(
                partial, files, vocab_size, still_good=f"{folder} is as it was: make room, and run the same again"
            )
            for file in written:
                file.unlink()  # of an earlier corpus, of which other entries were held out
            _move_files(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return {name: len(chosen) for name, chosen in files.items()}


def _write_files(folder, files, vocab_size, still_good):
    for name, chosen in files.items():
        if chosen:
            rows = [{"package": e.package, "name": e.name, "text": e.full_text} for e in chosen]
            pairs = (training_pairs if name == "train" else retrieval_pairs)(chosen)
            for file, lines in {name: rows, f"{name}_pairs": pairs}.items():
                with writing(folder / f"{file}.jsonl", still_good) as handle:
                    handle.writelines(f"{json.dumps(line)}\n".encode() for line in lines)
    tokenizer = train_wordpiece([entry.full_text for entry in files["train"]], vocab_size)
    try:
        tokenizer.save_pretrained(folder / "tokenizer")
    except Exception as error:  # the tokenizers library has one class for all errors
        code = re.search(r"os error (\d+)", str(error))
        if code is None and not isinstance(error, OSError):
            raise
        error = OSError(int(code[1]), os.strerror(int(code[1]))) if code else error
        raise write_error(error, folder / "tokenizer", still_good) from error
    hashes = {str(file.relative_to(folder).as_posix()): file_hash(file) for file in _corpus_files(folder)}
    write_json(folder / MARKER, hashes, still_good)


def _move_files(partial, folder):
    """The marker comes first, so that the next call knows the others as its own, and `train.jsonl` last."""
    (folder / "tokenizer").mkdir(exist_ok=True)
    for file in [partial / MARKER, *reversed(_corpus_files(partial))]:
        os.replace(file, folder / file.relative_to(partial))


def _corpus_files(folder: Path) -> list[Path]:
    """Files in the folder that bear the names of a corpus."""
    names = [f"{name}{end}.jsonl" for name in ("train", "held_out", "held_out_packages") for end in ("", "_pairs")]
    files = [folder / name for name in names] + sorted((folder / "tokenizer").rglob("*"))
    return [file for file in files if file.is_file()]


def _files_written_before(folder: Path) -> list[Path]:
    """What an earlier corpus has in the folder, without its marker.

    Raises:
        ValueError: A file with the name of one of ours is not as `write_corpus` left it.
    """
    try:
        hashes = dict(json.loads((folder / MARKER).read_text("utf-8")))
    except FileNotFoundError:
        hashes = {}
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{folder / MARKER} is damaged ({error}); name another folder, or delete it and the corpus"
        ) from error
    files = _corpus_files(folder)
    for file in files:
        if hashes.get(str(file.relative_to(folder).as_posix())) != file_hash(file):
            raise ValueError(
                f"{file} would be replaced, and is not as `neobert documentation` wrote it; name another folder, or delete it"
            )
    return files


def _is_within(entry: Entry, name: str) -> bool:
    top = name.split(".")[0]
    return entry.package == top and (name == top or entry.name == name or entry.name.startswith(f"{name}."))


def _standard_library(cache_dir: str | Path | None) -> list[Entry]:
    key = [sys.version, sys.platform, sysconfig.get_paths()["stdlib"]]
    rows = _kept(cache_dir, "python", key)
    if rows is None:
        rows = _run_reader({})
        _keep(cache_dir, "python", key, rows)
    return [Entry(*row) for row in rows]


def _read_packages(
    packages: dict[str, list[tuple[str, str]]], show_progress: bool, cache_dir: str | Path | None
) -> list[Entry]:
    """Entries of packages, given their files as pairs of root and path."""
    rows, missing = {}, {}
    for name, files in packages.items():
        stats = [(file, os.stat(file)) for _, file in files]
        key = [sys.version, *(f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)]
        rows[name] = _kept(cache_dir, name, key)
        if rows[name] is None:
            missing[name] = key
    files = [(name, *file) for name in missing for file in packages[name]]
    jobs = [files[i : i + FILES_AT_ONCE] for i in range(0, len(files), FILES_AT_ONCE)]
    found: dict[str, list] = {name: [] for name in missing}
    num_unreadable = 0
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,  # each thread waits for a process
        tqdm(
            total=len(files), desc="reading documentation", unit=" files", disable=not (show_progress and files)
        ) as bar,
    ):
        results = pool.map(lambda job: _run_reader({"files": [file[1:] for file in job]}), jobs)
        for job, result in zip(jobs, results):
            bar.update(len(job))
            num_unreadable += sum(each is None for each in result)
            for (name, _, _), each in zip(job, result):
                found[name] += each or ()
    if num_unreadable:
        logger.info(f"{num_unreadable} of {len(files)} Python files could not be parsed and were left out")
    for name, key in missing.items():
        rows[name] = found[name]
        _keep(cache_dir, name, key, found[name])
    return [Entry(*row) for name in packages for row in rows[name]]


def _run_reader(job: dict):
    """Let `docstrings.py` do a job in a Python without site-packages, in an empty folder.

    It is a command and not a process pool, which on macOS and Windows would run the caller's script once more in each worker.
    """
    command = [sys.executable, "-I", "-S", "-B", docstrings.__file__]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, encoding="utf-8", cwd=folder
        )
    if done.returncode:
        raise RuntimeError(f"reading the documentation with {' '.join(command)} failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout)


def _kept(cache_dir: str | Path | None, name: str, key: Sequence[str]) -> list | None:
    kept = cache_dir and load_arrays(_cache_file(cache_dir, name, key), ROWS)
    return json.loads(kept["rows"].tobytes()) if kept else None


def _keep(cache_dir: str | Path | None, name: str, key: Sequence[str], rows: list) -> None:
    if cache_dir:
        text = json.dumps(rows).encode()
        save_arrays(_cache_file(cache_dir, name, key), {"rows": np.frombuffer(text, np.uint8)})


def _cache_file(cache_dir: str | Path, name: str, key: Sequence[str]) -> Path:
    reader = Path(docstrings.__file__).read_text("utf-8")
    digest = hashlib.sha256("\0".join([reader, *key]).encode()).hexdigest()[:32]
    return Path(cache_dir, f"documentation-{name}-{digest}.safetensors")


def _installed_packages() -> dict[str, list[Path]]:
    """Top-level packages and modules outside the standard library, and where they lie; stubs count to what they describe."""
    paths = sysconfig.get_paths()
    found: dict[str, list[Path]] = {}
    for root in sorted({paths["purelib"], paths["platlib"]}):
        for path in sorted(Path(root).iterdir()) if Path(root).is_dir() else ():
            is_folder = path.is_dir()
            name = path.name.removesuffix("-stubs") if is_folder else path.stem
            if (is_folder or path.suffix in SUFFIXES) and name.isidentifier() and name not in SKIPPED_FOLDERS:
                found.setdefault(name, []).append(path)
    return found


def _python_files(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """Sources and stubs at and below the paths, each after its root."""
    found = []
    for path in paths:
        files = [] if path.is_dir() else [str(path)]
        for folder, subfolders, names in os.walk(path):
            subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
            files += [os.path.join(folder, name) for name in sorted(names) if name.endswith(SUFFIXES)]
        found += [(str(path.parent), file) for file in files]
    return found
