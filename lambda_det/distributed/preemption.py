"""SIGTERM and SIGUSR1, by which schedulers ask a run to end: it saves, and stops to be resumed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lambda_det.errors import Preempted

__all__ = ["SIGNALS", "at_once", "listening", "received"]

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A scheduler may signal a process and who started it, which passes that on: one wish in two ways
_SECONDS_OF_ONE_WISH = 3.0


class _Stop(BaseException):
    """Ends the work; ``except Exception`` in it would take a ``Preempted`` for an error of its."""


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


def at_once(work: Callable[[], T]) -> T:
    """What ``work`` returns; a signal ends it wherever it is, as all before it is saved.

    A function and no context manager: a signal may come between the ends of the two.

    Args:
        work: can be done again from its beginning.

    Raises:
        Preempted: its argument is the number of the signal, which may have come before.
    """
    cause = None
    try:
        _Wish.ends_at_once = True
        if not _Wish.number:
            result = work()
    except _Stop:
        pass
    except Exception as error:
        if not _Wish.number:
            raise
        cause = error  # what became of the signal in other hands, or in another process
    finally:
        _Wish.ends_at_once = False
    if _Wish.number:  # even if the work has come to an end: it may have caught what was raised
        raise Preempted(_Wish.number) from cause
    return result


def _take(number: int, _frame: object) -> None:
    if os.getpid() != _Wish.process:  # a worker, which has nothing to save
        _die(number)
    elif not _Wish.number:
        _Wish.number, _Wish.time = number, time.monotonic()
        if _Wish.ends_at_once:
            raise _Stop
    elif time.monotonic() - _Wish.time > _SECONDS_OF_ONE_WISH:
        _die(number)


def _die(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
