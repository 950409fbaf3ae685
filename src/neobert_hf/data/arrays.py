"""On-disk cache of arrays: atomic writes, safe for concurrent processes, verified by a checksum on load."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from huggingface_hub.constants import HF_HOME
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers.utils import logging

logger = logging.get_logger(__name__)

CACHE = Path(HF_HOME) / "neobert_hf"
FORMAT = "2"  # files of another format are recomputed


def save_arrays(file: Path, arrays: Mapping[str, np.ndarray]) -> bool:
    """Write arrays and their checksum to a temporary file and rename it to `file`.

    The checksum covers the file name too, which detects a file that was renamed or copied over another file. If the folder cannot
    be written, a warning is logged: only the time of a later computation is lost.

    Args:
        file: Path to write.
        arrays: Arrays by name.

    Returns:
        Whether the file was written.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    partial = file.with_name(f".{file.stem}-{uuid.uuid4().hex}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, partial, metadata={"format": FORMAT, "checksum": _checksum(file, arrays)})
        os.replace(partial, file)
    except (OSError, SafetensorError) as error:  # SafetensorError also wraps errors of the disk
        reason = getattr(error, "strerror", None) or error
        logger.warning_once(
            f"cannot write the folder {file.parent} ({reason}), so the next start takes as long as this one; make it writable, "
            "or choose another (HF_HOME has the cache)"
        )
        return False
    finally:
        if os.path.exists(partial):  # False too in a folder that may not be entered
            partial.unlink()
    return True


def load_arrays(
    file: Path, expected: Mapping[str, tuple[type, tuple[int | None, ...]]]
) -> dict[str, np.ndarray] | None:
    """Read the arrays that `save_arrays` wrote; return None, with a warning, if the file is damaged, and None if it is missing.

    Args:
        file: Path to read.
        expected: Data type and shape by name; None in a shape stands for any size.
    """
    try:
        if not file.is_file():
            return None
        with safe_open(file, framework="numpy") as stored:
            metadata = stored.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is {metadata.get('format')}, not {FORMAT}")
            if set(stored.keys()) != set(expected):
                raise ValueError(f"it holds {', '.join(sorted(stored.keys()))}, not {', '.join(sorted(expected))}")
            arrays = {name: stored.get_tensor(name) for name in expected}
        for name, (dtype, shape) in expected.items():
            found = arrays[name]
            fits = len(found.shape) == len(shape) and all(size in (None, n) for size, n in zip(shape, found.shape))
            if found.dtype != dtype or not fits:
                raise ValueError(f"{name} is {found.dtype} {found.shape}, expected {np.dtype(dtype)} {shape}")
        if metadata.get("checksum") != _checksum(file, arrays):
            raise ValueError("its checksum is wrong")
    except (OSError, ValueError, SafetensorError) as error:
        logger.warning(f"{file} is damaged and will be recomputed: {error}")
        return None
    return arrays


def _checksum(file: Path, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(file.name.encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(arrays[name].reshape(-1).view(np.uint8))
    return digest.hexdigest()
