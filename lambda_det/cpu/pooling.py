"""ROIAlign in float32 at least, and on all threads of a CPU as the layer behind it.

Its kernel is native/roi_align.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from detectron2.layers import ROIAlign
from detectron2.modeling.roi_heads import FastRCNNConvFCHead
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.native import (
    call,
    is_recorded,
    layout_of,
    longs,
    missing,
    new_map,
    pixels,
    readable,
)
from lambda_det.native.calls import differentiable_once, is_hooked

_MULTIPLE = 16  # the kernel in C++ reads whole vectors of channels
_ROWS = 512  # from this number of boxes on, laying out a linear layer's weights pays


def patch_pooling(model: nn.Module, on: bool = True) -> None:
    """Let every ROIAlign of ``model`` compute in float32 at least, and by our kernel on a CPU.

    The output keeps the dtype of the features. Detectron2 rounds boxes to that dtype. bfloat16
    knows only every fourth whole number between 512 and 1024, so boxes in a large image would move
    by up to 2 pixels; in float16 by up to half a pixel.

    torchvision takes one thread and no vectors, a tenth of a training step on two cores. It stays
    for other numbers of channels than multiples of 16, in graphs, and without a compiler.

    Args:
        model: is changed.
        on: False gives them back what they were.
    """
    others = {ROIAlign: _ROIAlign} if on else {_ROIAlign: ROIAlign}
    for module in model.modules():
        module.__class__ = others.get(type(module), type(module))


class _ROIAlign(ROIAlign):
    def forward(self, input: Tensor, rois: Tensor) -> Tensor:
        """Features [B, C, H, W] and boxes [K, 5] give [K, C, h, w]."""
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        rois = rois.to(x.dtype)
        if is_recorded() or not _pays(x, rois):  # graphs have torchvision's operator
            return super().forward(x, rois).to(input.dtype)
        return _Pooled.apply(x, *self._grid(rois), self.output_size).to(input.dtype)

    def _grid(self, rois: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each box's image [K], and its start, size of a bin and points in a bin [K, 2] (x, y)."""
        # As torchvision computes them: the number of points jumps with the last digit of a side
        corners = rois[:, 1:] * self.spatial_scale - (0.5 if self.aligned else 0.0)
        start, sides = corners[:, :2], corners[:, 2:] - corners[:, :2]
        if not self.aligned:
            sides = sides.clamp(min=1)
        bins = sides / sides.new_tensor(self.output_size[::-1])
        points = bins.ceil() if self.sampling_ratio <= 0 else bins.new_tensor(self.sampling_ratio)
        points = points.nan_to_num(0, 0, 0).expand_as(bins).long()  # infinite boxes have none
        return rois[:, 0].long(), *(x.contiguous() for x in (start, bins, points))


def _pays(x: Tensor, rois: Tensor) -> bool:
    if not readable(x, rois) or x.dim() != 4 or rois.shape[1:] != (5,):
        return False
    wide = x.dtype in (torch.float32, torch.float64)
    return wide and x.shape[1] % _MULTIPLE == 0 and missing() is None


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        image: Tensor,
        start: Tensor,
        bins: Tensor,
        points: Tensor,
        size: tuple[int, int],
    ) -> Tensor:
        """[B, C, H, W] to [K, C, h, w], in the layout of the input."""
        ctx.shape, ctx.layout = x.shape, layout_of(x)
        ctx.save_for_backward(image, start, bins, points)
        output = new_map(x, len(image), x.shape[1], *size)
        boxes = image, start, bins, points
        call("pool", x.dtype, _sizes(x.shape, output), pixels(x), *boxes, pixels(output))
        return output.contiguous(memory_format=ctx.layout)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x = new_map(grad, *ctx.shape).zero_()
        sizes = _sizes(ctx.shape, grad)
        call("pool_gradient", grad.dtype, sizes, pixels(grad), *ctx.saved_tensors, pixels(of_x))
        return (of_x.contiguous(memory_format=ctx.layout), *[None] * 5)


def _sizes(shape: torch.Size, pooled: Tensor) -> Any:
    batch, channels, height, width = shape
    return longs((batch, height, width, channels, len(pooled), *pooled.shape[2:]))


def convolve_pooled(model: nn.Module, on: bool = True) -> None:
    """Let the first linear layers of the box heads in ``model`` be convolutions of whole maps.

    oneDNN convolves with AVX-512 and without a copy of the maps, in 0.4 of the time that MKL takes,
    or 0.6 with the weights laid out anew each time. Without AVX-512 it would need up to eight times
    as long.

    Args:
        model: is changed.
        on: False gives them back what they were.
    """
    if on and not without_mkl():
        return
    for head in model.modules():
        if type(head) is not FastRCNNConvFCHead or not head.fcs:
            continue
        if on and (is_hooked(head.flatten) or is_hooked(head.fc1)):
            continue  # the hooks expect vectors
        if type(head.fc1) is (nn.Linear if on else _ConvolvedLinear):
            head.flatten = nn.Identity() if on else nn.Flatten()
            head.fc1.__class__ = _ConvolvedLinear if on else nn.Linear


def without_mkl() -> bool:
    """Whether the processor has vectors that MKL does not use because Intel did not make it."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


class _ConvolvedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        """Maps [K, C, h, w] give [K, C']; PyTorch's layer computes anything else."""
        if x.dim() != 4 or (not is_recorded() and x.shape[-1] == self.in_features):
            return super().forward(x)
        if is_recorded() or not self._pays(x):
            return super().forward(x.flatten(1))
        weight = self.weight.view(len(self.weight), *x.shape[1:])
        weight = weight.contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, weight, self.bias).flatten(1)

    def _pays(self, x: Tensor) -> bool:
        plain = readable(x, self.weight) and not torch.is_autocast_enabled("cpu")
        wide = x.dtype == torch.float32 and len(x) >= _ROWS
        return plain and wide and without_mkl()
