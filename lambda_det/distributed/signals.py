"""Signals that ask a run to stop: it saves, and can be resumed.

A scheduler sends SIGTERM or SIGUSR1, and Ctrl-C is SIGINT.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from typing import Generic, TypeVar

import torch.multiprocessing as mp
from detectron2.utils import comm

from lambda_det.errors import duration

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Windows has no SIGUSR1
SIGNALS = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, n))
# A scheduler may signal both a process and its launcher, which passes the signal on: one request.
# So does a terminal, where somebody may press a second time soon.
_SECONDS_OF_ONE_REQUEST = 3.0
_SECONDS_OF_ONE_PRESS = 0.5
_PRESSED = "\nsaving after this step; press Ctrl-C again to stop at once"


class StopRequest(Exception):
    """A signal asked the run to stop, and all that it did so far is saved or being saved.

    Attributes:
        signal: its number.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class _Interrupt(BaseException):
    """Leaves the work; an ``except Exception`` in it must not take the request for an error."""


@dataclass
class _State:
    """The state of a process; there is one, as there is one table of signal handlers.

    Attributes:
        process: the id of the process that catches signals. Loader workers are forked from it and
            inherit its handlers.
        signal: the number of the first signal received; 0 for none.
        time: when it came; of several Ctrl-C the last one that counted.
        is_interruptible: whether the next signal may leave the work wherever it is.
    """

    process: int = 0
    signal: int = 0
    time: float = 0.0
    is_interruptible: bool = False


_state = _State()


def heeded_signals() -> list[int]:
    """The signals to handle: all, except Ctrl-C where it is ignored.

    A shell's script ignores it in what it starts in the background (``&``), since it is meant for
    the program in front.
    """
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return [number for number in SIGNALS if number != signal.SIGINT or not is_ignored]


def received_signal() -> int:
    """The number of the signal that asks this process to stop; 0 for none."""
    return _state.signal


@contextmanager
def catch_signals() -> Iterator[None]:
    """Note the first signal instead of dying of it; a second one ends the process.

    A second Ctrl-C raises KeyboardInterrupt.

    The previous handlers are restored on leaving. Nested calls do nothing, and neither do calls
    outside of the main thread, where Python handles no signals.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or _state.process == os.getpid():
        yield
        return
    _state.process, _state.signal = os.getpid(), 0
    previous = {number: signal.signal(number, _handle) for number in heeded_signals()}
    try:
        yield
    finally:
        restore_handlers(previous)
        _state.process = _state.signal = 0


def restore_handlers(previous: dict[int, object]) -> None:
    """Set the signal handlers that ``signal.signal`` or ``signal.getsignal`` returned."""
    for number, handler in previous.items():
        # None: the handler was not set from Python, and cannot be set from Python
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def start_tracker() -> None:
    """Start Python's tracker of shared memory so that it outlives a SIGUSR1 to all processes.

    It ignores SIGTERM and SIGINT by itself, and would print a stack trace for each semaphore when
    it dies.
    """
    number = getattr(signal, "SIGUSR1", None)  # Windows has none, nor a tracker
    if number is None:
        return
    # It is inherited; unlike a handler, a mask can be set in any thread and loses no signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def interruptible(work: Callable[[], T]) -> T:
    """Return what ``work`` returns; a signal leaves it wherever it is.

    A function and not a context manager: a signal may come between entering and leaving one.

    Where Python cannot raise an exception, as in ``__del__`` or while a process is forked, it
    drops what a handler raises. So this is for computations of seconds or minutes, and between
    batches the signal is looked for (:class:`UntilAsked`).

    Args:
        work: can be repeated from its beginning, after all before it was saved. It makes no
            collective calls, because other processes would wait for it there.

    Raises:
        StopRequest: a signal came, during the work or before it.
    """
    cause, hook = None, sys.unraisablehook
    try:
        sys.unraisablehook = partial(_print_unless_interrupt, hook)
        _state.is_interruptible = True
        if not _state.signal:
            result = work()
    except _Interrupt:
        pass
    except Exception as error:
        if not _state.signal:
            raise
        cause = error  # work turned the interrupt into an error, or another process failed
    finally:
        _state.is_interruptible = False
        sys.unraisablehook = hook
    if _state.signal:  # even if work returned: it may have caught the interrupt
        raise StopRequest(_state.signal) from cause
    return result


def _print_unless_interrupt(
    hook: Callable[[sys.UnraisableHookArgs], object], dropped: sys.UnraisableHookArgs
) -> None:
    if not issubclass(dropped.exc_type, _Interrupt):
        hook(dropped)


def _handle(number: int, _frame: object) -> None:
    if os.getpid() != _state.process:  # a forked loader process, which the main process ends
        return
    now = time.monotonic()
    if not _state.signal:
        _state.signal, _state.time = number, now
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            with suppress(RuntimeError):  # it came while another line was printed
                print(_PRESSED, file=sys.stderr, flush=True)
        if _state.is_interruptible:
            raise _Interrupt
    elif is_another_request(number, now - _state.time):
        if number == signal.SIGINT:
            _state.time = now
            raise KeyboardInterrupt
        die_of(number)


def is_another_request(number: int, seconds: float) -> bool:
    """Whether a signal is more than a copy of the one that came some seconds before it."""
    is_press = number == signal.SIGINT
    return seconds > (_SECONDS_OF_ONE_PRESS if is_press else _SECONDS_OF_ONE_REQUEST)


def die_of(number: int) -> None:
    """End this process by a signal, as if no handler had been set."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# ---------------------------------------------------------------------------- with other processes
# They leave their work together, so that none waits for one that has left. A process that
# ``--num-gpus`` has started keeps its connections until all have ended, and one that waited for it
# would wait for half an hour (``connection.AT_LENGTH``).
# between two lines about the time that is left
_SECONDS_BETWEEN_LINES = 10


def leave_if_asked() -> None:
    """Leave the work if a signal has asked any process to stop; called in all of them alike.

    Raises:
        StopRequest: one was asked; it is raised on all.
    """
    if number := max(comm.all_gather(received_signal())):
        raise StopRequest(number)


class UntilAsked(Generic[T]):
    """Batches for work without collective calls, such as an evaluation's.

    Each process may have another number of them. A process that was asked to stop takes no more.
    Before the first and after the last batch all processes meet, and leave if one was asked.
    Where the work takes long, the log says how much of these batches is left.
    """

    def __init__(self, batches: Iterable[T], what: str = "Evaluated on") -> None:
        self._batches, self._what = batches, what

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[T]:
        """
        Raises:
            StopRequest: on all processes, if one was asked to stop.
        """
        leave_if_asked()
        begin = logged = time.monotonic()
        for done, batch in enumerate(self._batches):
            if received_signal():
                break
            now = time.monotonic()
            if done and now - logged >= _SECONDS_BETWEEN_LINES:
                left = (now - begin) / done * (len(self) - done)
                logger.info(f"{self._what} {done} of {len(self)} batches; {duration(left)} left")
                logged = now
            yield batch
        leave_if_asked()


# ---------------------------------------------------------------------------------- with the parent
_POLL = 1.0  # seconds between two looks at the parent


def end_with_parent(parent: int, *, by_main_thread: bool = True) -> None:
    """Let the system kill this process when its parent ends in any way; call it before anything
    else.

    What was trained since the last checkpoint is lost, as with any kill. To train on would be
    worse: the run that is started in its place writes into the same folder. A loader process would
    keep its memory for ever: it cannot end while its batches wait in a pipe without a reader.

    Args:
        parent: the process that started this one.
        by_main_thread: whether the parent's main thread started it. The kernel takes the end of the
            thread that started a process for the end of the parent.
    """
    if sys.platform == "linux" and by_main_thread:
        mp._prctl_pr_set_pdeathsig(signal.SIGKILL)
    elif sys.platform != "win32":  # there a process keeps the number of a parent that has ended
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
    if sys.platform != "win32" and os.getppid() != parent:  # it ended before the lines above
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL)
    os.kill(os.getpid(), signal.SIGKILL)
