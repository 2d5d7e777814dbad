"""Some work done in 1, 2 and 4 connected processes at once, at the price of one import."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from detectron2.utils import comm

from tests.forked import CONTEXT

MINUTES = 5


def _member(work: Callable[[], Any], rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        init = f"file://{folder}/init_{world_size}"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size)
        comm.create_local_process_group(world_size)
    torch.save(work(), folder / f"{world_size}_{rank}.pth")
    comm.synchronize()


def in_processes(
    work: Callable[[], Any], world_sizes: tuple[int, ...], folder: Path
) -> dict[int, list[Any]]:
    """What ``work()`` returns in each process, by the number of processes and rank.

    Args:
        work: a function of a module, which asks ``comm`` where it is; returns tensors and numbers.
        world_sizes: numbers of processes; all groups run at the same time.
        folder: for the results.
    """
    processes = [
        CONTEXT.Process(target=_member, args=(work, rank, size, folder), daemon=True)
        for size in world_sizes
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60 * MINUTES)
        assert process.exitcode == 0, f"{process} of {work}"
    return {
        size: [torch.load(folder / f"{size}_{rank}.pth", weights_only=True) for rank in range(size)]
        for size in world_sizes
    }
