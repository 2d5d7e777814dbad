"""How much memory work takes, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.profiler import profile

GIB = 2**30


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """The peak bytes of tensors during ``work``, beyond those that existed before it.

    On a GPU the allocator reports it. On the CPU it is the sum of the allocator's own events, which
    is exact and excludes other parts of the process. Memory that a library does not take from
    PyTorch's allocator is not counted. Counting slows the work down: don't time it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch._C._profiler import _EventType  # private: used here only

    with profile(profile_memory=True) as profiler:
        work()
    found, waiting = [], profiler.kineto_results.experimental_event_tree()
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    alive: dict[int, int] = {}
    now = peak = 0
    for _, address, size in sorted(found, key=lambda event: event[0]):
        if size > 0:
            alive[address] = size
            now += size
            peak = max(peak, now)
        else:  # what was allocated before the profile and is freed now does not count
            now -= alive.pop(address, 0)
    return peak


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of some tensors, each storage once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
