"""Load images: in processes, past images that cannot be read, and ahead of the GPU.

The processes leave a scheduler's signals to the process that trains, which decides what these mean:
PyTorch's own handlers would end them in the middle of a step. PyTorch has no public place for that,
so the signals are held back around the start of a process (:func:`_signals_held_back`,
:func:`_start_process`). Batches go through shared memory, or through pipes where it is scarce, as
in Docker: PyTorch's DataLoader would wait there until its timeout.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, TypeVar

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset, default_collate

from lambda_det.distributed.signals import SIGNALS, end_with_parent, start_tracker
from lambda_det.errors import DataError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

_SHARED_MEMORY = "/dev/shm"  # on Linux
_SCARCE = 2**30  # bytes that are free; loader processes may take that much at the same moment
# A forked process starts at once. Where Python 3.14 would take a forkserver, its processes are not
# children of this one, which would not notice their end
LOADERS_START_BY = "fork" if sys.platform == "linux" else None
_CAN_WAIT = hasattr(signal, "sigwaitinfo")  # for signals that are held back: not Windows and macOS


class UnreadableImages:
    """Counts the images of a data set that could not be read, over all workers of its loader.

    Args:
        size: images of the data set.
        limit: how many different images may be unreadable. Each training process has its own count,
            so N processes may meet more in all.
        key: the configuration key of ``limit``, for the message.
        files: the number of the file of each image, from 0, where several are parts of one, int
            [size]; None where each has its own.
    """

    def __init__(self, size: int, limit: int, key: str, files: np.ndarray | None = None) -> None:
        self._limit = limit
        self._key = key
        self._files = np.arange(size) if files is None else files
        # In shared memory: each worker of a DataLoader has its own copy of this object.
        count = int(self._files.max(initial=-1)) + 1
        self._unreadable = torch.zeros(count, dtype=torch.bool).share_memory_()

    def next_readable(self, index: int, read: Callable[[int], Item]) -> Item:
        """Read the image at ``index``, or the next one that can be read; the first follows the
        last.

        Args:
            index: from 0.
            read: takes an index and raises ``DataError`` if the image cannot be read.

        Raises:
            DataError: more images than allowed, or all of them, could not be read.
        """
        last_error = None
        for candidate in self._in_order(int(index) % len(self._files)):
            file = self._files[candidate]
            if self._unreadable[file]:
                continue
            try:
                return read(candidate)
            except DataError as error:
                last_error = error
                self._unreadable[file] = True
                self._report(error)
        raise DataError(f"No image of the training data can be read; the last: {last_error}")

    def _in_order(self, index: int) -> Iterator[int]:
        """The image, and then, where it cannot be read, all others from the next file on."""
        yield index
        size = len(self._files)
        # the tiles of one file stand together, and are replaced by different ones of the next
        beyond = index + int((self._files == self._files[index]).sum())
        for place in range(beyond, beyond + size):
            yield place % size

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


class ImageLoader(DataLoader):
    """A DataLoader whose processes end with this one, and leave a scheduler's signals to it."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        num_workers: int = 0,
        timeout: float = 0,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        **options: Any,
    ) -> None:
        """
        Args:
            dataset: items by the indices of the sampler.
            num_workers: processes that load images.
            timeout: seconds to wait for a batch of a process; 0: no limit.
            collate_fn: makes a batch of a list of items.
            options: of torch's DataLoader.
        """
        super().__init__(
            dataset,
            num_workers=num_workers,
            timeout=timeout if num_workers else 0,
            # Each new iterator draws its seed from this generator. From the global one, an iterator
            # with processes would draw more numbers than one without.
            generator=torch.Generator(),
            worker_init_fn=partial(_start_process, os.getpid()),
            collate_fn=partial(_packed, collate_fn) if num_workers else collate_fn,
            multiprocessing_context=LOADERS_START_BY if num_workers else None,
            **options,
        )
        if num_workers and _is_shared_memory_scarce():
            logger.warning(
                f"Less than {_SCARCE >> 20} MiB of {_SHARED_MEMORY} are free: batches go through "
                "pipes, which takes a little longer. Docker gives a container more by "
                "--shm-size=8g or --ipc=host."
            )

    def __iter__(self) -> Iterator[Any]:
        """Yield batches; the processes end with the iterator.

        Raises:
            DataError: an item could not be read.
        """
        with _signals_held_back() if self.num_workers else nullcontext():
            batches = super().__iter__()
        try:
            for batch in batches:
                yield _unpacked(batch) if self.num_workers else batch
        except DataError as error:  # torch puts the stack trace of a loader process before it
            raise DataError(str(error).rpartition("DataError: ")[2].strip()) from error
        finally:
            # It is not left to the garbage collector: the traceback of an error may be kept for
            # long, and torch fails where a forked process collects garbage of its parent.
            if self.num_workers:
                batches._shutdown_workers()


def _unpacked(packed: bytes) -> Any:
    """The batch that :func:`_packed` made."""
    try:
        return pickle.loads(packed)
    except (OSError, EOFError) as error:  # of a connection to the process that shares it
        raise RuntimeError("DataLoader worker ended while it handed over a batch") from error


def _packed(collate: Callable[[list[Any]], Any], items: list[Any]) -> bytes:
    """A batch of a loader process, with its tensors in shared memory if there is enough."""
    # An object that cannot be pickled raises its error here, which reaches the main process
    pack = pickle.dumps if _is_shared_memory_scarce() else ForkingPickler.dumps
    return bytes(pack(collate(items)))


def _is_shared_memory_scarce() -> bool:
    is_there = os.path.isdir(_SHARED_MEMORY)
    return is_there and shutil.disk_usage(_SHARED_MEMORY).free < _SCARCE


def _start_process(parent: int, number: int) -> None:
    """What a loader process does first."""
    _leave_signals_to(parent)  # first: threads that start later block them as well
    sys.excepthook = _report_unless_disconnected
    # By a thread, because the kernel would take the end of the iterating thread for the parent's
    end_with_parent(parent, by_main_thread=False)
    # One thread for each process: there are as many as cores to use.
    cv2.setNumThreads(0)
    torch.set_num_threads(1)


def _report_unless_disconnected(
    error_type: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Leave out that the process that takes the batches has been killed while it took one."""
    # Python's thread that hands shared memory over prints it with a stack trace. The process that
    # has started the killed one says what happened, and this one ends with its parent
    if not issubclass(error_type, (ConnectionError, EOFError)):
        sys.__excepthook__(error_type, error, trace)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Have a process that is started in the meantime begin with a scheduler's signals held back."""
    # PyTorch gives it a handler that obeys any SIGTERM before it calls _start_process, and a
    # spawned one imports for seconds before that
    if LOADERS_START_BY is None:
        start_tracker()  # else it would be started below, and let some signals through
    if not _CAN_WAIT:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_signals_to(parent: int) -> None:
    """Obey of a scheduler's signals only a SIGTERM from the parent, which decides about all."""
    if not _CAN_WAIT:
        for number in set(SIGNALS) - {signal.SIGTERM}:
            signal.signal(number, signal.SIG_IGN)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def wait() -> None:
        while True:
            sent = signal.sigwaitinfo(SIGNALS)
            if sent.si_signo == signal.SIGTERM and sent.si_pid == parent:
                os._exit(0)

    threading.Thread(target=wait, name="signals", daemon=True).start()


class BatchesAhead:
    """The batches of a loader, each copied to a GPU while the GPU computes the batch before.

    timm's PrefetchLoader does so only for pairs of images and labels, which it also normalises.

    Args:
        batches: their tensors in lists and dicts are copied, from pinned memory. The model copies
            what else they hold, for example Detectron2's ground truth.
        device: a GPU.
    """

    def __init__(self, batches: Iterator[Any], device: str | torch.device) -> None:
        self._batches = batches
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._ahead: list[Any] = []
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._ahead and self._error is None:
            self.fetch()
        if self._error is not None:
            raise self._error
        batch = self._ahead.pop()
        now = torch.cuda.current_stream(self._device)
        now.wait_stream(self._stream)
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                leaf.record_stream(now)  # its memory belongs to the other stream
        return batch

    def fetch(self) -> None:
        """Draw a batch and start to copy it; call it while the GPU computes.

        An error, or the end of the batches, is raised when that batch is asked for.
        """
        try:
            with torch.cuda.stream(self._stream):
                self._ahead.append(tree_map_only(Tensor, self._copied, next(self._batches)))
        except Exception as error:
            self._error = error

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
