"""What is kept between two calls: the passages of documents, and the vectors of their texts (`Kept`)."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm
from transformers.utils import logging

from ..files.output import writing
from ..files.terminal import printable

logger = logging.get_logger(__name__)

DAYS = 30  # what nothing has used for this time is removed
BLOCK = 512  # texts that are embedded at once: seconds of work
Passages = list[tuple[int, str]]  # lines and texts
SAVE_SECONDS = 60  # a killed process loses the work of this time


class Kept:
    """Passages by document and vectors by text, in a file of three parts: a SHA-256, JSON, and the vectors in float32.

    A file that is damaged, of another identity, or open to other users is not believed: everything is embedded again. Of two
    processes, the last one that saves writes the file.

    Args:
        file: The file.
        identity: Names the model and all settings that decide a passage or a vector.
    """

    def __init__(self, file: Path, identity: str) -> None:
        self.file = file
        self.identity = identity
        self.documents = {}  # key: (day of last use, [(line, text), ...])
        self.by_text = {}  # its vector
        self.today = int(time.time() // 86400)
        self.saved = time.monotonic()
        self.is_new = False
        if os.path.lexists(file):
            try:
                self._load()
            except (OSError, ValueError) as error:
                logger.warning(printable(f"{file} is not used, and its texts are embedded again: {error}"))

    def _load(self) -> None:
        if os.name == "posix" and self.file.stat().st_mode & 0o077:
            raise ValueError("other users may read or change it")
        digest, _, body = self.file.read_bytes().partition(b"\n")
        if digest != self._digest(body):
            raise ValueError("it is damaged, or of another model, setting or version")
        head, _, content = body.partition(b"\n")
        stored = json.loads(head)
        self.documents = stored["documents"]
        texts = _texts(self.documents)
        vectors = np.frombuffer(content, "<f4").reshape(stored["shape"])
        self.by_text = {texts[number]: vector for number, vector in zip(stored["embedded"], vectors)}

    def _digest(self, body: bytes) -> bytes:
        return hashlib.sha256(self.identity.encode() + body).hexdigest().encode()

    def passages(self, key: str, read: Callable[[], Iterable]) -> Passages:
        """Return line and text of a document's passages, as kept under the key of its content, or else from `read`."""
        day, passages = self.documents.get(key) or (0, list(read()))
        if day != self.today:
            self.documents[key] = (self.today, passages)
            self.is_new = True
        return passages

    def vectors(self, texts: Sequence[str], encode: Callable[[list[str]], np.ndarray]) -> np.ndarray:
        """Return the vectors (texts, dimension) of passages in float32; `encode` gets those without one, equal ones once."""
        missing = [text for text in dict.fromkeys(texts) if text not in self.by_text]
        blocks = [missing[start : start + BLOCK] for start in range(0, len(missing), BLOCK)]
        for block in tqdm(blocks, "embedding", unit=f" x {BLOCK} texts", delay=1, disable=None):
            self.by_text |= zip(block, np.asarray(encode(block), np.float32))
            self.is_new = True
            if time.monotonic() - self.saved > SAVE_SECONDS:
                self.save()
        return np.stack([self.by_text[text] for text in texts])

    def save(self, is_required: bool = False) -> None:
        """Write the file for its owner only; if that fails and is not required, the work goes on in memory."""
        if not self.is_new:
            return
        documents = {key: each for key, each in self.documents.items() if each[0] >= self.today - DAYS}
        texts = _texts(documents)
        embedded = [number for number, text in enumerate(texts) if text in self.by_text]
        vectors = np.array([self.by_text[texts[number]] for number in embedded], "<f4")
        head = json.dumps({"documents": documents, "embedded": embedded, "shape": vectors.shape})
        body = head.encode() + b"\n" + vectors.tobytes()
        try:
            self.file.parent.mkdir(0o700, parents=True, exist_ok=True)
            with writing(self.file) as handle:
                os.chmod(handle.name, 0o600)
                handle.writelines([self._digest(body), b"\n", body])
        except OSError as error:
            if is_required:
                raise
            reason = error.strerror or error  # without the name of the temporary file, which differs each time
            logger.warning_once(printable(f"{self.file}: {reason}; the next call embeds again"))
        self.is_new = False
        self.saved = time.monotonic()


def _texts(documents: dict) -> list[str]:
    """The texts of all passages without repetition, in the order of the vectors."""
    texts = {}
    for _, passages in documents.values():
        texts |= dict.fromkeys(text for _, text in passages)
    return list(texts)
