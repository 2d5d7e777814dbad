"""Processes of this machine that start together and end together."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch.multiprocessing as mp
from torch.multiprocessing import ProcessRaisedException

from lambda_det.distributed.parent import end_with_parent
from lambda_det.distributed.signals import SIGNALS, die_of, restore_handlers
from lambda_det.errors import PREEMPTED_STATUS, LostProcessError, Preempted, UserError

__all__ = ["GRACE", "spawn"]

# Seconds that the other processes have after one has failed; rank 0 may be writing a checkpoint
GRACE = 15.0
_POLL = 0.1  # seconds between two looks at the processes and the signals


@dataclass
class _Child:
    """One of the processes.

    Attributes:
        error: what it raised; None if it returned or was killed.
        was_cut_off: it was still running when its grace was over.
    """

    index: int
    name: str
    process: mp.Process
    errors: Connection
    error: BaseException | None = None
    was_cut_off: bool = False

    def receive_error(self) -> None:
        """Once it has ended."""
        self.process.join()
        try:
            if self.errors.poll():
                self.error = self.errors.recv()
        except EOFError:
            pass  # it sent none

    @property
    def failed(self) -> bool:
        return self.process.exitcode not in (0, PREEMPTED_STATUS)


def spawn(work: Callable[[int], None], names: list[str]) -> None:
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
    context = mp.get_context("spawn")
    method = multiprocessing.get_start_method()
    children: list[_Child] = []
    with _collect_signals() as received:
        try:
            for index, name in enumerate(names):
                receiver, sender = context.Pipe(duplex=False)
                about = (work, index, sender, os.getpid(), method)
                process = context.Process(target=_run, args=about)
                process.start()
                sender.close()
                children.append(_Child(index, name, process, receiver))
            ended, passed_on = _wait(children, received)
        except KeyboardInterrupt:
            # The terminal has interrupted the processes, too
            _wait_until_grace_is_over(children)
            raise
        finally:
            for child in children:
                child.process.kill()
    _raise_cause(ended, passed_on)


@contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Collect the signals that are to be passed on."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python handles signals in the main thread only
        return
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        restore_handlers(previous)


def _wait(children: list[_Child], received: list[int]) -> tuple[list[_Child], set[int]]:
    """Wait for the end of all processes.

    Returns:
        The processes in the order in which they ended, and the signals that were passed on.
    """
    running, ended, passed_on = list(children), [], set()
    deadline = float("inf")
    while running:
        while received:
            number = received.pop(0)
            passed_on.add(number)
            for child in running:
                if child.process.exitcode is None:  # the signal may have reached and ended it
                    os.kill(child.process.pid, number)
        newly_ended = _ended(running)
        if not newly_ended:
            time.sleep(_POLL)
        for child in newly_ended:
            child.receive_error()
            running.remove(child)
            if child.failed:
                deadline = min(deadline, time.monotonic() + GRACE)
        # Of processes that are seen to end together, those without an error were killed first,
        # and the others noticed it
        ended += sorted(newly_ended, key=lambda child: child.error is not None)
        if time.monotonic() > deadline:
            for child in running:
                child.was_cut_off = True
                child.process.kill()
            deadline = float("inf")
    return ended, passed_on


def _ended(children: list[_Child]) -> list[_Child]:
    # Not by the sentinels of the processes: loader workers inherit those, and may live longer
    return [child for child in children if child.process.exitcode is not None]


def _wait_until_grace_is_over(children: list[_Child]) -> None:
    deadline = time.monotonic() + GRACE
    while len(_ended(children)) < len(children) and time.monotonic() < deadline:
        time.sleep(_POLL)


def _raise_cause(ended: list[_Child], passed_on: set[int]) -> None:
    failed = [c for c in ended if c.process.exitcode != 0 and not c.was_cut_off]
    if not failed:
        return
    cause = min(failed, key=lambda child: _distance_from_cause(child, passed_on))
    if isinstance(cause.error, Preempted):
        # Rank 0 has saved; the others may have ended before it did
        preempted = [c for c in failed if isinstance(c.error, Preempted)]
        cause = min(preempted, key=lambda child: child.index)
    if cause.error is not None:
        raise cause.error
    number = -cause.process.exitcode
    if number in passed_on:
        # It had not begun to train, or got a second signal: end as a single process would
        die_of(number)
    raise UserError(
        f"{cause.name} (pid {cause.process.pid}) {_describe_end(cause.process.exitcode)}, and the "
        "others were ended with it. The same command with --resume continues from the last "
        "checkpoint."
    )


def _distance_from_cause(child: _Child, passed_on: set[int]) -> int:
    if isinstance(child.error, LostProcessError):
        return 3
    if isinstance(child.error, Preempted):
        return 1
    if child.error is None and -child.process.exitcode in passed_on:
        return 2
    if child.error is None and child.process.exitcode == -signal.SIGABRT:
        return 4  # PyTorch's threads abort a process when another is gone
    return 0


def _describe_end(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    hints = {
        "SIGKILL": ", as happens when the machine runs out of memory",
        "SIGABRT": ", as PyTorch does when a collective call takes too long",
    }
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    return f"was killed by {name}{hints.get(name, '')}"


def _run(
    work: Callable[[int], None], index: int, errors: Connection, parent: int, method: str
) -> None:
    """What a spawned process does."""
    end_with_parent(parent)
    # Else its loader workers would be spawned as well, and each would import for seconds
    multiprocessing.set_start_method(method, force=True)
    status = 0
    try:
        work(index)
    except KeyboardInterrupt:
        status = 130
    except Preempted as stop:
        errors.send(stop)
        status = PREEMPTED_STATUS
    except UserError as error:
        errors.send(error)
        status = 2
    except Exception:
        trace = traceback.format_exc()[-20_000:]  # what a pipe holds without a reader
        text = f"\n\n-- Process {index} ended with the following error:\n{trace}"
        errors.send(ProcessRaisedException(text, index, os.getpid()))
        status = 1
    _exit(status)


def _exit(status: int) -> None:
    """End this process without the interpreter's finalization.

    In that, a thread of PyTorch's may abort the process because another one has ended, and the
    exit status would be that of a failure.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():  # loader workers
        child.kill()
    os._exit(status)
