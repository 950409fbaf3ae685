"""Search of the user's own files by meaning: `DocumentSearch`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from ..runs import MINI_MODEL_PATH
from ..runs.commands import one_line
from .kept import BLOCK, CACHE, Kept
from .memory import check_memory
from .models import fingerprint
from .passages import CONVERTED, Passage, PassageReader, find_files
from .vector_files import longest_input, open_for_inference, set_max_length

# Tokens of a passage, if the model reads more: one vector of a long text says little about each of its parts.
LONGEST = 512
SHOWN_LINES, SHOWN_PROBLEMS = 3, 3


@dataclass(frozen=True)
class Answer:
    """A passage that answers a question.

    Args:
        file: Path of the file.
        line: Line of the passage; see `Passage`.
        score: Similarity of question and passage, as the model defines it: mostly the cosine.
        text: The passage.
    """

    file: str
    line: int
    score: float
    text: str


class DocumentSearch:
    """The passages of files and folders with their vectors, which questions search exactly.

    Vectors are kept by content, so a later search embeds the passages that are new or changed.

    Args:
        paths: Files, folders, and patterns such as `notes/**/*.md`. A folder contributes the files whose suffix is in
            `PassageReader.SUFFIXES`. A named file of another suffix is read as text.
        model: Embedding model, as a folder or a Hub id.
        max_length: Longest passage in tokens, special tokens included; by default what the model reads, at most 512.
        text_column: Column of the texts in .jsonl, .json, .csv, .tsv and .parquet.
        cache: SQLite file that keeps the vectors, by default in the cache of Hugging Face; what no search has used for 30
            days is removed.

    Raises:
        ValueError: There is no text, a named file is not valid, or the model cannot be opened.
        OSError: A path does not exist, or a named file cannot be read.
        RuntimeError: The cache cannot be read or written.
        ImportError: The format of a named file needs a package that is not installed.
    """

    def __init__(
        self,
        paths: Sequence[str],
        model: str = MINI_MODEL_PATH,
        max_length: int | None = None,
        text_column: str = "text",
        cache: str | Path | None = None,
    ) -> None:
        files, self.skipped = find_files(paths, PassageReader.SUFFIXES)
        self.problems = []  # one line for each file of a folder that cannot be read
        sizes = {file: os.stat(file).st_size for file in files if file.exists()}
        num_bytes = sum(size for file, size in sizes.items() if file.suffix.lower() not in CONVERTED)
        check_memory(num_bytes, f"searching {', '.join(paths)}", "search fewer files at once")
        self.encoder = open_for_inference(model)
        longest = longest_input(self.encoder)
        if longest is not None:
            set_max_length(self.encoder, max_length)
        self.passages, vectors = [], bytearray()
        with closing(Kept(Path(cache or CACHE))) as kept:
            reader = PassageReader(self.encoder, max_length or min(longest or LONGEST, LONGEST), kept, text_column)
            identity = f"document {fingerprint(self.encoder, {})}"
            passages = self._read(files, sizes, reader)
            while block := list(islice(passages, BLOCK)):
                self.passages += block
                vectors += kept.vectors([passage.text for passage in block], self._encode, identity).tobytes()
            kept.remove_old()
        if not self.passages:
            problems = "".join(f"; {problem}" for problem in self.problems[:1])
            raise ValueError(f"{', '.join(paths)}: no text to search{problems}; {self.summary().splitlines()[0]}")
        self.vectors = np.frombuffer(vectors, np.float32).reshape(len(self.passages), -1)

    def _read(self, files: dict[Path, bool], sizes: dict[Path, int], reader: PassageReader) -> Iterator[Passage]:
        """Passages of all files, with a progress bar; a file of a folder that cannot be read is skipped from there on."""
        # The bar appears after a second: a search whose vectors are all kept has none.
        with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc="reading", delay=1, disable=None) as bar:
            for file, is_named in files.items():
                left = sizes.get(file, 0)
                try:
                    for passage in reader.read(file):
                        step = min(left, len(passage.text.encode()))
                        left -= step
                        bar.update(step)
                        yield passage
                except (ValueError, OSError, ImportError) as error:
                    if is_named:
                        raise
                    self.problems.append(one_line(error))
                bar.update(left)

    def _encode(self, texts: list[str]) -> np.ndarray:
        return self.encoder.encode_document(texts, batch_size=64, show_progress_bar=False)

    def search(self, question: str, top_k: int = 5) -> list[Answer]:
        """Return the passages that answer a question best, best first.

        Raises:
            ValueError: The question has no words, or `top_k` is less than 1.
        """
        from sentence_transformers.util import semantic_search

        check_question(question, top_k)
        vector = np.asarray(self.encoder.encode_query([question], show_progress_bar=False), np.float32)
        options = {"top_k": top_k, "score_function": self.encoder.similarity, "corpus_chunk_size": 1 << 16}
        hits = semantic_search(vector, self.vectors, **options)[0]
        return [Answer(score=hit["score"], **vars(self.passages[hit["corpus_id"]])) for hit in hits]

    def summary(self) -> str:
        """Return one line about what is searched and what was skipped, and a line for each of the first problems."""
        num_files = len({passage.file for passage in self.passages})
        skipped = ", ".join(f"{what} {count:,}" for what, count in self.skipped.most_common() if count)
        lines = [
            f"files: {num_files:,}, passages: {len(self.passages):,}" + (f"; skipped: {skipped}" if skipped else "")
        ]
        lines += [f"not read: {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
        if more := self.problems[SHOWN_PROBLEMS:]:
            lines.append(f"not read: {len(more):,} more files")
        return "\n".join(lines)


def check_question(question: str, top_k: int) -> None:
    """Raise ValueError if a question has no words, or no answer is asked for."""
    if not any(map(str.isalnum, question)):
        raise ValueError(f"the question {question!r} has no words; ask in words")
    if top_k < 1:
        raise ValueError(f"top_k={top_k} is less than 1; give 1 or more")


def search_documents(words: Sequence[str], top_k: int = 5, as_json: bool = False, **options) -> None:
    """Print the answers to questions: what `neobert search` does.

    Args:
        words: Paths, then the question. If the last word is a path too, the questions are read from the terminal, or from the
            lines of the standard input.
        top_k: Number of answers.
        as_json: Print a line of JSON for each question, with whole passages.
        options: Of `DocumentSearch`.

    Raises:
        ValueError: As of `DocumentSearch` and its `search`; its other errors are raised too.
    """
    has_question = len(words) > 1 and not os.path.lexists(words[-1])
    paths, questions = (words[:-1], [words[-1]]) if has_question else (words, _asked())
    for question in questions if has_question else ():
        check_question(question, top_k)
    documents = DocumentSearch(paths, **options)
    print(documents.summary(), file=sys.stderr)
    for question in questions:
        answers = documents.search(question, top_k)
        if as_json:
            content = {"question": question, "answers": [vars(answer) for answer in answers]}
            print(json.dumps(content, ensure_ascii=False), flush=True)
        else:
            print("\n\n".join(_shown(answer) for answer in answers), flush=True)


def _shown(answer: Answer) -> str:
    """File and line, score, and the first lines of the passage in the width of the terminal."""
    form = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, "    ", "    ", max_lines=SHOWN_LINES, placeholder=" ..."
    )
    return f"{answer.file}:{answer.line}  ({answer.score:.2f})\n{form.fill(answer.text)}"


def _asked() -> Iterator[str]:
    """Questions from the terminal until an empty line, or from all lines of the standard input that are not empty."""
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    while True:
        print("\nquestion (an empty line ends): ", end="", file=sys.stderr, flush=True)
        if not (question := sys.stdin.readline().strip()):
            return
        yield question
