"""Memory checks before a large computation, so that the operating system does not kill it halfway."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils import logging

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

logger = logging.get_logger(__name__)

MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int | None:
    """Return the number of bytes that a process can still allocate, or None if it is unknown.

    It is the kernel's MemAvailable, and at most what the control group has left. A system without MemAvailable, such as macOS and
    some containers, gives the value of psutil, which is a dependency of accelerate.
    """
    found = re.search(r"^MemAvailable: +(\d+) kB", MEMINFO.read_text() if MEMINFO.is_file() else "", re.MULTILINE)
    if found:
        return min(int(found[1]) * 1024, *_control_group_bytes())
    try:
        import psutil
    except ImportError:
        return None
    return min(psutil.virtual_memory().available, *_control_group_bytes())


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
    if available is None:
        logger.info("the free memory is unknown; install psutil to enable the check")
    elif num_bytes > available:
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


def _control_group_bytes() -> list[int]:
    """Return the bytes left in the control group (version 2 or 1); cached file pages count as free."""
    left = [1 << 62]
    for folder, limit, used, cached in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        files = [Path(folder, name) for name in (limit, used, "memory.stat")]
        if all(file.is_file() for file in files):
            most, now, stat = (file.read_text().split() for file in files)
            if most != ["max"]:
                left.append(int(most[0]) - int(now[0]) + int(stat[stat.index(cached) + 1]))
    return left
