"""Search of the user's own files by words and by meaning: `DocumentSearch`."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import bm25s
import numpy as np
import regex
from huggingface_hub.constants import HF_HOME
from tqdm.auto import tqdm

from ..checkpoints import MINI_MODEL_PATH
from ..checkpoints.embedding_models import fingerprint, longest_input, prompt_of, warn_of_truncated
from ..data.finding import find_files
from ..data.lengths import DEFAULT_LENGTH, Truncation, as_list
from ..files.errors import one_line
from ..files.messages import first_of
from ..files.terminal import printable
from .kept import Kept, Passages
from .passages import JOINED, NOT_TEXT, PassageReader, guessed_encoding, is_document
from .vector_files import open_for_inference

CACHE = Path(HF_HOME) / "neobert_hf" / "search"  # may be deleted at any time
# Tokens of a passage, if the model reads more: one vector of a long text says little about each of its parts.
WORD = regex.compile(r"[\p{L}\p{M}\p{N}]+")  # read_csv has two; Hindi writes vowels as marks
WORD_WEIGHT = 0.4
LEAST_SHARE = 0.2  # so that "wait for a while" does not find every text with "a"
CHUNK = 1 << 16  # passages that are compared with a question at once
SHOWN = 3  # lines of a kind in the summary


@dataclass(frozen=True)
class Passage:
    """A passage of a file.

    Args:
        file: Path of the file.
        line: Line where the passage begins, from 1: of the file or of its converted text; in Parquet and in a JSON list, the row.
        score: Of an answer: the weighted mean of two numbers that are at most 1. One is the similarity of question and passage
            as the model defines it, mostly the cosine. The other is the BM25 of the question's words in the passage, divided by
            the largest one; if only common words of the question occur, by a fifth of the sum of the words' rarities.
        text: The passage.
    """

    file: str
    line: int
    score: float | None
    text: str


class DocumentSearch:
    """The passages of files and folders, which questions search exactly by words and by vectors (passages, dimension).

    Passages and vectors are kept by content, so a later search embeds the passages that are new or changed. The index of the
    words is built anew.

    Args:
        paths: Files, folders, and patterns such as `notes/**/*.md`, or one of them. A folder contributes documents, rows and
            text: files whose suffix is in `PassageReader.SUFFIXES`, or with no NUL byte in the first 8,000.
        model: Embedding model, as a folder or a Hub id.
        max_length: Longest passage in tokens, special tokens included; by default what the model reads, at most 512.
        text_column: Column of the texts in .jsonl, .json, .csv, .tsv and .parquet.
        cache: Folder with a file for each model, by default in the cache of Hugging Face.
        word_weight: Weight of the words in the score, from 0 (only vectors) to 1 (only words).
        include: Patterns such as `*.py`, or one of them. A file of a folder must match one of them: by its name, by that of a
            folder above it, or by its path in the folder that is searched.
        exclude: Patterns such as `tests` or `*.min.js` that a file of a folder must not match.
        encoding: Encoding of all text files; by default UTF-8, UTF-16 with a byte order mark, or what charset-normalizer guesses.
        truncation: What becomes of a question that is longer than the model reads: "warn", "error" or "off". Passages are never.

    Raises:
        ValueError: There is no text, a named file is not valid, the model cannot be opened, `word_weight` is out of range, or
            Python does not know the encoding.
        OSError: A path does not exist, or a named file cannot be read.
        ImportError: The format of a named file needs a package that is not installed.

    Source: Bruch, Gai and Ingber, "An analysis of fusion functions for hybrid retrieval", arXiv 2210.11934: a convex combination.
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        model: str = MINI_MODEL_PATH,
        max_length: int | None = None,
        text_column: str = "text",
        cache: str | Path | None = None,
        word_weight: float = WORD_WEIGHT,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        encoding: str | None = None,
        truncation: Truncation = "warn",
    ) -> None:
        if not 0 <= word_weight <= 1:
            raise ValueError(f"word_weight={word_weight} is not between 0 and 1; 0 ignores the words, 1 the vectors")
        try:
            "".encode(encoding or "utf-8")
        except LookupError as error:
            raise ValueError(f"{error}; --encoding takes a name that Python knows, such as cp1252") from error
        paths = as_list(paths)
        files, self.skipped = find_files(paths, is_document, as_list(include), as_list(exclude))
        self.encoder = open_for_inference(model, max_length)
        longest = max_length or min(longest_input(self.encoder) or DEFAULT_LENGTH, DEFAULT_LENGTH)
        reader = PassageReader(self.encoder, longest, text_column)
        identity = f"{fingerprint(self.encoder, {})}-{reader.capacity}"
        kept = Kept(Path(cache or CACHE, identity), f"search {identity}")
        self.word_weight = word_weight
        self.truncation = truncation
        self.passages = []
        self.guesses = []  # lines about encodings
        self.problems = []  # lines about what cannot be read
        try:
            self._read(files, encoding, reader, kept)
            if not self.passages:
                raise ValueError(f"{first_of(paths)}: no text to search; {'; '.join(self.summary().splitlines())}")
            encode = partial(self.encoder.encode_document, batch_size=64, show_progress_bar=False)
            self.vectors = kept.vectors([passage.text for passage in self.passages], encode)
        finally:
            kept.save()
        self.words = bm25s.BM25()
        self.words.index([words_of(passage.text) for passage in self.passages], show_progress=False)

    def _read(self, files: dict[Path, bool], encoding: str | None, reader: PassageReader, kept: Kept) -> None:
        """Read the passages of all files. A file that cannot be read is an error if it was named, otherwise a line."""
        for file, is_named in tqdm(files.items(), "reading", unit="file", delay=1, disable=None):
            try:
                used, found = passages_of(file, encoding, reader, kept)
            except (ValueError, OSError, ImportError) as error:
                if is_named:
                    raise
                problem = one_line(error)
                self.skipped["not read"] += 1
                self.problems.append(problem if str(file) in problem else f"{file}: {problem}")
                continue
            if used != encoding:
                self.guesses.append(f"{file}: read as {used}")
            for line, text in found:
                self.passages.append(Passage(str(file), line, None, text))

    def search(self, question: str, top_k: int = 5) -> list[Passage]:
        """Return the passages that answer a question best, best first.

        Raises:
            ValueError: The question has no words, or is refused because of its length, or `top_k` is less than 1.
        """
        check_question(question, top_k)
        warn_of_truncated(self.encoder, "the question", [prompt_of(self.encoder, "query") + question], self.truncation)
        vector = np.asarray(self.encoder.encode_query([question], show_progress_bar=False), np.float32)
        parts = []
        for start in range(0, len(self.vectors), CHUNK):
            parts.append(self.encoder.similarity(vector, self.vectors[start : start + CHUNK]).numpy()[0])
        scores = np.concatenate(parts)
        scores = (1 - self.word_weight) * scores + self.word_weight * self._scores_of_words(words_of(question))
        best = np.argsort(-scores, kind="stable")[:top_k]
        return [replace(self.passages[number], score=float(scores[number])) for number in best]

    def _scores_of_words(self, words: list[str]) -> np.ndarray:
        """BM25 (passages,) of some words, divided by the largest, or by a share of the words' rarities if that is more."""
        bm25 = self.words.get_scores(words)
        known = self.words.get_tokens_ids(words)
        num_with = np.zeros(len(words))
        num_with[: len(known)] = np.diff(self.words.scores["indptr"])[known]
        rarity = np.log(1 + (len(self.passages) - num_with + 0.5) / (num_with + 0.5))
        return bm25 / max(bm25.max(), LEAST_SHARE * rarity.sum())

    def summary(self) -> str:
        """Return a line about what is searched and what was skipped, and lines about the first files of a guessed encoding and
        the first that cannot be read."""
        num_files = len({passage.file for passage in self.passages})
        first = f"files: {num_files:,}, passages: {len(self.passages):,}"
        if self.guesses:
            first += f"; guessed encodings: {len(self.guesses):,}"
        skipped = ", ".join(f"{what} {count:,}" for what, count in self.skipped.most_common() if count)
        lines = [f"{first}; skipped: {skipped or 0}", *self.guesses[:SHOWN], *self.problems[:SHOWN]]
        return "\n".join(map(printable, lines))


def passages_of(file: Path, encoding: str | None, reader: PassageReader, kept: Kept) -> tuple[str | None, Passages]:
    """Return the encoding of a file, and its passages: those kept for its content, or else new ones of the same content.

    Raises:
        ValueError: The file changes while it is read; or as of `PassageReader.read`.
        OSError: The file cannot be read.
    """
    content = file.read_bytes()
    used = encoding or guessed_encoding(file, content)
    rules = f"{file.suffix} {reader.text_column} {used or ''}{NOT_TEXT.pattern}{JOINED.pattern}\n"
    key = hashlib.sha256(rules.encode() + content).hexdigest()
    passages = kept.passages(key, partial(reader.read, file, used))
    if file.read_bytes() != content:
        del kept.documents[key]  # they may be those of another content
        raise ValueError(f"{file} changes while it is read; search again when nothing writes to it")
    return used, passages


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, in any language that separates them."""
    return WORD.findall(unicodedata.normalize("NFC", text).lower())


def check_question(question: str, top_k: int) -> None:
    """Raise ValueError if a question has no words, or no answer is asked for."""
    if not any(map(str.isalnum, question)):
        raise ValueError(f"the question {question!r} has no words; ask in words")
    if top_k < 1:
        raise ValueError(f"top_k={top_k} is less than 1; give 1 or more")
