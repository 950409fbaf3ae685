"""Memory check before a large computation, so that the operating system does not kill it halfway."""

import re
from pathlib import Path

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
    """Raise ValueError if fewer bytes are available than a lower bound of what the work needs.

    Args:
        num_bytes: The lower bound.
        what: Start of the message: the work.
        remedy: End of the message: the way out.
    """
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise ValueError(
            f"{what} takes {num_bytes / 1e9:.1f} GB or more, but {available / 1e9:.1f} GB of memory are free; {remedy}"
        )
