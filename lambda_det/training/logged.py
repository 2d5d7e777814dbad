"""The numbers that every training logs, in one table.

To log another one, put it into the storage (``put_scalar``) and add it here. Losses are not in the
table: they have the names that the model gives them, with "loss" in each.
"""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["is_loss", "is_of_machine"]


class _Kind(Enum):
    STEP = auto()  # follows from the steps: kept over a resume, and compared between runs
    MACHINE = auto()  # another machine measures another one


_VALUES = {
    "lr": _Kind.STEP,
    "grad_norm": _Kind.STEP,
    "skipped_steps": _Kind.STEP,
    "loss_spikes": _Kind.STEP,
    "time": _Kind.MACHINE,
    "data_time": _Kind.MACHINE,
    "rank_data_time": _Kind.MACHINE,
    "eta_seconds": _Kind.MACHINE,
    "images_per_second": _Kind.MACHINE,
    "peak_memory": _Kind.MACHINE,
}


def is_of_machine(name: str) -> bool:
    """Whether a value of the log depends on the machine: a time, a speed or its memory."""
    return _VALUES.get(name) is _Kind.MACHINE


def is_loss(name: str) -> bool:
    """Whether a value of the log is a loss, of training or ("validation/...") of a test set."""
    return "loss" in name and name not in _VALUES
