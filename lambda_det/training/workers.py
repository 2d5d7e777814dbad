"""The processes that load images: what they are reading, and what is said when one dies or hangs.

A scheduler signals all processes of a job, and the main one decides what that means; its workers
do not listen.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lambda_det.errors import ConfigError, DataError, listed

__all__ = ["WatchedLoader", "reading"]

# Ctrl-C and what schedulers send
_NOT_FOR_WORKERS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
_POLL = 1.0  # seconds between two looks at whether the workers live
_NAME_BYTES = 1024
_CAUSES = {
    signal.SIGKILL: "mostly memory ran out: lower DATALOADER.NUM_WORKERS, or give the machine more "
    "memory",
    signal.SIGBUS: "mostly /dev/shm is full: lower DATALOADER.NUM_WORKERS, or give the machine or "
    "container more of it",
    **dict.fromkeys(
        (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE),
        "mostly a file that the image library does not bear: fetch it again, or take it out of "
        "the data",
    ),
}
_OTHER_CAUSE = "look for who or what ended it, or set DATALOADER.NUM_WORKERS 0 to see it happen"

_own_row: np.ndarray | None = None  # of the table of names, in a worker


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Let the main process know what a worker is about to read, for the case that it dies of it."""
    _note(name)
    try:
        yield
    finally:
        _note("")


def _note(name: str) -> None:
    if _own_row is not None:
        text = name.encode("utf-8", "surrogateescape")[: _NAME_BYTES - 1] + b"\0"
        _own_row[: len(text)] = np.frombuffer(text, np.uint8)


class WatchedLoader:
    """The batches of a DataLoader, whose failures are one sentence each.

    Dropping the iterator ends the workers.
    """

    def __init__(self, loader: DataLoader, timeout: int) -> None:
        """
        Args:
            loader: of a data set that gives a ``DataError`` in place of an item that cannot be
                read. Raised in a worker it would reach the main process as a stack trace for a
                text, and leave workers behind that take ten seconds to end. Its settings for
                workers are replaced.
            timeout: seconds to wait for a batch before the workers are taken to hang; 0 for ever.

        Raises:
            ConfigError: ``timeout`` is negative.
        """
        if timeout < 0:
            raise ConfigError(f"DATALOADER.TIMEOUT is {timeout}; give seconds, or 0 for no limit.")
        loader.collate_fn = _FirstFailure(loader.collate_fn)
        # Each new iterator draws from it, and the global one must not depend on their number
        loader.generator = loader.generator or torch.Generator()
        if loader.num_workers:
            loader.timeout = _POLL
        self._loader = loader
        self._timeout = timeout

    def __len__(self) -> int:
        """Batches of this process; a TypeError for an endless loader."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches.

        Raises:
            DataError: an item could not be read; or a worker was ended from outside, or hangs.
        """
        # Of this iterator alone: another may have workers of the same numbers
        table = torch.zeros(self._loader.num_workers, _NAME_BYTES, dtype=torch.uint8)
        table.share_memory_()
        self._loader.worker_init_fn = _WorkerStart(table)
        batches = _start(self._loader)
        workers = getattr(batches, "_workers", [])
        # Those that hang, also where the main process ends with the iterator still open: its exit
        # asks by SIGTERM, which they ignore, and would then wait for ever.
        end = Finalize(None, _kill, args=(workers,), exitpriority=10)
        try:
            while True:
                batch = self._next(batches, workers, table)
                if batch is None:
                    return
                if isinstance(batch, DataError):
                    raise batch
                yield batch
        finally:
            # A traceback may keep this frame, and so the workers, until the interpreter ends;
            # there it takes them ten seconds.
            del batches
            end()

    def _next(self, batches: Iterator[Any], workers: Sequence[BaseProcess], table: Tensor) -> Any:
        """The next batch, None at the end, or a DataError."""
        waited = 0.0  # in polls, not by a clock, which goes on while a job is suspended
        while True:
            try:
                return next(batches, None)
            except RuntimeError as error:
                text = str(error)
                if text.startswith("DataLoader worker"):
                    return DataError(_death(workers, table))
                if not text.startswith("DataLoader timed out"):
                    raise
            except (EOFError, OSError):
                # A batch is fetched from the worker that made it, which may be about to die
                if not _ended(workers):
                    raise
                return DataError(_death(workers, table))
            waited += _POLL
            if self._timeout and waited >= self._timeout:
                sentence = self._hanging(table)
                _kill(workers)  # or their end would be waited for
                return DataError(sentence)

    def _hanging(self, table: Tensor) -> str:
        names = [name for name in map(_name, table) if name]
        return (
            f"No batch of images came for {self._timeout} seconds (DATALOADER.TIMEOUT); the "
            f"processes that load them were reading {listed(names)}. See whether the disk or "
            "network drive answers, or set DATALOADER.TIMEOUT higher."
        )


class _FirstFailure:
    """Collates a batch, or gives the first failure in it."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> Any:
        failures = (item for item in items if isinstance(item, DataError))
        return next(failures, None) or self._collate(items)


class _WorkerStart:
    """What a worker does first.

    Args:
        table: uint8 [workers, bytes] in shared memory, what each is reading.
    """

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, number: int) -> None:
        global _own_row
        # One thread for each worker: they are as many as there are cores to use
        cv2.setNumThreads(0)
        torch.set_num_threads(1)
        for number_of_signal in _NOT_FOR_WORKERS:
            signal.signal(number_of_signal, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NOT_FOR_WORKERS)
        _own_row = self._table[number].numpy()


def _start(loader: DataLoader) -> Iterator[Any]:
    """Start a loader's workers, without the signal handler that torch adds.

    When a worker is killed, that one raises wherever the main process happens to be, which may be
    in the middle of a checkpoint. Without it, the wait for the next batch fails within a second.
    """
    # They begin with the main process's handlers, so signals wait until _WorkerStart
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)
    try:
        if threading.current_thread() is not threading.main_thread():
            return iter(loader)  # torch adds none there
        handler = signal.getsignal(signal.SIGCHLD)
        batches = iter(loader)
        if handler is not None:  # one that was not set from Python cannot be set from here
            signal.signal(signal.SIGCHLD, handler)
        return batches
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _death(workers: Sequence[BaseProcess], table: Tensor) -> str:
    """What is known of the worker that ended."""
    dead = _ended(workers)
    status = workers[dead[0]].exitcode if dead else None
    cause = _OTHER_CAUSE
    how = f"with status {status}"
    if status is not None and status < 0:
        cause = _CAUSES.get(-status, _OTHER_CAUSE)
        known = {number.value: number.name for number in signal.Signals}
        how = f"by {known.get(-status, f'signal {-status}')}"
    names = [name for name in (_name(table[n]) for n in dead) if name]
    what = f"while it read {listed(names)}" if names else "between two images"
    return f"One of {len(workers)} processes that load images was ended {how} {what}; {cause}."


def _ended(workers: Sequence[BaseProcess]) -> list[int]:
    """The numbers of those that have ended, or do within a second."""
    ended = wait([worker.sentinel for worker in workers], timeout=1)
    numbers = [n for n, worker in enumerate(workers) if worker.sentinel in ended]
    for number in numbers:
        workers[number].join(1)  # its files are closed before its exit status is known
    return numbers


def _name(row: Tensor) -> str:
    return bytes(row.numpy()).partition(b"\0")[0].decode("utf-8", "replace")


def _kill(workers: Sequence[BaseProcess]) -> None:
    alive = [worker for worker in workers if worker.is_alive()]
    if not alive:
        return
    is_main = threading.current_thread() is threading.main_thread()
    # torch's, if a loader of somebody else set it, would raise for each
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if is_main else None
    for worker in alive:
        worker.kill()
    for worker in alive:
        worker.join(1)
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)
