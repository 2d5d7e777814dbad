"""Memory of a training: what a step takes, what is free, and a word before the system kills it."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import Tensor, nn
from torch.autograd.profiler import profile

from lambda_det.errors import ConfigError
from lambda_det.training.settings import Settings

__all__ = ["FRAGMENTS", "GIB", "check_memory", "free_memory", "peak_memory", "tensor_bytes"]

logger = logging.getLogger(__name__)

GIB = 2**30
FRAGMENTS = 1.08  # of all tensors, for what the allocator loses between them
_A_PIXEL = 16_000  # bytes of a training step in float32: four times what Mask R-CNN takes
_A_WORKER = int(0.6 * GIB)  # of a loader process with PyTorch, Detectron2 and batches
_TIGHT, _HOPELESS = 0.9, 1.2  # parts of the free memory from which a warning and an error follow
# Files of limit, use, and key of what of the use can be dropped, of cgroups 2 and 1
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors that ``work`` has at once, beyond those alive before it.

    On a GPU the allocator reports it. On the CPU it is the sum of the allocator's own events, which
    is exact and excludes other parts of the process. Memory that a library takes elsewhere than
    from PyTorch's allocator is not counted. Counting slows the work down: don't time it.
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


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process can still have without being killed; None if unknown.

    What the system has left, or what the limit of a container or of a group of processes leaves.
    """

    def entries(file: Path) -> dict[str, int]:
        lines = (line.replace(":", " ").split() for line in file.read_text().splitlines())
        return {line[0]: int(line[1]) for line in lines}

    found = []
    try:
        found.append(entries(proc / "meminfo")["MemAvailable"] * 1024)
        groups = [line.split(":", 2)[2] for line in (proc / "self/cgroup").read_text().split()]
    except (OSError, ValueError, KeyError, IndexError):
        groups = []
    own = {Path(group.lstrip("/")) for group in groups}
    for folder in {cgroups / part for group in own for part in (group, *group.parents)} | {cgroups}:
        for limit, use, statistics, droppable in _LIMITS:
            try:
                left = int((folder / limit).read_text()) - int((folder / use).read_text())
                found.append(left + entries(folder / statistics).get(droppable, 0))
            except (OSError, ValueError):  # not there, or "max"
                continue
    return max(min(found), 0) if found else None


def check_memory(
    model: nn.Module,
    batch: Any,
    settings: Settings,
    autocast: Callable[[], AbstractContextManager],
) -> None:
    """Before a detector's first step on a CPU, compare what it needs with what is free.

    Forward and backward pass of one image are measured on a copy of the model, if the batch is so
    large that it might not fit. Random numbers are drawn. Several processes do not measure.

    Args:
        model: that is trained, without its gradients.
        batch: list of dicts with "image" [C, H, W]; others are not looked at.
        settings: name the keys.
        autocast: precision of the forward pass.

    Raises:
        ConfigError: it is certain to be too little.
    """
    is_known = isinstance(batch, list) and isinstance(batch[0], dict) and "image" in batch[0]
    # Synchronised norms of several processes would wait for those that do not measure
    is_alone = comm.get_world_size() == 1
    if torch.device(settings.device).type != "cpu" or not is_known or not is_alone:
        return
    free = free_memory()
    if free is None:
        return
    sides = [sample["image"].shape[-2:] for sample in batch]
    height, width = (max(side) for side in zip(*sides, strict=True))  # to which all are padded
    pixels = len(batch) * height * width
    if pixels * _A_PIXEL < free:
        return
    try:
        network = copy.deepcopy(getattr(model, "module", model))

        def one_image() -> None:
            with EventStorage(), autocast():
                loss = sum(network(batch[:1]).values())
            loss.backward()

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # notes about devices
        peak = peak_memory(one_image, torch.device("cpu"))
    except Exception:  # a model that cannot be copied, or what the step itself will report
        return
    weights = tensor_bytes(p for p in network.parameters() if p.requires_grad)
    activations = (peak - weights) * pixels / (sides[0][0] * sides[0][1])
    step = FRAGMENTS * activations + 3 * weights  # gradients and up to two numbers of the optimiser
    workers = multiprocessing.active_children()
    more = sum(max(_A_WORKER - _resident(worker.pid), 0) for worker in workers)
    if step + more <= _TIGHT * free:
        return
    sentence = (
        f"A step of {len(batch)} images of {width}x{height} needs about {step / GIB:.1f} GiB, "
        f"{len(workers)} loader process(es) {more / GIB:.1f} GiB more, and {free / GIB:.1f} GiB of "
        f"memory are free: lower {settings.key('images_per_step')} or the size of training images, "
        f"raise {settings.key('accumulate')}, or lower {settings.key('num_workers')}."
    )
    if step + more > _HOPELESS * free:
        raise ConfigError(sentence)
    logger.warning(f"{sentence} The system may end this training.")


def _resident(pid: int | None) -> int:
    """Bytes of memory of a process; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0
