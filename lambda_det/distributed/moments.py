"""Mean and variance over the values of all processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from detectron2.utils import comm
from torch import Tensor

__all__ = ["join_processes"]


def join_processes(mean: Tensor, var: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics of all processes' values taken together, by one collective call.

    They are joined by count as Chan, Golub and LeVeque (1983) do, so that no difference of large
    squares is formed anywhere.

    Args:
        mean: [C], of this process.
        var: [C], biased.
        count: values per channel [], which may be 0.
    """
    channels = len(mean)
    local = torch.cat([mean, var, count[None]])
    # A sum of rows that are zero elsewhere is an all-gather that every backend knows
    table = local.new_zeros(comm.get_world_size(), len(local))
    table[comm.get_rank()] = local
    dist.all_reduce(table)
    means, variances, counts = table.split([channels, channels, 1], dim=1)  # [processes, C or 1]
    count = counts.sum()
    share = counts / count.clamp(min=1)
    mean = (share * means).sum(0)
    var = (share * (variances + (means - mean).square())).sum(0)
    return mean, var, count
