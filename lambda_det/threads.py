"""The number of threads of a process, and how they wait; decided before PyTorch starts them."""

from __future__ import annotations

import math
import os
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
