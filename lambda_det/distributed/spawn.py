"""Processes of this machine that start together and end together.

PyTorch starts them. Its elastic launcher, which waits for them as well, breaks three promises of
ours: it kills a process 30 s after a signal, though that may be saving; in PyTorch 2.4 it dies of
SIGUSR1 and waits for ever for a process that hangs after another one has ended; and it names the
process that it saw end first, which may not be the cause. Several machines, and restarts, are left
to torchrun.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch.multiprocessing as mp
from torch.multiprocessing import ProcessRaisedException

from lambda_det.distributed.parent import end_with_parent
from lambda_det.distributed.signals import SIGNALS, die_of, name_of_end, restore_handlers
from lambda_det.errors import LostProcessError, Preempted, UserError

__all__ = ["GRACE", "spawn"]

# Seconds that the other processes have after one has failed; rank 0 may be writing a checkpoint
GRACE = 15.0
_POLL = 0.1  # seconds between two looks at the processes and the signals
_START_METHOD = "spawn"
_HINTS = {
    "SIGKILL": ", as happens when the machine runs out of memory",
    "SIGABRT": ", as PyTorch does when a collective call takes too long",
}


class _End(NamedTuple):
    """How one of the processes has ended.

    Attributes:
        status: of its exit; below 0 the signal that killed it.
        error: what it raised; None if it returned or was killed.
    """

    index: int
    pid: int
    status: int
    error: BaseException | None

    def distance_from_cause(self, passed_on: set[int]) -> int:
        """How likely another process was the cause: the higher, the more likely."""
        if isinstance(self.error, Preempted):
            return 1
        if self.error is None and -self.status in passed_on:
            return 2
        if isinstance(self.error, LostProcessError):
            return 3
        # PyTorch's threads abort a process when another is gone
        return 4 if self.error is None and self.status == -signal.SIGABRT else 0


def spawn(work: Callable[[int], None], names: Sequence[str]) -> None:
    """Call ``work(0)``, ``work(1)``, ... each in a process of its own, and wait for all.

    SIGTERM and SIGUSR1 are passed on to the processes. When one fails, the others have ``GRACE``
    seconds to notice it and end by themselves, and are then killed, because they may hang in a
    collective call. None of them outlives this process.

    Args:
        work: can be pickled.
        names: of the processes, for messages.

    Raises:
        UserError, Preempted: what ``work`` raised, or which process was killed. Where several
            processes failed, the cause is raised and not what followed from it.
        ProcessRaisedException: ``work`` raised another error; the message holds its stack trace.
    """
    receivers, senders = zip(*(multiprocessing.Pipe(duplex=False) for _ in names), strict=True)
    about = (work, senders, os.getpid(), multiprocessing.get_start_method())
    processes: list[mp.Process] = []
    before = set(multiprocessing.active_children())
    with _collect_signals() as received:
        try:
            processes = mp.start_processes(
                _run, about, len(names), join=False, start_method=_START_METHOD
            ).processes
            for sender in senders:
                sender.close()
            ended, passed_on = _wait(processes, receivers, received)
        except KeyboardInterrupt:
            # The terminal has interrupted the processes, too
            deadline = time.monotonic() + GRACE
            while any(map(_is_running, processes)) and time.monotonic() < deadline:
                time.sleep(_POLL)
            raise
        finally:
            # A start that failed leaves those that it had started
            for process in processes or set(multiprocessing.active_children()) - before:
                process.kill()
    if failed := [end for end in ended if end.status != 0]:
        _raise_cause(failed, passed_on, names)


@contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Collect the signals that are to be passed on."""
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        restore_handlers(previous)


def _wait(
    processes: Sequence[mp.Process], receivers: Sequence[Connection], received: list[int]
) -> tuple[list[_End], set[int]]:
    """Wait for the end of all processes.

    Returns:
        How they ended, in that order, without those that had to be killed; and the signals that
        were passed on.
    """
    running = dict(enumerate(processes))
    ended: list[_End] = []
    passed_on: set[int] = set()
    deadline = float("inf")
    while running and time.monotonic() < deadline:
        while received:
            passed_on.add(number := received.pop(0))
            for process in filter(_is_running, running.values()):
                os.kill(process.pid, number)
        over = [index for index, process in running.items() if not _is_running(process)]
        if not over:
            time.sleep(_POLL)
        ends = [_end_of(index, running.pop(index), receivers[index]) for index in over]
        if any(end.status != 0 and not isinstance(end.error, Preempted) for end in ends):
            deadline = min(deadline, time.monotonic() + GRACE)
        # Of processes that are seen to end together, those without an error were killed first,
        # and the others noticed it
        ended += sorted(ends, key=lambda end: end.error is not None)
    for process in running.values():
        process.kill()
        process.join()
    return ended, passed_on


def _is_running(process: mp.Process) -> bool:
    # Not by its sentinel, which what it has started may inherit
    return process.exitcode is None


def _end_of(index: int, process: mp.Process, errors: Connection) -> _End:
    error = None
    with suppress(EOFError):
        error = errors.recv() if errors.poll() else None
    return _End(index, process.pid, process.exitcode, error)


def _raise_cause(failed: list[_End], passed_on: set[int], names: Sequence[str]) -> None:
    def place(end: _End) -> tuple[int, int]:
        # Of those that were stopped rank 0 has saved; the others may have ended before it did
        stopped = isinstance(end.error, Preempted)
        return end.distance_from_cause(passed_on), end.index if stopped else 0

    cause = min(failed, key=place)
    if cause.error is not None:
        raise cause.error
    if -cause.status in passed_on:
        # It had not begun to train, or got a second signal: end as a single process would
        die_of(-cause.status)
    raise UserError(
        f"{names[cause.index]} (pid {cause.pid}) {_describe_end(cause.status)}, and the others "
        "were ended with it. The same command with --resume continues from the last checkpoint."
    )


def _describe_end(status: int) -> str:
    name = name_of_end(status)
    return f"{'was killed by' if status < 0 else 'ended with'} {name}{_HINTS.get(name, '')}"


def _run(
    index: int,
    work: Callable[[int], None],
    senders: Sequence[Connection],
    parent: int,
    method: str,
) -> None:
    """What a spawned process does."""
    end_with_parent(parent)
    # Else its loader workers would be spawned as well, and each would import for seconds
    multiprocessing.set_start_method(method, force=True)
    status, error = 0, None
    try:
        work(index)
    except KeyboardInterrupt:
        status = 130
    except (Preempted, UserError) as expected:
        error = expected
    except Exception:
        trace = traceback.format_exc()[-20_000:]  # what a pipe holds without a reader
        text = f"\n\n-- Process {index} ended with the following error:\n{trace}"
        error = ProcessRaisedException(text, index, os.getpid())
    if error is not None:
        status = 1
        senders[index].send(error)
    # Not by the interpreter's finalization, in which a thread of PyTorch's may abort the process
    # because another one has ended
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():  # loader workers
        child.kill()
    os._exit(status)
