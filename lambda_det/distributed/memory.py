"""The memory of a process that computes on the CPU: freed maps are kept for the next ones."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

__all__ = ["SWITCH", "keep_memory"]

SWITCH = "LAMBDA_DET_KEEP_MEMORY"  # an environment variable; 0: memory goes back to the system

# Parameters of glibc's mallopt(3), by their numbers in malloc.h, that keep memory and that give it
# back. By default it takes each large map from the system and gives it back. The system clears
# every page of it each time.
_MB = 2**20
_PARAMETERS = (
    (-4, 0, 65536),  # M_MMAP_MAX: maps come from the heap
    (-1, -1, 64 * _MB),  # M_TRIM_THRESHOLD: its end is never given back
    (-2, 64 * _MB, 0),  # M_TOP_PAD: and it grows in steps of this size
    (-3, 32 * _MB, 32 * _MB),  # M_MMAP_THRESHOLD: to which glibc moves it where maps are large
)


def keep_memory(on: bool = True) -> bool:
    """Let this process keep the memory that it frees, where it runs on Linux with glibc.

    A training step allocates the same maps as the one before. The peak of the memory stays about
    the same, but between two peaks none goes back to the system.

    Args:
        on: False lets it go back again, as glibc does by itself.

    Returns:
        Whether it could be set.
    """
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux":
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(number, kept if on else freed) for number, kept, freed in _PARAMETERS)
