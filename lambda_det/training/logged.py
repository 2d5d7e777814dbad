"""The numbers that every training logs, in one table.

To log another one, put it into the storage (``put_scalar``) and add it here. Losses are not in the
table: they have the names that the model gives them, with "loss" in each.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from lambda_det.errors import DataError

__all__ = ["is_loss", "is_of_averaged_weights", "is_of_machine", "plain_name", "read_metrics"]

# True where another machine measures another value. The other values follow from the steps: they
# are kept over a resume, and compared between runs.
_OF_MACHINE = {
    "lr": False,
    "grad_norm": False,
    "skipped_steps": False,
    "time": True,
    "data_time": True,
    "rank_data_time": True,
    "eta_seconds": True,
    "images_per_second": True,
    "peak_memory": True,
}


# The last word may be of a class, whose name has any letters: bbox_EMA/AP-traffic light
_AVERAGED = re.compile(r"_EMA/[^/]+$|/ema_\w+$")


def is_of_machine(name: str) -> bool:
    """Whether a value of the log depends on the machine: a time, a speed or its memory."""
    return _OF_MACHINE.get(name, False)


def is_loss(name: str) -> bool:
    """Whether a value of the log is a loss, of training or ("validation/...") of a test set."""
    return "loss" in name and name not in _OF_MACHINE


def is_of_averaged_weights(name: str) -> bool:
    """Whether a result of an evaluation is of averaged weights, such as "bbox_EMA/AP"."""
    return bool(_AVERAGED.search(name))


def plain_name(name: str) -> str:
    """The name of a result without the word that it is of averaged weights."""
    return re.sub(r"_EMA(?=/[^/]+$)", "", name)


def read_metrics(run: str | Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.json; none where there is no such file.

    A last line that a kill cut short is left out.

    Raises:
        DataError: a line before it is none of a run.
    """
    path = Path(run, "metrics.json")
    if not path.is_file():
        return []
    texts = path.read_text("utf-8").splitlines()
    metrics = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            line["iteration"] + 1
        except (ValueError, TypeError, KeyError) as error:
            if number == len(texts):
                break
            raise DataError(f"Line {number} of {path} has no values of a step.") from error
        metrics.append(line)
    return metrics
