"""Loading images in worker processes: images that cannot be read, and workers that die or hang.

A scheduler sends its signals to all processes of a job. The main process decides what they mean;
its workers ignore them.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lambda_det.distributed.parent import end_with_parent
from lambda_det.distributed.signals import SIGNALS, name_of_end
from lambda_det.errors import DataError, listed

__all__ = ["KEYS", "UnreadableImages", "WatchedLoader", "reading"]

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

_IGNORED_SIGNALS = {signal.SIGINT, *SIGNALS}  # Ctrl-C, and what schedulers send
_IS_WINDOWS = sys.platform == "win32"  # which has neither SIGCHLD nor masks of signals
_POLL = 1.0  # seconds that torch waits for a batch before it looks at the workers
_NAME_BYTES = 1024
# How a YAML configuration names the settings of a loader
KEYS = {
    "num_workers": "DATALOADER.NUM_WORKERS",
    "timeout": "DATALOADER.TIMEOUT",
    "max_unreadable": "DATALOADER.MAX_UNREADABLE_IMAGES",
}
_CURES = {
    "SIGKILL": "mostly memory ran out: lower {num_workers}, or give the machine more memory",
    "SIGBUS": "mostly /dev/shm is full: lower {num_workers}, or give the machine more of it",
    "SIGSEGV": "mostly a file that crashes the image library: fetch it again, or take it out",
}
_OTHER_CURE = "look for what ended it, or set {num_workers} to 0 to see it happen"


# ------------------------------------------------------------------- images that cannot be read


class UnreadableImages:
    """Counts the images of a data set that could not be read, over all workers of its loader.

    Args:
        size: images of the data set.
        limit: how many different images may be unreadable. Each training process has its own count,
            so N processes may meet more in all.
        key: the configuration key of ``limit``, for the message.
    """

    def __init__(self, size: int, limit: int, key: str) -> None:
        self._limit = limit
        self._key = key
        # In shared memory: each worker of a DataLoader has its own copy of this object.
        self._unreadable = torch.zeros(size, dtype=torch.bool).share_memory_()

    def next_readable(self, index: int, read: Callable[[int], Item]) -> Item:
        """Read the image at ``index``, or the next one that can be read, round the end.

        Args:
            index: from 0.
            read: takes an index and raises ``DataError`` if the image cannot be read.

        Raises:
            DataError: more images than allowed, or all of them, could not be read.
        """
        last_error = None
        size = len(self._unreadable)
        for step in range(size):
            candidate = (int(index) + step) % size
            if self._unreadable[candidate]:
                continue
            try:
                return read(candidate)
            except DataError as error:
                last_error = error
                self._unreadable[candidate] = True
                self._report(error)
        raise DataError(f"No image of the training data can be read; the last: {last_error}")

    def _report(self, error: DataError) -> None:
        count = int(self._unreadable.sum())
        if count > self._limit:
            raise DataError(
                f"Training stops after {count} unreadable images, as {self._key} is "
                f"{self._limit}; the last: {error}"
            ) from error
        logger.warning(
            f"Unreadable image {count} of at most {self._limit}, replaced by the next: {error}"
        )


# -------------------------------------------------------------------- what a worker process does

_own_row: np.ndarray | None = None  # of the table of names, in a worker


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Note what this process reads. The main process names it if a worker dies or hangs there."""
    row = np.zeros(1, np.uint8) if _own_row is None else _own_row
    text = name.encode("utf-8", "surrogateescape")[: len(row) - 1] + b"\0"
    row[: len(text)] = np.frombuffer(text, np.uint8)
    try:
        yield
    finally:
        row[0] = 0


class _WorkerStart:
    """What a worker does first.

    Args:
        table: uint8 [workers, bytes] in shared memory, what each of them reads.
    """

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._parent = os.getpid()
        self._by_main_thread = threading.current_thread() is threading.main_thread()

    def __call__(self, number: int) -> None:
        global _own_row
        # A forkserver ends with the main process
        parent = (
            os.getppid() if multiprocessing.get_start_method() == "forkserver" else self._parent
        )
        end_with_parent(parent, by_main_thread=self._by_main_thread)
        # One thread for each worker: there are as many workers as cores to use.
        cv2.setNumThreads(0)
        torch.set_num_threads(1)
        for ignored in _IGNORED_SIGNALS:
            signal.signal(ignored, signal.SIG_IGN)
        if not _IS_WINDOWS:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED_SIGNALS)
        _own_row = self._table[number].numpy()


# ------------------------------------------------------------------------------------ the loader


class WatchedLoader:
    """The batches of a DataLoader; workers that die or hang end it with one sentence.

    Dropping the iterator ends the workers.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        timeout: int,
        num_workers: int = 0,
        generator: torch.Generator | None = None,
        keys: Mapping[str, str] = KEYS,
        **options: Any,
    ) -> None:
        """
        Args:
            dataset: items by the indices of the sampler.
            timeout: seconds to wait for a batch before the workers count as hanging; 0: no limit.
            num_workers: processes that load images.
            generator: of torch's seeds for the workers.
            keys: how messages name ``num_workers`` and ``timeout``.
            options: of torch's DataLoader.
        """
        self._timeout = timeout
        self._keys = keys
        self._loader = DataLoader(
            dataset,
            num_workers=num_workers,
            timeout=_POLL if num_workers else 0,
            # Each new iterator draws its seed from this generator. From the global one, an iterator
            # with workers would draw more numbers than one without.
            generator=generator or torch.Generator(),
            **options,
        )

    def __len__(self) -> int:
        """Batches of this process; a TypeError for an endless loader."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches.

        Raises:
            DataError: an item could not be read; or a worker died or hangs.
        """
        # One table for each iterator: another one may have workers of the same numbers.
        table = torch.zeros(self._loader.num_workers, _NAME_BYTES, dtype=torch.uint8)
        table.share_memory_()
        self._loader.worker_init_fn = _WorkerStart(table)
        batches = _start(self._loader)
        workers = getattr(batches, "_workers", [])
        # At its exit, Python sends SIGTERM to the workers of an open iterator and waits for them.
        # They ignore it, so they are killed before.
        end = Finalize(None, _kill, args=(workers,), exitpriority=10)
        waited = 0.0  # the sum of the polls: a clock goes on while a job is suspended
        try:
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                except DataError as error:  # torch puts the stack trace of a worker before it
                    raise DataError(str(error).rpartition("DataError: ")[2].strip()) from None
                except (RuntimeError, EOFError, OSError) as error:
                    # No batch came within the poll; or a worker ended, or the connection to it
                    # broke, and it ends a moment later; or the data set raised it
                    is_poll = str(error).startswith("DataLoader timed out")
                    if dead := _ended(workers, within=0 if is_poll else 1):
                        raise DataError(self._describe_death(workers, dead, table)) from error
                    if not is_poll:
                        raise
                    waited += _POLL
                    if self._timeout and waited >= self._timeout:
                        _kill(workers)  # the end of the iterator would wait for them
                        raise DataError(self._describe_hang(table)) from error
                else:
                    waited = 0.0
                    yield batch
        finally:
            # A traceback may keep this frame, and with it the workers, until the interpreter exits.
            # Ending them there takes ten seconds.
            del batches
            end()

    def _describe_death(
        self, workers: Sequence[BaseProcess], dead: Sequence[int], table: Tensor
    ) -> str:
        name = name_of_end(workers[dead[0]].exitcode)
        names = [name for name in map(_name, table[list(dead)]) if name]
        what = f"while it read {listed(names)}" if names else "between two images"
        cure = _CURES.get(name, _OTHER_CURE).format(**self._keys)
        return f"One of {len(workers)} processes that load images ended with {name} {what}; {cure}."

    def _describe_hang(self, table: Tensor) -> str:
        names = [name for name in map(_name, table) if name]
        return (
            f"No batch of images came for {self._timeout} seconds ({self._keys['timeout']}); the "
            f"processes that load them were reading {listed(names)}. See whether the disk or "
            f"network drive answers, or set {self._keys['timeout']} higher."
        )


@contextmanager
def _no_handler_of_torch() -> Iterator[None]:
    """Keep torch's handler of SIGCHLD out of the way.

    When a worker is killed, that handler raises wherever the main process is, which may be in the
    middle of a checkpoint. Without it, the wait for the next batch fails within a second.
    """
    if _IS_WINDOWS or threading.current_thread() is not threading.main_thread():
        yield  # torch installs none there
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if handler is not None:  # one that was not set from Python cannot be set from here
            signal.signal(signal.SIGCHLD, handler)


def _start(loader: DataLoader) -> Iterator[Any]:
    """Start a loader's workers."""
    if _IS_WINDOWS:
        return iter(loader)
    # The workers start with the main process's handlers, so signals wait until _WorkerStart.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_SIGNALS)
    try:
        with _no_handler_of_torch():
            return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended(workers: Sequence[BaseProcess], *, within: float) -> list[int]:
    """The numbers of the workers that have ended, or the first that do so within some seconds."""
    ended = wait([worker.sentinel for worker in workers], timeout=within)
    numbers = [n for n, worker in enumerate(workers) if worker.sentinel in ended]
    for number in numbers:
        workers[number].join(1)  # its files are closed before its exit status is known
    return numbers


def _name(row: Tensor) -> str:
    return bytes(row.numpy()).partition(b"\0")[0].decode("utf-8", "replace")


def _kill(workers: Sequence[BaseProcess]) -> None:
    if alive := [worker for worker in workers if worker.is_alive()]:
        with _no_handler_of_torch():
            for worker in alive:
                worker.kill()
            for worker in alive:
                worker.join(1)
