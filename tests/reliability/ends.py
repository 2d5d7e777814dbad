"""Ends of a run within the process of the test."""

import os
import signal

import pytest

from lambda_det.training.trainer import Trainer


class Killed(BaseException):
    """Stands for SIGKILL: no code of the package catches it and cleans up."""


def kill_before(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Have a run end without further ado before it takes a step, counted from 0."""
    original = Trainer.run_step

    def run_step(self) -> None:
        if self.iter == step:
            raise Killed
        original(self)

    monkeypatch.setattr(Trainer, "run_step", run_step)


def end_here(how: str) -> None:
    """End what is running: "killed", or "told" by SIGTERM to end before its next batch."""
    if how == "killed":
        raise Killed
    os.kill(os.getpid(), signal.SIGTERM)
