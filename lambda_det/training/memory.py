"""How much memory a process has taken."""

from __future__ import annotations

import resource
import sys

import torch

__all__ = ["peak_memory"]


def peak_memory(device: str) -> float:
    """The most gigabytes (1e9 bytes) taken so far: of the GPU, or on the CPU of the process."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
