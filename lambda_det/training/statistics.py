"""Weights and statistics for evaluation: the average of the weights, and new estimates of batch
norm's statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import torch
from detectron2.utils import comm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torchvision.ops import StochasticDepth

from lambda_det.distributed.connection import join, join_processes
from lambda_det.distributed.signals import leave_if_asked
from lambda_det.training.precision import Precision


class ExponentialAverage:
    """Averages a model's weights step by step: w' <- d w' + (1 - d) w.

    After n steps d = min(decay, (1 + n) / (10 + n)), as TensorFlow has it with ``num_updates``.
    A constant 0.9999 would keep 6 % of the random initial weights after the 28k steps of 90 epochs.
    Running statistics are averaged alike.

    PyTorch's ``AveragedModel`` counts in a tensor, so the ramp would wait for the GPU at each step.
    timm's ``ModelEmaV3`` updates a parameter that layers share once for each of them, and does not
    keep the count in its state.

    Args:
        model: what is trained.
        average: a copy of it, which from now on holds the average.
        decay: the limit of d.
    """

    def __init__(self, model: nn.Module, average: nn.Module, decay: float) -> None:
        self._model = model
        self.average = average.requires_grad_(False).eval()
        self.decay = decay
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are now into the average."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages, values = [], []
        # not over the state dict, which has a shared parameter several times
        for average, value in zip(_tensors(self.average), _tensors(self._model), strict=True):
            if average.is_floating_point():
                averages.append(average)
                values.append(value)
            else:
                average.copy_(value)
        torch._foreach_lerp_(averages, values, 1 - decay)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.average.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state["model"])
        self.updates = state["updates"]


def _tensors(model: nn.Module) -> chain[torch.Tensor]:
    return chain(model.parameters(), model.buffers())


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The batch norms of a model that keep running statistics, without frozen ones."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return [norm for norm in norms if norm.track_running_stats]


def images_of_norms(model: nn.Module, images: int) -> dict[str, int]:
    """The number of images by which batch norms normalise in training, by their kind.

    Args:
        model: without wrappers.
        images: of one forward pass of all processes together.

    Returns:
        Images at "one process" for norms that see only these, and at "all processes" for
        synchronised ones. A kind that the model lacks is left out; frozen norms are of neither.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    synchronised = [
        isinstance(norm, nn.SyncBatchNorm) or getattr(norm, "is_synchronised", False)
        for norm in norms
    ]
    of_process = {} if all(synchronised) else {"one process": images // comm.get_world_size()}
    return of_process | ({"all processes": images} if any(synchronised) else {})


@torch.no_grad()
def estimate_statistics(
    models: Sequence[nn.Module], batches: Iterable[Any], count: int, precision: Precision
) -> None:
    """Set the running statistics of all batch norms to mean and variance over ``count`` batches.

    A running average belongs to weights of many steps ago, and averaged weights have no running
    average (Wu and Johnson, 2021). The paper's "decay 0.9999" (a momentum of 1e-4 in PyTorch) would
    lag by 10k steps.

    The models compute as in training, so that a detector's heads see the proposals of training,
    but without dropout and stochastic depth. fvcore's ``update_bn_stats`` is the same for one
    process. With several processes it leaves different statistics on each, and takes the
    variance of a synchronised norm for the variance of the process's own images.

    Args:
        models: each sees the same batches; left in evaluation mode.
        batches: of training images; each process has others.
        count: batches on each process.
        precision: of the forward pass.

    Raises:
        StopRequest: a signal asked a process to stop.
    """
    norms = [norm for model in models for norm in batch_norms(model)]
    # Mean [C], variance [C] and count [1] of each batch; none at first
    of_batches = {
        norm: [moments(norm.running_mean.new_empty(0, norm.num_features).double())]
        for norm in norms
    }

    def add(norm: nn.Module, inputs: tuple[Tensor]) -> None:
        of_batch = moments(inputs[0].float())  # none in a detector's head without proposals
        of_batches[norm].append([value.double() for value in of_batch])

    hooks = [norm.register_forward_pre_hook(add) for norm in norms]
    for model in models:
        model.train()
        for module in model.modules():
            if isinstance(module, (_DropoutNd, StochasticDepth)):
                module.eval()
    try:
        with precision.autocast():
            for batch in islice(batches, count):
                # In each batch, because a synchronised norm waits there for the other processes
                leave_if_asked()
                for model in models:
                    model(batch)
    finally:
        for hook in hooks:
            hook.remove()
        for model in models:
            model.eval()
    for norm, values in of_batches.items():
        mean, var, count = join(*map(torch.stack, zip(*values, strict=True)))
        if comm.get_world_size() > 1:
            mean, var, count = join_processes(mean, var, count)
        if count:
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [C], biased variance [C] and count [1] of the values of each channel of x [B, C, ...].

    Without values all are 0.
    """
    count = x.new_full((1,), x.numel() // x.shape[1])
    if x.numel() == 0:
        return (*x.new_zeros(2, x.shape[1]), count)
    var, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    return mean, var, count
