"""Arrays that are kept between runs: whole or not at all, whoever else writes, and checked before they are used."""

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
FORMAT = "2"  # other formats are made anew


def save_arrays(file: Path, arrays: Mapping[str, np.ndarray]) -> bool:
    """Write arrays with their checksum under a temporary name of their own and then give them theirs.

    The checksum is of the file's name too, so that a file in the place of another one is not taken for it. A folder that cannot
    be written to is a warning: nothing but time is lost.

    Args:
        file: Where to.
        arrays: By name.

    Returns:
        Whether they are there now.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    partial = file.with_name(f".{file.stem}-{uuid.uuid4().hex}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, partial, metadata={"format": FORMAT, "checksum": _checksum(file, arrays)})
        os.replace(partial, file)
    except (OSError, SafetensorError) as error:  # safetensors names its own what the disk says
        reason = getattr(error, "strerror", None) or error
        logger.warning_once(
            f"nothing is kept in {file.parent} ({reason}), so the next start takes as long again; set HF_HOME to a folder that "
            "can be written to"
        )
        return False
    finally:
        if partial.exists():
            partial.unlink()
    return True


def load_arrays(
    file: Path, expected: Mapping[str, tuple[type, tuple[int | None, ...]]]
) -> dict[str, np.ndarray] | None:
    """Read what `save_arrays` wrote, or None where there is no such file; one that is damaged is a warning, and None as well.

    Args:
        file: Where from.
        expected: Type and shape by name; None stands for any size.
    """
    if not file.is_file():
        return None
    try:
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
        logger.warning(f"{file} is damaged and will be made anew: {error}")
        return None
    return arrays


def _checksum(file: Path, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(file.name.encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(arrays[name].reshape(-1).view(np.uint8))
    return digest.hexdigest()
