"""The checkpoint of a run and the configuration beside it."""

from __future__ import annotations

from pathlib import Path

from lambda_det.errors import WeightsError, listed
from lambda_det.training.checkpointer import last_checkpoint

__all__ = ["config_of_run", "find_checkpoint"]


def find_checkpoint(path: str | Path) -> str:
    """The checkpoint that is meant: a file itself, of a run's folder the last one.

    Raises:
        WeightsError: the folder does not say which is the last, or it is not there.
    """
    if not Path(path).is_dir():
        return str(path)
    last = last_checkpoint(str(path))
    if not last:
        there = [file.name for file in sorted(Path(path).glob("*.pth"))]
        raise WeightsError(
            f"The folder {path} has no last_checkpoint that says which one is meant: name a file "
            f"({listed(there)})."
        )
    if not Path(last).is_file():
        raise WeightsError(
            f"last_checkpoint in {path} names {Path(last).name}, which is not there: name a file."
        )
    return last


def config_of_run(checkpoint: str | Path) -> str | None:
    """The config.yaml that a run wrote beside its checkpoint, if it is there."""
    beside = Path(checkpoint).with_name("config.yaml")
    return str(beside) if beside.is_file() else None
