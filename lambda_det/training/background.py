"""What writes a checkpoint beside the training: a thread, and a copy of the state for it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

__all__ = ["BackgroundWriter", "host_copy", "tensor_bytes"]


class BackgroundWriter:
    """One thread that does one piece of work after the other; after an error, none of the rest."""

    def __init__(self) -> None:
        # Its thread is waited for when the process ends, so no work is lost then either
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._jobs: deque[Future[None]] = deque()
        self._failed = False

    def submit(self, work: Callable[[], object]) -> None:
        """Have ``work`` done after what was submitted before; returns at once."""
        self._jobs.append(self._pool.submit(self._do, work))

    def _do(self, work: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            work()
        except BaseException:
            self._failed = True
            raise

    def check(self) -> None:
        """Raise what finished work has raised; does not wait."""
        while self._jobs and self._jobs[0].done():
            self._finish(self._jobs.popleft())

    def wait(self) -> None:
        """Return when all is done, or raise what it has raised."""
        while self._jobs:
            self._jobs[0].exception()  # an interruption here leaves it in the list
            self._finish(self._jobs.popleft())

    def _finish(self, job: Future[None]) -> None:
        if error := job.exception():
            for rest in self._jobs:
                rest.exception()
            self._jobs.clear()
            self._failed = False
            raise error


def host_copy(state: Any) -> Any:
    """Copy tensors to host memory, and containers and plain values along with them.

    Tensors that shared a storage share one in the copy, so that a file of it is no larger; the
    versions of modules, which state dicts carry as an attribute, are kept.
    """
    return _copied(state, {})


def _copied(value: Any, storages: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return _copied_tensor(value.detach(), storages)
    if isinstance(value, Mapping):
        result = copy.copy(value)  # with its attributes, and its order
        for key, item in value.items():
            result[key] = _copied(item, storages)
        return result
    if type(value) in (list, tuple):
        return type(value)(_copied(item, storages) for item in value)
    return copy.deepcopy(value)


def _copied_tensor(tensor: Tensor, storages: dict[int, Any]) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return tensor.to("cpu", copy=True)
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in storages:
        # The original is kept beside the copy, or another could come to lie in its place
        storages[key] = storage, storage.clone() if storage.device.type == "cpu" else storage.cpu()
    result = torch.empty(0, dtype=tensor.dtype)
    return result.set_(storages[key][1], tensor.storage_offset(), tensor.shape, tensor.stride())


def tensor_bytes(state: Any) -> int:
    """What the tensors of a state take in a file."""
    sizes: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            storage = value.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
        elif isinstance(value, Mapping):
            for item in value.values():
                visit(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    visit(state)
    return sum(sizes.values())
