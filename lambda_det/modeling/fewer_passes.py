"""Layers of the networks in fewer passes over their maps, on a GPU.

There most layers take the time in which their maps are read and written. What is here computes the
same as the modules that it stands for, up to rounding, and rounds less often. Measured on an H200,
batch 8, bfloat16, channels last, forward and backward: squeeze-and-excitation of 256 channels at
256x256 took 2.33 ms as modules and 1.55 ms as a function of such operators; average pooling and
1x1 convolution from 256 to 512 channels took 3.35 ms, and 0.85 ms as one convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.foundation import Conv2d
from lambda_det.native import calls

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def can_join(x: Tensor, *modules: nn.Module) -> bool:
    """Whether what modules compute of a map may be computed in another way, without calling them.

    That is on a GPU, operator by operator, where no hook waits for the call.
    """
    return calls.is_eager_on_gpu(x) and not any(map(calls.is_hooked, modules))


def rescale(x: Tensor, reduce: nn.Conv2d, expand: nn.Conv2d) -> Tensor:
    """Squeeze-and-excitation of a map [B, C, H, W] by two 1x1 convolutions, ReLU between them.

    Means, scales and the gradients of both are computed in float32 at least. The gradients by the
    means and by the product are added into one map, which is written once. Counted in passes over a
    map, the forward pass takes three and the backward pass six.
    """
    return Rescale.apply(x, reduce.weight, reduce.bias, expand.weight, expand.bias)


class Rescale(torch.autograd.Function):
    """:func:`rescale` of tensors: map [B, C, H, W], kernels [R, C, 1, 1], [C, R, 1, 1], biases."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, reduce: Tensor, reduce_bias: Tensor, expand: Tensor, bias: Tensor
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y, *inner = _rescaled(x, reduce, reduce_bias, expand, bias)
        ctx.save_for_backward(x, reduce, reduce_bias, expand, bias, *inner)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, inner = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        with torch.autocast(grad.device.type, enabled=False):
            if torch.is_grad_enabled():  # a gradient of the gradient is wanted
                return _differentiable_gradients(grad, inputs, ctx.needs_input_grad)
            return rescale_gradients(grad, *inputs, *inner)


def _rescaled(
    x: Tensor, reduce: Tensor, reduce_bias: Tensor, expand: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rescaled map, and means [B, C], the inner layer [B, R] and scales [B, C] in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    means = x.mean((2, 3), dtype=wide)
    inner = torch.addmm(reduce_bias.to(wide), means, reduce.to(wide).flatten(1).mT).relu_()
    scales = torch.addmm(bias.to(wide), inner, expand.to(wide).flatten(1).mT).sigmoid_()
    return x * _over_map(scales, x), means, inner, scales


def rescale_gradients(
    grad: Tensor,
    x: Tensor,
    reduce: Tensor,
    reduce_bias: Tensor,
    expand: Tensor,
    bias: Tensor,
    means: Tensor,
    inner: Tensor,
    scales: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the map, both kernels and both biases, each like what it belongs to.

    Args:
        grad: of the rescaled map.
        x, reduce, reduce_bias, expand, bias: as in :class:`Rescale`.
        means, inner, scales: as :func:`_rescaled` gives them.
    """
    wide = scales.dtype
    of_logits = (grad * x).sum((2, 3), dtype=wide)
    of_logits = torch.ops.aten.sigmoid_backward(of_logits, scales)
    of_inner = of_logits @ expand.to(wide).flatten(1)
    of_inner = torch.ops.aten.threshold_backward(of_inner, inner, 0)
    of_means = of_inner @ reduce.to(wide).flatten(1)
    of_pixel = of_means / (x.shape[2] * x.shape[3])
    return (
        torch.addcmul(_over_map(of_pixel, x), grad, _over_map(scales, x)),
        (of_inner.mT @ means).view_as(reduce).to(reduce.dtype),
        of_inner.sum(0).to(reduce_bias.dtype),
        (of_logits.mT @ inner).view_as(expand).to(expand.dtype),
        of_logits.sum(0).to(bias.dtype),
    )


def _over_map(numbers: Tensor, x: Tensor) -> Tensor:
    """Numbers [B, C] in the dtype of a map [B, C, H, W], as [B, C, 1, 1]."""
    return numbers.to(x.dtype)[..., None, None]


def _differentiable_gradients(
    grad: Tensor, inputs: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    wanted = [one for one, is_needed in zip(inputs, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(_rescaled(*inputs)[0], wanted, grad, create_graph=True))
    return tuple(next(found) if is_needed else None for is_needed in needed)


def can_join_pooling(x: Tensor, pool: nn.Module, conv: nn.Module) -> bool:
    """Whether :func:`convolve_averages` may stand for an average pooling and a 1x1 convolution, and
    pays.

    It has four times the products. In 16 bits these take less time than the passes that it saves.
    """
    if x.dtype not in _LOW_PRECISION or not can_join(x, pool, conv):
        return False
    halves = type(pool) is nn.AvgPool2d and pool.kernel_size == 2
    return halves and isinstance(conv, Conv2d) and conv.activation is None


def convolve_averages(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A 1x1 convolution of the averages over 2x2 positions, as one convolution of stride 2.

    At an odd side the last average is over the positions that there are, as in
    ``AvgPool2d(2, ceil_mode=True, count_include_pad=False)``.

    Args:
        x: a map [B, C, H, W].
        weight: [C', C, 1, 1].
        bias: [C'], or None.

    Returns:
        [B, C', ceil(H / 2), ceil(W / 2)]
    """
    if x.shape[2] % 2:  # the average of a row and its copy is the row
        x = torch.cat([x, x[:, :, -1:]], 2)
    if x.shape[3] % 2:
        x = torch.cat([x, x[..., -1:]], 3)
    is_last = x.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if is_last else torch.contiguous_format
    weight = (weight / 4).expand(-1, -1, 2, 2).contiguous(memory_format=layout)
    return F.conv2d(x, weight, bias, stride=2)
