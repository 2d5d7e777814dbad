"""Limits of memory, and what a forward pass keeps by the module that keeps it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

try:
    import resource
except ImportError:  # on Windows; there is no limit then
    resource = None


def available_memory() -> int | None:
    """Bytes that this process can take before the system kills one; None where it is unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    for limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return int(0.9 * max(min(found), 0)) if found else None


_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


@contextlib.contextmanager
def limited_memory(limit: int | None) -> Iterator[None]:
    """Make allocations fail once the process has taken ``limit`` bytes more, before it is killed.

    The limit counts what is reserved, not what is written to. Without /proc (outside Linux) there
    is no limit.
    """
    reserved = _reserved_bytes()
    if limit is None or reserved is None:
        yield
        return
    # Other processes may have taken memory since the limit was set
    limit = min(limit, available_memory() or limit)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = reserved + limit
    if before[0] != resource.RLIM_INFINITY:
        wanted = min(wanted, before[0])
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _reserved_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("VmData:") and resource is not None:
            return int(line.split()[1]) * 1024
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ended, on a GPU or the CPU."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    texts = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)


def kept_for_backward(
    work: Callable[[], object], places: Mapping[nn.Module, str], elsewhere: str
) -> dict[str, int]:
    """Bytes that a forward pass keeps for the backward pass, by the module that keeps them first.

    Parameters and buffers of these modules don't count. A storage counts once, however many
    operators keep it.

    Args:
        work: the forward pass; what it returns is held until all is counted.
        places: a name for each module; modules of one name are added up.
        elsewhere: the name for what is kept outside of them.
    """
    own = {
        tensor.untyped_storage().data_ptr()
        for module in places
        for tensor in (*module.parameters(), *module.buffers())
    }
    names = [elsewhere]
    kept = dict.fromkeys((*places.values(), elsewhere), 0)
    seen: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept[names[-1]] += storage.nbytes()
        return tensor

    hooks = []
    for module, name in places.items():
        hooks.append(module.register_forward_pre_hook(lambda m, x, name=name: names.append(name)))
        hooks.append(module.register_forward_hook(lambda m, x, y: names.pop() and None))
    held = None
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            held = work()
        return kept
    finally:
        del held
        for hook in hooks:
            hook.remove()
