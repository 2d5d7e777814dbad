"""The threads of a process, decided before PyTorch starts them, and the memory that it keeps."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
from pathlib import Path

# Rounds of the loop in which a thread of GNU OpenMP waits before it sleeps. By default it is
# 300,000, some milliseconds: beside another process with as many threads, each takes the cores that
# the other's work needs (docs/performance.md has what both cost).
_ROUNDS = "1000"
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))  # of cgroups 2 and 1


def settle_threads() -> None:
    """Let threads sleep soon, and limit their number to a container's CPU quota.

    It does nothing if PyTorch is loaded, because PyTorch has then read the environment. Values that
    the user has set stay: ``GOMP_SPINCOUNT`` or ``OMP_WAIT_POLICY``, and ``OMP_NUM_THREADS``.
    """
    if "torch" in sys.modules:
        return
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _ROUNDS)
    quota = cpu_quota()
    if quota is not None and quota < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(quota))


def usable_cores() -> int:
    """The cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, cpu_quota() or math.inf)


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The cores that a container may use, rounded up; None without a limit, and not on Linux."""
    for names in _QUOTAS:
        try:
            quota, period = " ".join((root / name).read_text() for name in names).split()
            if int(quota) > 0:
                return math.ceil(int(quota) / int(period))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return None


# Memory -------------------------------------------------------------------------------------------
# A process that computes on the CPU keeps it when maps are freed, for the next maps.

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
    if os.environ.get(SWITCH) == "0" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(parameter, value) == 1 for parameter, value in _KEEP)
