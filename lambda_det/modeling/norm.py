"""Synchronised batch normalisation with float32 statistics, for any device and any batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from detectron2.layers import NaiveSyncBatchNorm
from detectron2.utils import comm
from torch import Tensor, nn

from lambda_det.cpu.folding import FOLDABLE_NORMS
from lambda_det.distributed.connection import join_processes
from lambda_det.native.calls import differentiable_once, put_in
from lambda_det.training.statistics import moments

_PER_CHANNEL = (0, 2, 3)


def _over_channels(vector: Tensor) -> Tensor:
    return vector.reshape(1, -1, 1, 1)


@torch.no_grad()
def move_running_statistics(norm: nn.BatchNorm2d, mean: Tensor, var: Tensor, count: Tensor) -> None:
    """Update running statistics; an empty batch changes nothing.

    The host does not wait for the device.
    """
    seen = count.clamp(max=1)
    norm.num_batches_tracked += seen.to(norm.num_batches_tracked.dtype)
    if norm.momentum is None:
        factor = seen / norm.num_batches_tracked.clamp(min=1)
    else:
        factor = seen * norm.momentum
    unbiased = var * (count / (count - 1).clamp(min=1))
    norm.running_mean += factor * (mean - norm.running_mean)
    norm.running_var += factor * (unbiased - norm.running_var)


class _SyncBatchNorm(torch.autograd.Function):
    """Normalise with statistics over all processes; both passes hold one collective call."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, var, count = join_processes(*moments(wide))
        inv_std = torch.rsqrt(var + eps)
        y = (wide - _over_channels(mean)) * _over_channels(inv_std)
        if weight is not None:
            y = y * _over_channels(weight) + _over_channels(bias)
        ctx.save_for_backward(x, weight, mean, inv_std, count)
        ctx.mark_non_differentiable(mean, var, count)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    @differentiable_once
    def backward(ctx, grad: Tensor, *_):
        x, weight, mean, inv_std, count = ctx.saved_tensors
        grad = grad.to(mean.dtype)
        normalised = (x.to(mean.dtype) - _over_channels(mean)) * _over_channels(inv_std)
        local = torch.stack([grad.sum(_PER_CHANNEL), (grad * normalised).sum(_PER_CHANNEL)])
        total = local.clone()
        dist.all_reduce(total)
        grad_mean, projection = (total / count.clamp(min=1)).unbind()
        grad_x = grad - _over_channels(grad_mean) - normalised * _over_channels(projection)
        scale = inv_std if weight is None else inv_std * weight
        grad_x = (grad_x * _over_channels(scale)).to(x.dtype)
        if weight is None:
            return grad_x, None, None, None
        # The parameters' gradients stay local: DistributedDataParallel takes their mean, as it does
        # for every other layer
        grad_bias, grad_weight = local.to(weight.dtype).unbind()
        return grad_x, grad_weight, grad_bias, None


class SyncBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with the statistics of the values of all processes together.

    Input and output are [N, C, H, W] of the same dtype. Detectron2's NaiveSyncBatchNorm takes
    E[x^2] - E[x]^2 in bfloat16 as it comes and weighs processes by N at best; here the statistics
    are at least float32 whatever the input's dtype, and every value counts once. Torch's
    SyncBatchNorm has no CPU implementation and refuses empty inputs.

    Empty inputs (N = 0, as in heads on images without objects) are fine on some or on all
    processes: the output is empty and part of the graph, and where no process has a value, the
    running statistics stay as they are. All processes must run forward and backward together.

    With one process it computes as ``nn.BatchNorm2d``. It is always an instance of that class, so
    freezing and precise batch norm find it. The state dict is the same.
    """

    is_synchronised = True

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        by_batch = self.training or self.running_mean is None
        if by_batch and comm.get_world_size() > 1:
            y, mean, var, count = _SyncBatchNorm.apply(input, self.weight, self.bias, self.eps)
            if self.training and self.running_mean is not None:
                move_running_statistics(self, mean, var, count)
            return y
        if input.numel() == 0:
            if self.weight is None:
                return input.clone()
            # Keeps the parameters in the graph: DistributedDataParallel waits for each of them
            y = input * _over_channels(self.weight) + _over_channels(self.bias)
            return y.to(input.dtype)
        return super().forward(input)


FOLDABLE_NORMS.add(SyncBatchNorm2d)


def convert_sync_norms(model: nn.Module, device: str | torch.device) -> nn.Module:
    """Put :class:`SyncBatchNorm2d` where another synchronised norm would be wrong.

    ``NaiveSyncBatchNorm`` is always replaced. ``torch.nn.SyncBatchNorm`` is replaced except on
    CUDA, where its fused kernel keeps float32 statistics already. Parameters and buffers are
    handed over as they are, so an optimiser that holds them goes on working.

    Args:
        model: changed in place, unless it is itself such a norm.
        device: where the model will run.

    Returns:
        The model, or its replacement.
    """
    kinds = (NaiveSyncBatchNorm,)
    if torch.device(device).type != "cuda":
        kinds += (nn.SyncBatchNorm,)
    return put_in(model, {one: _like(one) for one in model.modules() if isinstance(one, kinds)})


def _like(norm: NaiveSyncBatchNorm | nn.SyncBatchNorm) -> SyncBatchNorm2d:
    """Ours with the parameters, buffers and settings of another norm."""
    ours = SyncBatchNorm2d(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats
    )
    ours._parameters, ours._buffers = norm._parameters, norm._buffers
    return ours.train(norm.training)
