"""SIGTERM and SIGUSR1, by which schedulers ask a run to end: it saves, and stops to be resumed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lambda_det.errors import Preempted

__all__ = ["SIGNALS", "at_once", "listening", "received"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A scheduler may signal a process and who started it, which passes that on: one wish in two ways
_SECONDS_OF_ONE_WISH = 3.0


class _Wish:
    """What this process was asked for; there is one, as there is one table of signal handlers.

    Attributes:
        process: that listens; loader workers are forked from it, and inherit its handlers.
        number: of the first signal that came; 0 for none.
        time: when it came.
        ends_at_once: whether the next signal may end the work wherever it is.
    """

    process = 0
    number = 0
    time = 0.0
    ends_at_once = False


def received() -> int:
    """The number of the signal that asks this process to stop; 0 for none."""
    return _Wish.number


@contextmanager
def listening() -> Iterator[None]:
    """Note the first signal instead of dying of it; the second one ends the process at once.

    The handlers of before are put back afterwards. Does nothing outside of the main thread, where
    Python handles no signals, and nothing within itself.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or _Wish.process == os.getpid():
        yield
        return
    _Wish.process, _Wish.number, _Wish.ends_at_once = os.getpid(), 0, False
    before = {number: signal.signal(number, _take) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is one that was not set from Python, and cannot be set from here
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _Wish.process = _Wish.number = 0


@contextmanager
def at_once() -> Iterator[None]:
    """Let a signal raise ``Preempted`` wherever the work is: all that it did was saved before.

    Its argument is the number of the signal.
    """
    _Wish.ends_at_once = True
    try:
        if _Wish.number:
            raise Preempted(_Wish.number)
        yield
    finally:
        _Wish.ends_at_once = False


def _take(number: int, _frame: object) -> None:
    if os.getpid() != _Wish.process:  # a worker, which has nothing to save
        _die(number)
    elif not _Wish.number:
        _Wish.number, _Wish.time = number, time.monotonic()
        if _Wish.ends_at_once:
            raise Preempted(number)
    elif time.monotonic() - _Wish.time > _SECONDS_OF_ONE_WISH:
        _die(number)


def _die(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
