"""Processes of this machine that work together and end together."""

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

from lambda_det.distributed.preemption import SIGNALS
from lambda_det.errors import PREEMPTED_STATUS, LostProcessError, Preempted, UserError

__all__ = ["GRACE", "end_with_parent", "run_together"]

# Seconds that the others have after one has failed; the first may be writing a checkpoint
GRACE = 15.0
_POLL = 0.1  # seconds between two looks at the processes, and at what a signal asked for


@dataclass
class _Member:
    """One of the processes.

    Attributes:
        report: what it raised; None if it returned, or ended without a word.
        cut_off: it was still there when its grace was over.
    """

    index: int
    name: str
    process: mp.Process
    reports: Connection
    report: BaseException | None = None
    cut_off: bool = False

    def take_report(self) -> None:
        """After its end."""
        self.process.join()
        try:
            if self.reports.poll():
                self.report = self.reports.recv()
        except EOFError:
            pass  # nothing was said

    @property
    def failed(self) -> bool:
        return self.process.exitcode not in (0, PREEMPTED_STATUS)


def run_together(work: Callable[[int], None], names: list[str]) -> None:
    """Call ``work(0)``, ``work(1)``, ... each in a process of its own, and wait for all.

    SIGTERM and SIGUSR1 are passed on to the processes. Where one fails, the others have ``GRACE``
    seconds to end by themselves, as they do when they notice that it is gone; they may as well
    hang in a collective call, and are killed then. None of them outlives this process.

    Args:
        work: can be pickled.
        names: of the processes, for messages.

    Raises:
        UserError, Preempted: what ``work`` raised, or which process was killed. What led to the end
            goes before what followed from it.
        ProcessRaisedException: ``work`` raised another error; the message holds its stack trace.
    """
    context = mp.get_context("spawn")
    members: list[_Member] = []
    with _noted_signals() as noted:
        try:
            for index, name in enumerate(names):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_member, args=(work, index, sender, os.getpid()))
                process.start()
                sender.close()
                members.append(_Member(index, name, process, receiver))
            ended, passed_on = _wait(members, noted)
        except KeyboardInterrupt:
            # The terminal has told the processes, too
            _wait_for_end(members)
            raise
        finally:
            for member in members:
                member.process.kill()
    _raise_cause(ended, passed_on)


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Gather the signals to pass on, for as long as there is somebody to pass them to."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted  # signals arrive elsewhere
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        for number, handler in before.items():
            # None is one that was not set from Python, and cannot be set from here
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _wait(members: list[_Member], noted: list[int]) -> tuple[list[_Member], set[int]]:
    """Wait for the end of all; the members as they ended, and the signals passed on."""
    running, ended, passed_on = list(members), [], set()
    deadline = float("inf")
    while running:
        while noted:
            number = noted.pop(0)
            passed_on.add(number)
            for member in running:
                if member.process.exitcode is None:  # or the signal came to all, and ended it
                    os.kill(member.process.pid, number)
        now = _ended(running)
        if not now:
            time.sleep(_POLL)
        for member in now:
            member.take_report()
            running.remove(member)
            if member.failed:
                deadline = min(deadline, time.monotonic() + GRACE)
        # Who ended without a word did so before the others noticed, if it is seen with them
        ended += sorted(now, key=lambda member: member.report is not None)
        if time.monotonic() > deadline:
            for member in running:
                member.cut_off = True
                member.process.kill()
            deadline = float("inf")
    return ended, passed_on


def _ended(members: list[_Member]) -> list[_Member]:
    # Not by the sentinels of the processes: loader workers inherit those, and may live longer
    return [member for member in members if member.process.exitcode is not None]


def _wait_for_end(members: list[_Member]) -> None:
    deadline = time.monotonic() + GRACE
    while len(_ended(members)) < len(members) and time.monotonic() < deadline:
        time.sleep(_POLL)


def _raise_cause(ended: list[_Member], passed_on: set[int]) -> None:
    failed = [m for m in ended if m.process.exitcode != 0 and not m.cut_off]
    if not failed:
        return
    # The first among those of the best rank
    cause = min(failed, key=lambda member: _rank(member, passed_on))
    if isinstance(cause.report, Preempted):
        # By the first process, which has saved; the others may have ended before that was done
        stopped = [m for m in failed if isinstance(m.report, Preempted)]
        cause = min(stopped, key=lambda member: member.index)
    if cause.report is not None:
        raise cause.report
    number = -cause.process.exitcode
    if number in passed_on:
        # It had not begun, or was told a second time: end as a single process would
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    raise UserError(
        f"{cause.name} (pid {cause.process.pid}) {_end_in_words(cause.process.exitcode)}, and the "
        "others were ended with it. The same command with --resume continues from the last "
        "checkpoint."
    )


def _rank(member: _Member, passed_on: set[int]) -> int:
    """How far an end is from the cause of all."""
    if isinstance(member.report, LostProcessError):
        return 3
    if isinstance(member.report, Preempted):
        return 1
    if member.report is None and -member.process.exitcode in passed_on:
        return 2
    if member.report is None and member.process.exitcode == -signal.SIGABRT:
        return 4  # PyTorch's threads abort a process when another is gone
    return 0


def _end_in_words(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    hints = {
        signal.SIGKILL: ", as a machine does that runs out of memory",
        signal.SIGABRT: ", as PyTorch does when a collective call takes too long",
    }
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    return f"was killed by {name}{hints.get(-status, '')}"


def _member(work: Callable[[int], None], index: int, reports: Connection, parent: int) -> None:
    end_with_parent(parent)
    status = 0
    try:
        work(index)
    except KeyboardInterrupt:
        status = 130
    except Preempted as stop:
        reports.send(stop)
        status = PREEMPTED_STATUS
    except UserError as error:
        reports.send(error)
        status = 2
    except Exception:
        words = traceback.format_exc()[-20_000:]  # what a pipe holds without a reader
        words = f"\n\n-- Process {index} ended with the following error:\n{words}"
        reports.send(ProcessRaisedException(words, index, os.getpid()))
        status = 1
    _leave(status)


def _leave(status: int) -> None:
    """End now: all has been done and said.

    In an orderly end of the interpreter a thread of PyTorch's may abort the process because another
    has gone first, and the status would be that of a failure.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():  # a loader's workers
        child.kill()
    os._exit(status)


def end_with_parent(parent: int) -> None:
    """Be killed when the process ``parent`` ends in whatever way; on Linux alone.

    What it was training is lost from the last checkpoint on, as with any kill. Going on alone would
    be worse: the run that is started in its place writes to the same folder.
    """
    mp._prctl_pr_set_pdeathsig(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)
