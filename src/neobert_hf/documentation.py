"""Real text that every machine has: the documentation inside its own Python.

Docstrings of the standard library and of the installed packages, and the language topics of `help()`, read with `ast`; no
code of theirs runs.
"""

import ast
import json
import os
import random
import re
import sysconfig
import textwrap
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm
from transformers.utils import logging

from .wordpiece import train_wordpiece

logger = logging.get_logger(__name__)

# Folders without documentation for users.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "testing", "idle_test", "lib2to3", "__pycache__"}
MIN_CHARACTERS = 40  # a shorter docstring says no more than the name


@dataclass(frozen=True)
class Entry:
    """One documented thing.

    Attributes:
        package: Top-level package, "python" for the topics of the language.
        name: Qualified name, or the topic.
        signature: Parameters as written in the source, "" for modules, classes and topics.
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


def collect_documentation(show_progress: bool = True, packages: Collection[str] | None = None) -> list[Entry]:
    """Read the documentation of the running Python, without duplicates, in a fixed order.

    Args:
        show_progress: Show a progress bar over files.
        packages: Top-level packages and modules to read; "python" is the standard library with the topics of the language.
            All that is installed, by default.

    Raises:
        ValueError: A package is not installed.
    """
    paths = sysconfig.get_paths()
    roots = sorted({Path(paths[name]) for name in ("stdlib", "purelib", "platlib")})
    files = [(root, file) for root in roots for file in _python_files(root)]
    if packages is not None:
        owners = [_owner(root, file, Path(paths["stdlib"])) for root, file in files]
        if missing := set(packages) - set(owners):
            raise ValueError(f"no Python files here of {', '.join(sorted(missing))}; 'python' is the standard library")
        files = [each for each, owner in zip(files, owners) if owner in packages]
    with ProcessPoolExecutor() as pool:
        read = pool.map(_read_file, files, chunksize=64)
        found = list(
            tqdm(read, total=len(files), desc="reading documentation", unit=" files", disable=not show_progress)
        )
    if unreadable := sum(entries is None for entries in found):
        logger.info(f"{unreadable} of {len(files)} Python files could not be parsed and were left out")
    unique = {entry.text: entry for entries in found for entry in entries or ()}
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

    Args:
        output_dir: Folder to write to; made if it is not there.
        num_held_out: Entries that are held out.
        held_out_packages: Names of top-level packages.
        vocab_size: Size of the vocabulary.
        seed: Of the order.

    Returns:
        Number of entries in each file.

    Raises:
        ValueError: A package has no documentation here, or everything would be held out.
    """
    folder, held_out = Path(output_dir), set(held_out_packages or ())
    entries = collect_documentation()
    if missing := held_out - {entry.package for entry in entries}:
        raise ValueError(f"held_out_packages: {', '.join(sorted(missing))} has no documentation in this Python")
    random.Random(seed).shuffle(entries)
    files = {"held_out_packages": [entry for entry in entries if entry.package in held_out]}
    rest = [entry for entry in entries if entry.package not in held_out]
    if not 0 <= num_held_out < len(rest):
        raise ValueError(f"num_held_out={num_held_out} leaves nothing of {len(rest)} entries; hold out fewer")
    files |= {"held_out": rest[:num_held_out], "train": rest[num_held_out:]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in files.items():
        for stale in (folder / f"{name}.jsonl", folder / f"{name}_pairs.jsonl"):
            stale.unlink(missing_ok=True)  # of an earlier corpus, of which other entries were held out
        if chosen:
            rows = [{"package": e.package, "name": e.name, "text": e.full_text} for e in chosen]
            pairs = (training_pairs if name == "train" else retrieval_pairs)(chosen)
            for file, lines in {name: rows, f"{name}_pairs": pairs}.items():
                (folder / f"{file}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    train_wordpiece([entry.full_text for entry in files["train"]], vocab_size).save_pretrained(folder / "tokenizer")
    return {name: len(chosen) for name, chosen in files.items()}


def _owner(root: Path, file: Path, standard_library: Path) -> str:
    return "python" if root == standard_library else file.relative_to(root).with_suffix("").parts[0]


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _read_file(root_and_file: tuple[Path, Path]) -> list[Entry] | None:
    """The entries of one file, or None if it is not Python that this version can parse."""
    root, file = root_and_file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return None
    if file.parts[-2:] == ("pydoc_data", "topics.py"):
        return list(_topics(tree))
    parts = file.relative_to(root).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return list(_docstrings(tree, ".".join(parts))) if parts else []


def _docstrings(node: ast.AST, name: str) -> Iterator[Entry]:
    text = ast.get_docstring(node)
    if text and len(text) >= MIN_CHARACTERS:
        signature = f"({ast.unparse(node.args)})" if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""
        yield Entry(name.split(".")[0], name, signature, text.encode("utf-8", "replace").decode())
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings(child, f"{name}.{child.name}")


def _topics(tree: ast.Module) -> Iterator[Entry]:
    assignment = next(node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign)))
    for topic, text in ast.literal_eval(assignment.value).items():
        yield Entry("python", topic, "", textwrap.dedent(re.sub(r"\n{3,}", "\n\n", text)).strip())
