"""Ends of a run within the process of the test."""

from __future__ import annotations

import os
import signal

import pytest


class Killed(BaseException):
    """Stands for SIGKILL: no code of the package catches it and cleans up."""


def end_here(how: str) -> None:
    """End what is running: "killed", or "told" by SIGTERM to end at once."""
    if how == "killed":
        raise Killed
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(100):  # a handler runs between two operations of Python
        pass
    pytest.fail("the signal was not heeded at once")
