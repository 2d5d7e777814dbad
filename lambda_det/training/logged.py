"""The numbers that every training logs, in one table.

To log another one, put it into the storage (``put_scalar``) and add it here. Losses are not in the
table: they have the names that the model gives them, with "loss" in each.
"""

from __future__ import annotations

import re

__all__ = ["is_loss", "is_of_averaged_weights", "is_of_machine"]

# Whether another machine measures another value. The others follow from the steps: they are kept
# over a resume, and compared between runs.
_OF_MACHINE = {
    "lr": False,
    "grad_norm": False,
    "skipped_steps": False,
    "loss_spikes": False,
    "time": True,
    "data_time": True,
    "rank_data_time": True,
    "eta_seconds": True,
    "images_per_second": True,
    "peak_memory": True,
}


_AVERAGED = re.compile(r"_EMA/\w+$|/ema_\w+$")


def is_of_machine(name: str) -> bool:
    """Whether a value of the log depends on the machine: a time, a speed or its memory."""
    return _OF_MACHINE.get(name, False)


def is_loss(name: str) -> bool:
    """Whether a value of the log is a loss, of training or ("validation/...") of a test set."""
    return "loss" in name and name not in _OF_MACHINE


def is_of_averaged_weights(name: str) -> bool:
    """Whether a result of an evaluation is that of averaged weights, such as "bbox_EMA/AP"."""
    return bool(_AVERAGED.search(name))
