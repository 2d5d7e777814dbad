"""Batch norm statistics for weights as they are, before they are evaluated or exported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch
import torch.distributed as dist
from detectron2.utils import comm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lambda_det.training.precision import Precision

__all__ = ["estimate_statistics"]


@torch.no_grad()
def estimate_statistics(
    models: Sequence[nn.Module],
    batches: Iterable[Mapping[str, Tensor]],
    count: int,
    precision: Precision,
) -> None:
    """Set the running statistics of all batch norms to mean and variance over ``count`` batches.

    A running average belongs to weights of many steps ago, and an average of weights has none of
    its own (Wu and Johnson, 2021). The paper's "decay 0.9999" (a momentum of 1e-4 in PyTorch)
    would lag by 10k steps.

    fvcore's ``update_bn_stats`` is the same for one process. With several it leaves each with
    statistics of its own, and takes a synchronised norm's variance for that of its own images.

    Args:
        models: each sees the same batches; left in evaluation mode.
        batches: images of the training data; each process has others.
        count: batches on each process.
        precision: of the forward pass.
    """
    for model in models:
        model.eval()  # dropout and stochastic depth stay off, as they will be
    norms = [part for model in models for part in model.modules() if isinstance(part, _BatchNorm)]
    moments = {norm: _Moments(norm) for norm in norms if norm.track_running_stats}
    hooks = [norm.register_forward_pre_hook(moments[norm].add) for norm in moments]
    for norm in moments:
        norm.train()  # the layers after it see what they see in training
    try:
        with precision.autocast():
            for batch in islice(batches, count):
                for model in models:
                    model(batch)
    finally:
        for hook in hooks:
            hook.remove()
        for model in models:
            model.eval()
    for norm, moment in moments.items():
        mean, var = moment.over_all_processes()
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(var)


class _Moments:
    """Count, mean and sum of squared deviations of the values of each channel.

    Batches are joined as Chan, Golub and LeVeque (1983) do: E[x^2] - E[x]^2 would lose the variance
    of values far from zero.
    """

    def __init__(self, norm: nn.Module) -> None:
        self._count = 0
        self._mean = torch.zeros_like(norm.running_mean, dtype=torch.float64)
        self._squares = torch.zeros_like(self._mean)

    def add(self, norm: nn.Module, inputs: tuple[Tensor]) -> None:
        """Take in the values [B, C, ...] that reach a norm; the form of a forward pre-hook."""
        x = inputs[0].float()
        dims = [0, *range(2, x.dim())]
        var, mean = torch.var_mean(x, dims, correction=0)
        self._join(x.numel() // x.shape[1], mean.double(), var.double())

    def _join(self, count: int, mean: Tensor, var: Tensor) -> None:
        total = self._count + count
        difference = mean - self._mean
        self._mean += difference * (count / total)
        self._squares += count * var + difference.square() * (self._count * count / total)
        self._count = total

    def over_all_processes(self) -> tuple[Tensor, Tensor]:
        """Mean and variance [C] of all values; call it on all processes alike."""
        if comm.get_world_size() > 1:
            table = self._mean.new_zeros(comm.get_world_size(), 2, len(self._mean))
            table[comm.get_rank()] = torch.stack([self._mean, self._squares])
            dist.all_reduce(table)  # an all-gather that every backend knows
            count, self._count = self._count, 0  # each process has as many images
            self._mean, self._squares = torch.zeros_like(self._mean), torch.zeros_like(self._mean)
            for mean, squares in table:
                self._join(count, mean, squares / count)
        return self._mean, self._squares / self._count
