"""Passages of the user's own files: which files are read (`is_document`), and how their texts are cut (`PassageReader`)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoints.embedding_models import prompt_of
from ..data.lengths import plain_tokenizer
from ..data.rows import COMPRESSIONS, read_lines, read_texts
from ..data.rows import SUFFIXES as ROWS

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

MARKDOWN = (".md", ".markdown")
CONVERTED = (".html", ".htm", ".pdf", ".docx")  # by markitdown, to Markdown
NO_PLAIN_TEXT = (*CONVERTED, *COMPRESSIONS, ".parquet")
# The time of the splitter grows faster than the text, so it gets parts: the end, whole lines, or a part of a long line.
PARTS = re.compile(r"(?s).{1,65536}\Z|.{1,65535}\n|.{1,65536}")
# Data in text, which no question asks for: lines of base64 or one long run, but no path and no long name; hexadecimal digits, but
# no hash, of which SHA-512 has 128.
BASE64 = r"(?<![A-Za-z0-9+/])(?=[a-z0-9+/]*[A-Z])(?=[A-Z0-9+/]*[a-z])(?=[A-Za-z+/]*\d)[A-Za-z0-9+/]"
NOT_TEXT = re.compile(
    r"(?<!\w)data:\w+/[\w.+;=-]{1,99},[^\s\"'<>()]*"
    rf"|(?:{BASE64}{{60,}}\r?\n[ \t]*)+{BASE64}{{60,}}={{0,2}}|{BASE64}{{160,}}={{0,2}}"
    r"|(?<![A-Za-z0-9])[0-9A-Fa-f]{129,}"
)
JOINED = re.compile(r"[^\W\d_]{26,}")  # longer than words: the words of a PDF without the spaces between them
MOST_JOINED = 0.25  # of the characters; a text in Chinese has more, and pdfium reads it in the same way
NUM_TEXTS = 64  # texts that the splitter cuts at the same time
OVERLAP = 8  # neighbours share at most an eighth of a passage


def is_document(file: Path) -> bool:
    """Whether a file has a suffix of documents or rows, or is text as git defines it: no NUL byte in its first 8,000."""
    if file.suffix.lower() in PassageReader.SUFFIXES:
        return True
    try:
        with file.open("rb") as handle:
            return b"\0" not in handle.read(8000)
    except OSError:
        return True  # the reader names it


def guessed_encoding(file: Path, content: bytes) -> str | None:
    """Return the encoding of text that is not UTF-8, nor UTF-16 with a byte order mark; None for these and for other files.

    If cp1252 is one of those that charset-normalizer finds likely, it is the answer: for a short text many are.

    Raises:
        ValueError: No encoding is likely.
    """
    if file.suffix.lower() in NO_PLAIN_TEXT or content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return None
    try:
        content.decode()
    except UnicodeDecodeError:
        from charset_normalizer import from_bytes

        lines = [line for line in content.splitlines(True) if not line.isascii()]
        likely = []
        for match in from_bytes(b"".join(lines[:1000])):
            likely += match.could_be_from_charset
        if b"\0" in content or not likely:
            raise ValueError(f"{file} is not text, or its encoding cannot be guessed; name it, if it is text") from None
        return "cp1252" if "cp1252" in likely else likely[0]
    return None


class PassageReader:
    """Cuts the texts of files into passages that a model reads whole: at headings, paragraphs, sentences or words.

    Args:
        encoder: Embedding model with a fast tokenizer.
        max_length: Longest passage in tokens, with special tokens and the prompt.
        text_column: Column of the texts in rows.
    """

    SUFFIXES = (*MARKDOWN, ".txt", ".rst", *ROWS, *CONVERTED)

    def __init__(self, encoder: SentenceTransformer, max_length: int, text_column: str = "text") -> None:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter

        if not getattr(encoder.tokenizer, "is_fast", True):
            raise ValueError("the model's tokenizer is not a fast one; choose a model with a tokenizer.json")
        tokenizer = plain_tokenizer(encoder.tokenizer)
        prompt = prompt_of(encoder, "document", "passage", "corpus")  # as `encode_document`
        self.text_column = text_column
        self.capacity = max_length - len(tokenizer.encode(prompt).ids)
        if self.capacity < 1:
            raise ValueError(f"max_length={max_length} leaves no token beside the prompt of the model; give more")
        options = {"capacity": self.capacity, "overlap": self.capacity // OVERLAP}
        self.markdown = MarkdownSplitter.from_huggingface_tokenizer(tokenizer, **options)
        self.plain = TextSplitter.from_huggingface_tokenizer(tokenizer, **options)

    def read(self, file: Path, encoding: str | None = None) -> Iterator[tuple[int, str]]:
        """Yield line and text of the passages of a file that have a letter or a digit; errors are those of `DocumentSearch`.

        Args:
            file: The file.
            encoding: Of its text; None is UTF-8, or UTF-16 with a byte order mark.
        """
        suffix = file.suffix.lower()
        splitter = self.plain
        if suffix in (*CONVERTED, *MARKDOWN):
            splitter = self.markdown
        texts = []
        if suffix in ROWS:
            for place, text in read_texts(file, self.text_column, encoding=encoding):  # such as "a.csv, line 3"
                texts.append((int(place.rpartition(" ")[2]), without_data(text)))
        else:
            line = 1
            for part in PARTS.findall(without_data(_text_of(file, encoding))):
                texts.append((line, part))
                line += part.count("\n")
        for first in range(0, len(texts), NUM_TEXTS):
            some = texts[first : first + NUM_TEXTS]
            for (line, text), cuts in zip(some, splitter.chunk_all_indices([text for _, text in some])):
                for start, passage in cuts:
                    if any(map(str.isalnum, passage)):
                        is_within = suffix not in ROWS
                        yield line + is_within * text.count("\n", 0, start), passage


def _text_of(file: Path, encoding: str | None) -> str:
    if file.suffix.lower() in CONVERTED:
        return _as_markdown(file, encoding)
    return "\n".join(line for _, line in read_lines(file, encoding))


def without_data(text: str) -> str:
    """Return a text without data such as base64; its lines keep their numbers."""
    return NOT_TEXT.sub(lambda found: "\n" * found[0].count("\n"), text)


def _as_markdown(file: Path, encoding: str | None) -> str:
    from markitdown import FileConversionException, MarkItDown, StreamInfo
    from markitdown.converters import DocxConverter, HtmlConverter, PdfConverter

    converter = MarkItDown(enable_builtins=False)  # the others would read a damaged PDF as plain text
    for kind in (DocxConverter, HtmlConverter, PdfConverter):
        converter.register_converter(kind())
    try:
        text = converter.convert(file, stream_info=StreamInfo(charset=encoding)).markdown
    except FileConversionException as error:
        cause = error.attempts[0].exc_info[1]
        fault = f"cannot be read as {file.suffix[1:].upper()} ({cause})"
        if "Password" in type(cause).__name__:
            fault = "is encrypted; save it without a password"
        raise ValueError(f"{file} {fault}") from error
    if file.suffix.lower() == ".pdf" and _joined(text) > MOST_JOINED:
        from pypdfium2 import PdfDocument  # markitdown installs it for PDF, and it finds spaces by other rules

        with PdfDocument(file) as pages:
            texts = [page.get_textpage().get_text_bounded().replace("\r\n", "\n") for page in pages]
        text = min(text, "\n".join(texts), key=_joined)
    if not any(map(str.isalnum, text)):
        raise ValueError(f"{file} has no text; if it has pictures of pages, recognize their text first")
    return text


def _joined(text: str) -> float:
    """The share of the characters that are in words without spaces between them; 1 for no text."""
    num_joined = sum(map(len, JOINED.findall(text)))
    num_all = sum(map(len, text.split()))
    return num_joined / num_all if num_all else 1
