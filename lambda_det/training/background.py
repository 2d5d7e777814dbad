"""What writes a checkpoint beside the training: a thread, and a copy of the state for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

__all__ = ["BackgroundWriter", "host_copy"]


class BackgroundWriter:
    """One thread that does one piece of work after the other; after an error, none of the rest."""

    def __init__(self) -> None:
        # Its thread is waited for when the process ends, so no work is lost then either
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None

    def submit(self, work: Callable[[], object]) -> None:
        """Have ``work`` done after what was submitted before; returns at once."""
        self._last = self._pool.submit(_do_after, self._last, work)

    def check(self) -> None:
        """Raise what the work has raised, if all of it is over; does not wait."""
        if self._last is not None and self._last.done():
            self.wait()

    def wait(self) -> None:
        """Return when all is done, or raise what it has raised."""
        if self._last is not None:
            self._last.exception()  # an interruption here leaves it to the next call
            last, self._last = self._last, None
            last.result()


def _do_after(before: Future[None] | None, work: Callable[[], object]) -> None:
    if before is not None:
        before.result()  # it is over, as there is one thread; its error becomes that of this work
    work()


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
