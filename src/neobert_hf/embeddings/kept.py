"""Results that are kept in a file, so that no text is embedded twice: `Kept`.

The file is an SQLite database. It stores a result when its block of texts is ready, so an interrupted command loses one block at
most, and two processes may share a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from huggingface_hub.constants import HF_HOME

CACHE = Path(HF_HOME) / "neobert_hf" / "kept.sqlite"  # of all searches; may be deleted at any time
DAYS = 30  # results that no search has used for this time are removed
BLOCK = 512  # texts that are embedded at once: seconds of work


def key_of(*parts: str | bytes) -> bytes:
    """Return a hash of parts, which is the key of what is computed from them."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


class Kept:
    """Bytes by key in an SQLite file, which the first use creates.

    Args:
        file: The file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.today = int(time.time() // 86400)
        self.database = None

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return what is stored under these keys, without the missing ones.

        Raises:
            RuntimeError: The file cannot be opened or written, or it is damaged.
        """
        found = {}
        if not self.file.exists():
            return found
        with self._open() as database:
            for start in range(0, len(keys), BLOCK):
                part = keys[start : start + BLOCK]
                known = f"key IN ({','.join('?' * len(part))})"
                database.execute(f"UPDATE kept SET day = {self.today} WHERE day != {self.today} AND {known}", part)
                found |= dict(database.execute(f"SELECT key, value FROM kept WHERE {known}", part))
        return found

    def put(self, values: Mapping[bytes, bytes]) -> None:
        """Store bytes under their keys, all of them or none; errors are those of `get`."""
        with self._open() as database:
            rows = [(key, value, self.today) for key, value in values.items()]
            database.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", rows)

    def once(self, key: bytes, compute: Callable[[], bytes]) -> bytes:
        """Return what is stored under a key; compute and store it if there is nothing."""
        found = self.get([key])
        if key not in found:
            found[key] = compute()
            self.put(found)
        return found[key]

    def vectors(self, texts: Sequence[str], encode: Callable[[list[str]], np.ndarray], identity: str) -> np.ndarray:
        """Return the vectors (texts, dimension) of texts in float32; only texts that have none yet are embedded, equal ones once.

        Args:
            texts: The texts.
            encode: Returns the vectors of a list of texts.
            identity: Names the model and all options that decide a vector.

        Raises:
            RuntimeError: As of `get`.
        """
        keys = [key_of("vector", identity, text) for text in texts]
        found = self.get(keys)
        if missing := {key: text for key, text in zip(keys, texts) if key not in found}:
            vectors = np.asarray(encode(list(missing.values())), np.float32)
            new = {key: vector.tobytes() for key, vector in zip(missing, vectors)}
            self.put(new)
            found |= new
        return np.frombuffer(b"".join(found[key] for key in keys), np.float32).reshape(len(keys), -1)

    def remove_old(self) -> None:
        """Remove what nothing has used for `DAYS` days."""
        with self._open() as database:
            database.execute("DELETE FROM kept WHERE day < ?", [self.today - DAYS])

    def close(self) -> None:
        """Close the file."""
        if self.database is not None:
            self.database.close()
            self.database = None

    def delete(self) -> None:
        """Close the file and delete it."""
        self.close()
        self.file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A transaction, whose errors name the file."""
        try:
            if self.database is None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.database = sqlite3.connect(self.file, timeout=60)  # seconds to wait for another process
                self.database.execute("CREATE TABLE IF NOT EXISTS kept (key BLOB PRIMARY KEY, value BLOB, day INTEGER)")
            with self.database:
                yield self.database
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise RuntimeError(
                f"{self.file}, which keeps vectors, cannot be used ({error}); free disk space, make the folder "
                "writable, or delete the file"
            ) from error
