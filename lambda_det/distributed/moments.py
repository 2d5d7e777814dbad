"""Mean and variance over the values of all processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from detectron2.utils import comm
from torch import Tensor

__all__ = ["join", "join_processes"]


def join(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and count of all values, from the same of groups of them.

    They are weighted by count as in Chan, Golub and LeVeque (1983), which forms no difference of
    large squares.

    Args:
        means: [groups, C].
        variances: [groups, C], biased.
        counts: values per channel [groups, 1], which may be 0.
    """
    count = counts.sum()
    share = counts / count.clamp(min=1)
    mean = (share * means).sum(0)
    return mean, (share * (variances + (means - mean).square())).sum(0), count


def join_processes(mean: Tensor, var: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`join` of the values of all processes, by one collective call.

    Args:
        mean: [C], of this process.
        var: [C], biased.
        count: values per channel [], which may be 0.
    """
    local = torch.cat([mean, var, count[None]])
    # A sum of rows that are zero elsewhere is an all-gather that every backend knows
    table = local.new_zeros(comm.get_world_size(), len(local))
    table[comm.get_rank()] = local
    dist.all_reduce(table)
    return join(*table.split([len(mean), len(mean), 1], dim=1))
