"""`tune_allocator`: keep freed memory in the process; otherwise every large tensor costs one page fault per 4 kB."""

import ctypes
import platform

# Option numbers of glibc's malloc.h, and the values that `tune_allocator` sets.
MALLOPT = {
    "M_MMAP_MAX": (-4, 0),  # allocate large blocks on the heap, which the process keeps, not as separate mappings
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),  # do not return the top of the heap to the system
    "M_TOP_PAD": (-2, 2**28),  # grow the heap by 256 MB at a time
}


def tune_allocator() -> bool:
    """Tell glibc's malloc to keep large freed blocks for the next tensor instead of unmapping them.

    By default malloc maps every tensor above a threshold (at most 32 MB) and unmaps it when it is freed. The kernel clears
    each page again at first access; on a CPU this can cost more than the arithmetic. Call this function once, before the
    first forward. Afterwards the process keeps its peak memory. Environment variables do the same for any program:

        MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=268435456 python ...

    Returns:
        True if the allocator was tuned; False if malloc refused an option, or the C library is not glibc (macOS, Windows, musl).
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(option, value) == 1 for option, value in MALLOPT.values()])
