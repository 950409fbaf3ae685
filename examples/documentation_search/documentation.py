"""Collection of the documentation inside a Python installation, and pairs of queries and documents made from it.

The standard library is read by introspection, which includes functions in C, together with the language topics of `help()`. Other
packages are read by parsing their sources and stubs, so none of their code runs. `docstrings.py` does the reading in separate
processes; this module selects the packages and caches the entries. `corpus.py` writes them as a corpus.
"""

import hashlib
import importlib.util
import json
import os
import re
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

from ..data.arrays import CACHE, load_arrays, save_arrays
from . import docstrings, reexports
from .ranking import words_of

logger = logging.get_logger(__name__)

# Folders that hold no documentation for users.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "testing", "__pycache__"}
MIN_CHARACTERS = docstrings.MIN_CHARACTERS
SUFFIXES = (".py", ".pyi")
FILES_AT_ONCE = 128  # files for one reader process
ROWS = {"rows": (np.uint8, (None,))}  # the cached entries of a package, as JSON


@dataclass(frozen=True)
class Entry:
    """One object or topic.

    Attributes:
        package: Top-level package or module; "builtins" for builtins and "python" for language topics.
        name: Public name, without "builtins", or the topic.
        signature: Parameters from `inspect` or the source; often "" for objects that are not functions.
        text: Dedented docstring; "" for a class or function of the standard library that has none and that a module lists in
            `__all__`.
        module: Module to import, the most public one: "numpy" for `numpy._core.fromnumeric.sort`; "builtins" for builtins, "" for
            language topics.
        qualname: Name inside the module, as Python's `__qualname__`: "sort"; "" for a module or a topic.
        mentions: For an object of the standard library the number of its public modules whose code has every part of the public
            name as a global, an attribute or an import: os and remove for `os.remove`. Of a method of a builtin class only the
            last part counts, so classes with a method of the same name have the same number. 0 for topics and other packages,
            whose common names are often those of builtins too.
    """

    package: str
    name: str
    signature: str
    text: str
    module: str = ""
    qualname: str = ""
    mentions: int = 0

    @property
    def public_name(self) -> str:
        """Module and name inside the module: `numpy.sort`; without "builtins"."""
        if not self.module:
            return self.name
        return ".".join(part for part in (self.module, self.qualname) if part).removeprefix("builtins.")

    @property
    def full_text(self) -> str:
        """Name, signature and docstring: the input of a model."""
        return f"{self.name}{self.signature}\n{self.text}"


def collect_documentation(
    show_progress: bool = True,
    packages: Collection[str] | None = None,
    cache_dir: str | Path | None = CACHE,
    public_api: bool = False,
) -> list[Entry]:
    """Read the documentation of the running Python, without duplicates, in a fixed order.

    Entries are cached. The standard library is read again when Python's version or location changes, and another package when
    the size or modification time of any of its files changes.

    Args:
        show_progress: Show a progress bar over files.
        packages: Packages and modules, each with its submodules: "json", "os.path", "torch.nn"; "python" is the standard library
            with the language topics. Default: everything that is installed.
        cache_dir: Folder of the cache; None disables the cache.
        public_api: The names that users write instead of all docstrings: leave out entries whose public name has a part that
            begins with an underscore, and functions inside functions, and add the classes and functions of the standard library
            that have no docstring (`Entry.text` is ""). A package that is named with its private part, such as
            "torch._inductor", keeps its entries.

    Raises:
        ValueError: A package is not installed or has no documentation, or its name is empty.
        RuntimeError: The reader process failed.
    """
    if packages is not None and not (packages and all(name.strip() for name in packages)):
        raise ValueError(f"packages={list(packages)} has no name or an empty name; give names such as 'json'")
    installed = installed_packages()
    wanted = None if packages is None else {name.split(".")[0] for name in packages}
    for name in sorted((wanted or set()) - set(installed) - sys.stdlib_module_names - {"python"}):
        if paths := _paths_elsewhere(name):
            installed[name] = paths
    library = _standard_library(cache_dir, public_api) if wanted is None or wanted - set(installed) else []
    chosen = {name: paths for name, paths in installed.items() if wanted is None or name in wanted}
    entries = library + read_packages(chosen, show_progress, cache_dir)
    if packages is None and public_api:
        entries = [entry for entry in entries if _is_public(entry)]
    if packages is not None:
        found = {
            name: library if name == "python" else [entry for entry in entries if _is_within(entry, name, public_api)]
            for name in packages
        }
        if missing := sorted(name for name, each in found.items() if not each):
            raise ValueError(
                f"no documentation found for {', '.join(missing)}: not installed, not public, or no source or stub that this "
                "Python can parse has docstrings; check the name ('python' is the standard library)"
            )
        entries = [entry for each in found.values() for entry in each]
    return without_duplicates(entries)


def all_entries(
    more: Iterable[Path] = (), show_progress: bool = True, cache_dir: str | Path | None = CACHE
) -> list[Entry]:
    """Read all documentation of the running Python and of unpacked packages, with duplicates.

    Args:
        more: Folders with packages, such as site-packages; they replace installed packages and modules of the same names.
        show_progress: Show a progress bar over files.
        cache_dir: Folder of the cache; None disables the cache.
    """
    chosen = installed_packages()
    for folder in more:
        chosen |= packages_in([folder])
    return _standard_library(cache_dir) + read_packages(chosen, show_progress, cache_dir)


def without_duplicates(entries: Iterable[Entry]) -> list[Entry]:
    """Return the first entry with each text, and every entry without a text."""
    unique: dict[str | Entry, Entry] = {}
    for entry in entries:
        unique.setdefault(entry.text or entry, entry)
    return list(unique.values())


def first_sentence(text: str) -> tuple[str, str]:
    """Split a text into its first sentence, on one line, and the rest; without a full stop, split after the first paragraph."""
    paragraph = re.split(r"\n\s*\n", text, maxsplit=1)[0]
    found = re.match(r".+?[.!?](?=\s|$)", paragraph, re.DOTALL)
    end = found.end() if found else len(paragraph)
    return " ".join(text[:end].split()), text[end:].strip()


def views(entry: Entry) -> list[str]:
    """The texts of an entry that the search embeds, one vector each: first sentence, and rest of the docstring if there is one.

    Each begins with the name, split into words; an entry without a docstring has its name alone. An everyday question resembles
    the sentence alone more than the whole text, and a question about a detail resembles the rest (benchmarks/questions.py).
    """
    name = words_of(entry.name)
    return [f"{name}\n{part}" for part in first_sentence(entry.text) if part] or [name]


def retrieval_pairs(entries: Iterable[Entry]) -> list[dict[str, str]]:
    """Return pairs of query and document: the first sentence of a docstring, and name, signature and rest of the docstring.

    Sentences of fewer than 4 words or more than 300 characters are skipped. So are sentences that occur in several entries,
    since their document is ambiguous, and entries whose rest is too short.
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
    """Return `retrieval_pairs` and, for entries with a signature, pairs of name with signature and docstring."""
    entries = list(entries)
    named = [{"query": f"{e.name}{e.signature}", "document": e.text} for e in entries if e.signature and e.text]
    return retrieval_pairs(entries) + named


def _is_within(entry: Entry, name: str, public_api: bool) -> bool:
    """Whether an entry is in a package or module, by the name that its source has or by its public name."""
    is_inside = entry.package == name.split(".")[0] and (
        name == entry.package or any(f"{each}.".startswith(f"{name}.") for each in (entry.name, entry.public_name))
    )
    return is_inside and (not public_api or _is_public(entry, name))


def _is_public(entry: Entry, package: str = "") -> bool:
    """Whether the public name has no private part after the name of the package; topics are public."""
    below = entry.public_name.removeprefix(package).strip(".")
    return not (entry.module and below) or reexports.is_public(below)


def _standard_library(cache_dir: str | Path | None, with_undocumented: bool = False) -> list[Entry]:
    root = sysconfig.get_paths()["stdlib"]
    folders = [each for each in (root, os.path.join(root, "lib-dynload")) if os.path.isdir(each)]
    # systems have modules in packages of their own, such as tkinter, that can be installed later
    key = [sys.version, sys.platform, root, *(name for folder in folders for name in sorted(os.listdir(folder)))]
    rows = _kept(cache_dir, "python", key)
    if rows is None:
        rows = _run_reader({})
        _keep(cache_dir, "python", key, rows)
    return [entry for entry in (Entry(*row) for row in rows) if entry.text or with_undocumented]


def read_packages(
    paths: dict[str, list[Path]], show_progress: bool = True, cache_dir: str | Path | None = CACHE
) -> list[Entry]:
    """Return the entries of packages, each given by its name and the paths of its folders and modules; none of them is run."""
    packages = {name: _python_files(each) for name, each in paths.items()}
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
    unreadable = []
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,  # each thread waits for a process
        tqdm(
            total=len(files), desc="reading documentation", unit=" files", disable=not (show_progress and files)
        ) as bar,
    ):
        results = pool.map(lambda job: _run_reader({"files": [file[1:] for file in job]}), jobs)
        for job, result in zip(jobs, results):
            bar.update(len(job))
            for (name, _, file), each in zip(job, result):
                if each is None:
                    unreadable.append(file)
                else:
                    found[name].append(each)
    if unreadable:
        logger.warning(
            f"{len(unreadable)} of {len(files)} Python files cannot be parsed by Python {sys.version_info.major}."
            f"{sys.version_info.minor} and are left out, such as {unreadable[0]}"
        )
    for name, key in missing.items():
        rows[name] = reexports.public_rows(found[name])
        _keep(cache_dir, name, key, rows[name])
    return [Entry(*row) for name in packages for row in rows[name]]


def _run_reader(job: dict):
    """Run a job of `docstrings.py` in a Python process without site-packages, in an empty folder.

    A process pool would run the caller's script again in each worker on macOS and Windows; a command does not.
    """
    command = [sys.executable, "-I", "-S", "-B", docstrings.__file__]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, encoding="utf-8", cwd=folder
        )
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2] or "no message"
        raise RuntimeError(
            f"reading the documentation with {' '.join(command)} failed with status {done.returncode}: {last_line}"
        )
    return json.loads(done.stdout)


def _kept(cache_dir: str | Path | None, name: str, key: Sequence[str]) -> list | None:
    kept = cache_dir and load_arrays(_cache_file(cache_dir, name, key), ROWS)
    return json.loads(kept["rows"].tobytes()) if kept else None


def _keep(cache_dir: str | Path | None, name: str, key: Sequence[str], rows: list) -> None:
    if cache_dir:
        text = json.dumps(rows).encode()
        save_arrays(_cache_file(cache_dir, name, key), {"rows": np.frombuffer(text, np.uint8)})


def _cache_file(cache_dir: str | Path, name: str, key: Sequence[str]) -> Path:
    readers = [Path(each.__file__).read_text("utf-8") for each in (docstrings, reexports)]
    digest = hashlib.sha256("\0".join([*readers, *key]).encode()).hexdigest()[:32]
    return Path(cache_dir, f"documentation-{name}-{digest}.safetensors")


def installed_packages() -> dict[str, list[Path]]:
    """Return the paths of top-level packages and modules outside the standard library."""
    return packages_in(installation_folders())


def installation_folders() -> list[str]:
    """Return the folders of installed packages."""
    paths = sysconfig.get_paths()
    return sorted({paths["purelib"], paths["platlib"]})


def _paths_elsewhere(name: str) -> list[Path]:
    """Return the paths of a package outside `installation_folders`, such as that of `pip install -e`; it is not imported."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    paths = [Path(path) for path in spec.submodule_search_locations or filter(None, [spec.origin])]
    return [path for path in paths if path.is_dir() or path.suffix in SUFFIXES]


def packages_in(folders: Iterable[str | Path]) -> dict[str, list[Path]]:
    """Return the paths of the top-level packages and modules in folders; stubs belong to their package."""
    found: dict[str, list[Path]] = {}
    for root in folders:
        for path in sorted(Path(root).iterdir()) if Path(root).is_dir() else ():
            is_folder = path.is_dir()
            name = path.name.removesuffix("-stubs") if is_folder else path.stem
            if (is_folder or path.suffix in SUFFIXES) and name.isidentifier() and name not in SKIPPED_FOLDERS:
                found.setdefault(name, []).append(path)
    return found


def _python_files(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """Return pairs of root and file for all sources and stubs at and below the paths."""
    found = []
    for path in paths:
        files = [] if path.is_dir() else [str(path)]
        for folder, subfolders, names in os.walk(path):
            subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
            sources = [os.path.join(folder, name) for name in sorted(names) if name.endswith(SUFFIXES)]
            files += filter(os.path.isfile, sources)  # an editor's lock is a link to nothing
        found += [(str(path.parent), file) for file in files]
    return found
