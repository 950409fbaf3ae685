"""Passages of the user's own files: which files are read (`find_files`), and how their texts are cut (`PassageReader`)."""

from __future__ import annotations

import errno
import io
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from ..files.rows import SUFFIXES as ROWS
from ..files.rows import read_texts
from ..files.wordpiece import plain_tokenizer, tokenizer_hash
from .kept import Kept, key_of

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

MARKDOWN = (".md", ".markdown")
TEXT = (".txt", ".rst")
CONVERTED = (".html", ".htm", ".pdf", ".docx")  # by markitdown, to Markdown
LINE_FEED = b"\n"
BLOCK = 1 << 16  # characters of a file that are cut at once; the time of the splitter grows faster than the text
OVERLAP = 8  # neighbours share at most an eighth of a passage
INSTALL = "pip install -e '.[documents]'"


@dataclass(frozen=True)
class Passage:
    """A passage of a file.

    Args:
        file: Path of the file.
        line: Line of the file where the passage begins, from 1; of rows, the line or the number of the row; of HTML, PDF and
            DOCX, the line of the converted text.
        text: The passage.
    """

    file: str
    line: int
    text: str


def find_files(paths: Sequence[str], suffixes: Sequence[str]) -> tuple[dict[Path, bool], Counter]:
    """Find the files of paths; links to folders inside a folder are not followed.

    Args:
        paths: Files, folders, and patterns such as `notes/**/*.md`.
        suffixes: Suffixes of the files that a folder contributes.

    Returns:
        The files in their order, and whether a path or a pattern names the file itself; and how many entries of folders were
        skipped, by reason.

    Raises:
        OSError: A path does not exist, or a pattern has no match.
    """
    files, skipped = {}, Counter()
    for path in paths:
        matches = [Path(path)] if os.path.lexists(path) else _matches(Path(path))
        if not matches:
            raise FileNotFoundError(errno.ENOENT, "No such file or folder", path)
        for match in matches:
            if match.is_dir():
                for file in _files_of_folder(match, suffixes, skipped):
                    files.setdefault(file, False)
            else:
                files[match] = True
    return files, skipped


def _matches(pattern: Path) -> list[Path]:
    """Files and folders that match a pattern; hidden ones must be named. Unlike `glob.glob`, ** does not follow links."""
    found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
    return sorted(
        match for match in found if all(part in pattern.parts for part in match.parts if part.startswith("."))
    )


def _files_of_folder(folder: Path, suffixes: Sequence[str], skipped: Counter) -> Iterator[Path]:
    def skip(error: OSError) -> None:
        skipped["folders without access"] += 1

    for root, folders, names in os.walk(folder, onerror=skip):
        skipped["hidden"] += sum(name.startswith(".") for name in folders + names)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        skipped["links to folders"] += sum(os.path.islink(os.path.join(root, name)) for name in folders)
        for name in sorted(name for name in names if not name.startswith(".")):
            suffix = Path(name).suffix.lower()
            if suffix in suffixes:
                yield Path(root, name)
            else:
                skipped[suffix or "without a suffix"] += 1


def document_prompt(encoder: SentenceTransformer) -> str:
    """Return the text that `encode_document` puts before each text."""
    names = [name for name in ("document", "passage", "corpus") if name in encoder.prompts]
    return encoder.prompts.get(names[0] if names else encoder.default_prompt_name) or ""


class PassageReader:
    """Cuts the texts of files into passages that a model reads whole: at headings, paragraphs, sentences or words.

    semantic-text-splitter cuts, with the model's tokenizer. Where it cuts is kept, and so is the text of a converted file.

    Args:
        encoder: Embedding model.
        max_length: Longest passage in tokens, with special tokens and the prompt.
        kept: Where the results are kept.
        text_column: Column of the texts in rows.

    Raises:
        ValueError: The model has no fast tokenizer, or its length leaves no room for a passage.
    """

    SUFFIXES = (*MARKDOWN, *TEXT, *ROWS, *CONVERTED)

    def __init__(self, encoder: SentenceTransformer, max_length: int, kept: Kept, text_column: str = "text") -> None:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter

        if not getattr(encoder.tokenizer, "is_fast", True):
            raise ValueError("the model's tokenizer is not a fast one; choose a model with a tokenizer.json")
        tokenizer = plain_tokenizer(encoder.tokenizer)
        num_before = len(tokenizer.encode(document_prompt(encoder)).ids)  # special tokens and prompt
        self.capacity = max_length - num_before
        if self.capacity < 1:
            raise ValueError(
                f"max_length={max_length} leaves no token beside the {num_before} of the prompt and the special tokens; give "
                f"{num_before + 1} or more"
            )
        options = {"capacity": self.capacity, "overlap": self.capacity // OVERLAP}
        self.markdown = MarkdownSplitter.from_huggingface_tokenizer(tokenizer, **options)
        self.plain = TextSplitter.from_huggingface_tokenizer(tokenizer, **options)
        self.identity = f"{tokenizer_hash(tokenizer)} {options}"
        self.kept, self.text_column = kept, text_column

    def read(self, file: Path) -> Iterator[Passage]:
        """Yield the passages of a file that have a letter or a digit.

        Raises:
            ValueError: The file is not UTF-8 text, has no column of texts, or cannot be converted.
            OSError: The file cannot be read.
            ImportError: Its format needs a package that is not installed.
        """
        suffix = file.suffix.lower()
        splitter = self.markdown if suffix in (*MARKDOWN, *CONVERTED) else self.plain
        blocks = _row_blocks(file, self.text_column) if suffix in ROWS else _text_blocks(file, self._open(file))
        for block in blocks:
            for number, start, end in self._cuts(splitter, [text for _, text in block]):
                line, text = block[number]
                if suffix not in ROWS:
                    line += text.count("\n", 0, start)
                if any(map(str.isalnum, text[start:end])):
                    yield Passage(str(file), line, text[start:end])

    def _open(self, file: Path) -> BinaryIO:
        """The file, or its text as Markdown."""
        if file.suffix.lower() not in CONVERTED:
            return file.open("rb")
        key = key_of("markdown", file.suffix.lower(), file.read_bytes())
        return io.BytesIO(self.kept.once(key, lambda: _as_markdown(file).encode()))

    def _cuts(self, splitter, texts: list[str]) -> list[tuple[int, int, int]]:
        """Number of the text, start and end of each passage, in characters."""

        def cut() -> bytes:
            cuts = splitter.chunk_all_indices(texts)
            spans = [(i, start, start + len(passage)) for i, found in enumerate(cuts) for start, passage in found]
            return np.array(spans, np.int64).tobytes()

        stored = self.kept.once(key_of("cuts", self.identity, type(splitter).__name__, *texts), cut)
        return np.frombuffer(stored, np.int64).reshape(-1, 3).tolist()


def _row_blocks(file: Path, text_column: str) -> Iterator[list[tuple[int, str]]]:
    """The texts of rows in lists of about BLOCK characters, each after the number of its line or row."""
    block, num_characters = [], 0
    for place, text in read_texts(file, text_column):
        block.append((int(re.search(r"\d+$", place)[0]), text))
        num_characters += len(text)
        if num_characters >= BLOCK:
            yield block
            block, num_characters = [], 0
    if block:
        yield block


def _text_blocks(file: Path, handle: BinaryIO) -> Iterator[list[tuple[int, str]]]:
    """Parts of a text, of whole lines and about BLOCK characters, each after the number of its first line, in a list."""
    line = 1
    with handle:
        while lines := handle.readlines(BLOCK):
            content = b"".join(lines)
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                place = f"{file}, line {line + content.count(LINE_FEED, 0, error.start)}"
                raise ValueError(f"{place} is not UTF-8; convert the file, for example with iconv") from error
            if line == 1:
                text = text.removeprefix("\ufeff")  # byte order mark
            for start in range(0, len(text), 2 * BLOCK):  # a line may be longer
                part = text[start : start + 2 * BLOCK]
                yield [(line, part)]
                line += part.count("\n")


def _as_markdown(file: Path) -> str:
    try:
        from markitdown import MarkItDown, MarkItDownException
        from markitdown.converters import DocxConverter, HtmlConverter, PdfConverter
    except ImportError as error:
        raise ImportError(f"{file}: {file.suffix} is read by markitdown; install it: {INSTALL}") from error
    converter = MarkItDown(enable_builtins=False)  # the others would read a damaged PDF as plain text
    for kind in (DocxConverter, HtmlConverter, PdfConverter):
        converter.register_converter(kind())
    try:
        text = converter.convert(file).markdown
    except MarkItDownException as error:
        reason = textwrap.shorten(str(error), 160, placeholder=" ...")
        raise ValueError(f"{file} cannot be converted to text ({reason}); check the file, and {INSTALL}") from error
    if not any(map(str.isalnum, text)):
        raise ValueError(f"{file} has no text; if it has pictures of pages, recognize their text first")
    return text
