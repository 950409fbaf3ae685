"""How much memory there is for what is asked, before any work, so that nothing is killed half-way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils import logging

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

logger = logging.get_logger(__name__)


def available_bytes() -> int | None:
    """Memory that a process may still take; None where nothing tells.

    On Linux what the kernel calls available, and no more than the control group has left. Elsewhere psutil is asked, which
    accelerate brings.
    """
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        (line,) = (line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
        return min(int(line.split()[1]) * 1024, *_control_group_bytes())
    try:
        import psutil
    except ImportError:
        return None
    return psutil.virtual_memory().available


def check_memory(num_bytes: int, what: str, remedy: str) -> None:
    """Refuse what does not fit.

    Args:
        num_bytes: What is needed at least.
        what: Begins the message.
        remedy: Ends it.

    Raises:
        ValueError: Less is available.
    """
    available = available_bytes()
    if available is None:
        logger.info("the free memory is not known here: install psutil to have it checked")
    elif num_bytes > available:
        raise ValueError(
            f"{what} takes {num_bytes / 1e9:.1f} GB or more, and {available / 1e9:.1f} GB of memory are free; {remedy}"
        )


def batch_bytes(model: SentenceTransformer, batch_size: int) -> int:
    """Memory of the largest activations of a batch of the longest texts, at least: the states around a feed-forward layer.

    The model's weights are not in it, since they are loaded already. A model without a transformer counts as 0.
    """
    config, weight = getattr(model[0], "config", None), next(model.parameters(), None)
    width = getattr(config, "hidden_size", None)
    if width is None or weight is None or weight.device.type != "cpu":
        return 0
    inner = getattr(config, "intermediate_size", None) or 4 * width
    return batch_size * (model.max_seq_length or 512) * (3 * width + inner) * weight.element_size()


def _control_group_bytes() -> list[int]:
    """What the limit of the control group leaves, version 2 or 1; pages of files count as free, since they are given back."""
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
