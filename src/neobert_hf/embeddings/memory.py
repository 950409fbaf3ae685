"""Memory check before a large computation, so that the operating system does not kill it halfway."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

MEMINFO, CONTROL_GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Return the number of bytes that a process can still allocate, or None if it is unknown, as on macOS and Windows.

    It is the kernel's MemAvailable, and at most what the control group has left; cached pages of files count as free.
    """
    found = re.search(r"^MemAvailable: +(\d+) kB", MEMINFO.read_text() if MEMINFO.is_file() else "", re.MULTILINE)
    if not found:
        return None
    available, limit = int(found[1]) * 1024, CONTROL_GROUP / "memory.max"
    if limit.is_file() and (most := limit.read_text().strip()) != "max":
        cached = re.search(r"^inactive_file (\d+)", (CONTROL_GROUP / "memory.stat").read_text(), re.MULTILINE)
        used = int((CONTROL_GROUP / "memory.current").read_text()) - int(cached[1])
        available = min(available, int(most) - used)
    return available


def check_memory(num_bytes: int, what: str, remedy: str) -> None:
    """Refuse work that needs more memory than is free.

    Args:
        num_bytes: Lower bound of the memory needed, in bytes.
        what: Start of the message: the work.
        remedy: End of the message: the way out.

    Raises:
        ValueError: Less memory is available.
    """
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise ValueError(
            f"{what} takes {num_bytes / 1e9:.1f} GB or more, but {available / 1e9:.1f} GB of memory are free; {remedy}"
        )


def batch_bytes(model: SentenceTransformer, batch_size: int) -> int:
    """Return a lower bound, in bytes, of the activations of a batch of maximum length: the states of a feed-forward layer.

    The weights do not count, since they are loaded already. The result is 0 for a model without a transformer or on a GPU.
    """
    config, weight = getattr(model[0], "config", None), next(model.parameters(), None)
    width = getattr(config, "hidden_size", None)
    if width is None or weight is None or weight.device.type != "cpu":
        return 0
    inner = getattr(config, "intermediate_size", None) or 4 * width
    return batch_size * (model.max_seq_length or 512) * (3 * width + inner) * weight.element_size()
