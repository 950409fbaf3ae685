"""Search the documentation of Python by meaning.

    python examples/documentation_search/search.py "read a file line by line"
    python examples/documentation_search/search.py --package numpy,json       (asks for questions; an empty line ends)

An answer has the name and the parameters, the first sentence, the import, and the cosine of question and entry, at most 1. The
first search embeds the entries of a package; later ones read the vectors from the folder `neobert_hf` in the cache of Hugging
Face (`HF_HOME`), which may be deleted at any time.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from docstrings import Entry, first_sentence, read, views
from huggingface_hub.constants import HF_HOME

from neobert_hf import MINI_MODEL_PATH, tune_allocator
from neobert_hf.embeddings import DocumentSearch
from neobert_hf.files import run_command

# When two entries score alike, the one that more code uses comes first: `str.startswith`, not `tkinter.Text.search`. This is
# what each doubling of 1 + mentions adds to the cosine; 3 of 60 everyday questions gain by it.
MENTION_BONUS = 0.01
# Of a text: about 64 tokens. If all of it is searched, 3 to 5 of 110 everyday questions lose, since a later passage has no name.
INDEXED_CHARACTERS = 300
CACHE = Path(HF_HOME) / "neobert_hf"


def main() -> None:
    """Read the command line, and answer questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("questions", nargs="*", metavar="QUESTION", help="Questions; without any, type them.")
    add("--package", default="python", help="Packages or modules, separated by commas; python: standard library.")
    add("--model", default=MINI_MODEL_PATH, help="Embedding model; default: the mini model of neobert_hf.")
    add("--top_k", type=int, default=3, help="Number of answers to a question.")
    arguments = parser.parse_args()

    tune_allocator()
    index = DocumentationIndex(read_cached(arguments.package.split(",")), arguments.model)
    print(f"{len(index.entries):,} entries")
    for question in arguments.questions or iter(ask, ""):
        print(question if arguments.questions else "")
        for entry, cosine in index.search(question, arguments.top_k):
            print(answer(entry, cosine, shutil.get_terminal_size().columns), flush=True)


def ask() -> str:
    """Return a line that the user types; "" at the end of the input."""
    try:
        return input("question: ").strip()
    except EOFError:
        return ""


class DocumentationIndex:
    """Entries in a `DocumentSearch`: a row for each of the entry's `views`, of which the nearest counts.

    Args:
        entries: Entries to search.
        model: Embedding model, as a folder or a Hub id.
    """

    def __init__(self, entries: list[Entry], model: str = MINI_MODEL_PATH) -> None:
        rows = [(entry, view[:INDEXED_CHARACTERS]) for entry in entries for view in views(entry)]
        self.entries, self.entry_of_row = entries, [entry for entry, _ in rows]
        with tempfile.TemporaryDirectory() as folder:  # the vectors are kept by content
            file = Path(folder, "views.jsonl")
            file.write_text("".join(f"{json.dumps(view)}\n" for _, view in rows), "utf-8")
            self.documents = DocumentSearch(file, model, cache=CACHE / "documentation", word_weight=0)

    def search(self, question: str, top_k: int) -> list[tuple[Entry, float]]:
        """Return the entries that match the question best, best first, each with its cosine."""
        cosines = {}
        for passage in self.documents.search(question, len(self.documents.passages)):  # best first
            cosines.setdefault(self.entry_of_row[passage.line - 1], passage.score)
        return sorted(cosines.items(), key=lambda found: -found[1] - bonus(found[0]))[:top_k]


def bonus(entry: Entry) -> float:
    """Return what the mentions of an entry add to its cosine."""
    return MENTION_BONUS * math.log2(1 + entry.mentions)


def answer(entry: Entry, cosine: float, width: int) -> str:
    """Return three lines about an entry: name and parameters, first sentence, import and score; `width` cuts the first two."""
    sentence = first_sentence(entry.text)[0] or "(no docstring)"
    lines = (f"  {entry.name}{entry.signature}", f"      {sentence}")
    title, about = (line if len(line) <= width else f"{line[: width - 4]} ..." for line in lines)
    used = f", mentioned in {entry.mentions} module{'s' * (entry.mentions > 1)}" if entry.mentions else ""
    return f"{title}\n{about}\n      {import_line(entry)}    ({cosine:.2f} cosine{used})"


def import_line(entry: Entry) -> str:
    """Return the import that gives a module, a function, or the class that holds a method."""
    if not entry.module:
        return "language topic"
    if entry.module == "builtins":
        return "built in"
    name = entry.qualname.split(".")[0]
    return f"from {entry.module} import {name}" if name else f"import {entry.module}"


def read_cached(packages: list[str]) -> list[Entry]:
    """Return the entries of packages; those of the standard library are read again when a module is added or removed."""
    entries = []
    for package in packages:
        if package != "python":
            entries += read((package,))
            continue
        root = sysconfig.get_path("stdlib")
        folders = [folder for folder in (root, f"{root}/lib-dynload") if os.path.isdir(folder)]
        files = chain.from_iterable(sorted(os.listdir(folder)) for folder in folders)
        source = Path(__file__).with_name("docstrings.py").read_text("utf-8")
        stored = kept(
            "python",
            [source, sys.version, sys.platform, root, *files],
            lambda: json.dumps([dataclasses.astuple(entry) for entry in read()]).encode(),
        )
        entries += [Entry(*row) for row in json.loads(stored)]
    return entries


def kept(name: str, key: list[str], compute: Callable[[], bytes]) -> bytes:
    """Return the bytes that are stored for this key; compute and store them if there are none."""
    digest = hashlib.sha256("".join(f"{part}\0" for part in key).encode())
    file = CACHE / f"{name}-{digest.hexdigest()[:32]}"
    if not file.exists():
        content, partial = compute(), file.with_suffix(f".{os.getpid()}")
        CACHE.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        os.replace(partial, file)
    return file.read_bytes()


if __name__ == "__main__":
    run_command("search.py", main)
