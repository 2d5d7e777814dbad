"""Send batches of loader processes through shared memory, or through a pipe where it is full.

torch's DataLoader has only the first way. Where ``/dev/shm`` is full, as Docker's 64 MiB soon are,
the thread of a loader process that sends a batch fails, and the training waits for it until the
timeout.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

__all__ = ["Packed", "Packing", "full_shared_memory"]

_FOLDER = "/dev/shm"  # of shared memory on Linux
# room for others: semaphores of the next loader's processes, and NCCL's exchange
_KEPT_SHARE, _KEPT_BYTES = 1 / 4, 2**28
_PLENTY = 2**33  # bytes; more than all loader processes of a machine take at the same moment
_NEXT_TO_NOTHING = 2**16  # bytes; semaphores of loader processes take a page each


@dataclass
class Packed:
    """A batch on its way from a loader process.

    Attributes:
        rest: the pickled batch with a number in place of each tensor.
        tensors: in shared memory; or pickled, where that has no room.
        problem: why they are not in shared memory; "" if they are.
    """

    rest: bytes
    tensors: list[Tensor] | bytes
    problem: str = ""

    def unpack(self) -> Any:
        """The batch."""
        tensors = self.tensors
        if isinstance(tensors, bytes):
            tensors = pickle.loads(tensors)
        return _WithTensors(io.BytesIO(self.rest), tensors).load()

    def pin_memory(self) -> Packed:
        """The batch in pinned memory; the DataLoader calls it if it pins."""
        if isinstance(self.tensors, bytes):
            self.tensors = pickle.loads(self.tensors)
        return Packed(self.rest, pin_memory(self.tensors), self.problem)


class Packing:
    """Makes a batch of a list of items, and packs it in a loader process."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        """
        Args:
            collate: makes a batch.
        """
        self._collate = collate

    def __call__(self, items: list[Any]) -> Packed:
        """
        Args:
            items: of the data set.

        Returns:
            Their batch. An object that cannot be pickled raises its error here, which reaches the
            main process.
        """
        stream = io.BytesIO()
        pickler = _WithoutTensors(stream)
        pickler.dump(self._collate(items))
        tensors = pickler.tensors
        size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        with _one_at_a_time():
            problem = _problem(size)
            if not problem:
                try:
                    for tensor in tensors:
                        tensor.share_memory_()
                except RuntimeError as error:  # another program took the room
                    problem = str(error)
        packed = pickle.dumps(tensors) if problem else tensors
        return Packed(stream.getvalue(), packed, problem)


class _WithoutTensors(pickle.Pickler):
    """Collects the tensors of the objects that it pickles."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, thing: Any) -> int | None:
        if type(thing) is not Tensor or thing.layout != torch.strided or thing.is_cuda:
            return None
        self.tensors.append(thing)
        return len(self.tensors) - 1


class _WithTensors(pickle.Unpickler):
    """Puts tensors back in their places."""

    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Where shared memory is scarce, only one process of the machine looks at it and takes some.

    Several would each see the same room, and where there is none PyTorch 2.4 dies of a bus error.
    """
    if not os.path.isdir(_FOLDER) or shutil.disk_usage(_FOLDER).free > _PLENTY:
        yield
        return
    import fcntl  # Windows has neither it nor the folder

    folder = os.open(_FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _problem(size: int) -> str:
    """The reason why this number of bytes should not go into shared memory; "" if they may."""
    if not size or not os.path.isdir(_FOLDER):
        return ""
    memory = shutil.disk_usage(_FOLDER)
    if memory.free - size >= min(_KEPT_SHARE * memory.total, _KEPT_BYTES):
        return ""
    return f"a batch has {size / 2**20:.1f} MiB; {_left(memory)}"


def full_shared_memory() -> str:
    """The rest of shared memory in words, if it is nearly full; "" otherwise."""
    if not os.path.isdir(_FOLDER):
        return ""
    memory = shutil.disk_usage(_FOLDER)
    return _left(memory) if memory.free < _NEXT_TO_NOTHING else ""


def _left(memory: Any) -> str:
    return f"{_FOLDER} has {memory.free / 2**20:.1f} of {memory.total / 2**20:.1f} MiB left"
