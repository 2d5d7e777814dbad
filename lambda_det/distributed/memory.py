"""The memory of a process that computes on the CPU: it is kept when maps are freed, for the next
maps.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

SWITCH = "LAMBDA_DET_KEEP_MEMORY"  # an environment variable; 0: memory goes back to the system

# Parameters of glibc's mallopt(3) by their numbers in malloc.h. By default it takes each large map
# from the system and gives it back. The system clears every page of it each time.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEEP = (
    (_M_MMAP_MAX, 0),  # maps come from the heap
    (_M_TRIM_THRESHOLD, -1),  # whose end is never given back
    (_M_TOP_PAD, 64 * 2**20),  # and which grows in steps of this size
)


def keep_memory() -> bool:
    """Let this process keep the memory that it frees, where it runs on Linux with glibc.

    A training step allocates the same maps as the one before. The peak of the memory stays about
    the same, but between two peaks none goes back to the system.

    Returns:
        Whether it does now.
    """
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux":
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(parameter, value) == 1 for parameter, value in _KEEP)
