"""`tune_allocator`: keep freed memory in the process, so that a large tensor does not cost a page fault per 4 kB."""

import ctypes
import logging
import platform

logger = logging.getLogger(__name__)

# From glibc's malloc.h, with what each is set to.
MALLOPT = {
    "M_MMAP_MAX": (-4, 0),  # large blocks come from the heap, which is kept, instead of a mapping of their own
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),  # do not give the top of the heap back
    "M_TOP_PAD": (-2, 2**28),  # grow it by 256 MB at a time
}


def tune_allocator() -> bool:
    """Tell glibc's malloc to keep large freed blocks for the next tensor instead of unmapping them.

    By default a tensor above a threshold, 32 MB at most, is mapped and unmapped, and the kernel clears each of its pages
    again at first touch; on a CPU that can cost more than the arithmetic. Call this once, before the first forward. The
    process then holds the most memory that it ever used. The same from outside, for any program:

        MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=268435456 python ...

    Returns:
        True if the allocator was tuned; False, with a message, where it is not glibc's: macOS, Windows, musl.
    """
    library = platform.libc_ver()[0]
    if platform.system() != "Linux" or library != "glibc":
        logger.warning(
            "tune_allocator() changes glibc's malloc on Linux only; nothing changed on "
            f"{platform.system()} with {library or 'another C library'}"
        )
        return False
    mallopt = ctypes.CDLL(None).mallopt
    refused = [name for name, (option, value) in MALLOPT.items() if mallopt(option, value) != 1]
    if refused:
        logger.warning(f"malloc refused {', '.join(refused)}; the allocator stays as it was in this respect")
    return not refused
