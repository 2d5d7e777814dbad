"""ROIAlign in float32 under mixed precision, and on all threads of a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from detectron2.layers import ROIAlign
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchvision.ops import roi_align

__all__ = ["patch_pooling"]

_FEW = 16  # boxes for which threads do not pay
_MOST = 8  # threads: each may start others to fill its part of the result with zeros


def patch_pooling(model: nn.Module, *, in_float32: bool = False) -> None:
    """Let every ROIAlign of ``model`` take all threads on a CPU, with the same result to the bit.

    torchvision's takes one, which is a tenth of a training step on two cores, and more on more.

    Args:
        model: is changed.
        in_float32: compute in float32; the output keeps the dtype of the features. torchvision
            rounds boxes to that dtype. bfloat16 knows only every fourth whole number between 512
            and 1024, so boxes in a large image would move by up to 2 pixels; in float16 by up to
            half a pixel.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) in (ROIAlign, _ROIAlign):
                child = copy.copy(child)
                child.__class__ = _ROIAlign
                child.in_float32 = in_float32
                setattr(parent, name, child)


class _ROIAlign(ROIAlign):
    in_float32: bool

    def forward(self, input: Tensor, rois: Tensor) -> Tensor:
        """Features [B, C, H, W] and boxes [K, 5] give [K, C, h, w]."""
        x = input.float() if self.in_float32 else input
        rois = rois.to(x.dtype)
        # Traced first: the number of boxes is none then
        if torch.jit.is_tracing() or torch.compiler.is_compiling() or not _pays(x, rois):
            return super().forward(x, rois).to(input.dtype)
        threads = min(torch.get_num_threads(), _MOST)
        options = self.output_size, self.spatial_scale, self.sampling_ratio, self.aligned
        return _ByChannels.apply(x, rois, threads, *options).to(input.dtype)


def _pays(x: Tensor, rois: Tensor) -> bool:
    # Other dtypes are autocast's, which a new thread does not know of
    wide = x.dtype in (torch.float32, torch.float64)
    return x.device.type == "cpu" and wide and torch.get_num_threads() > 1 and len(rois) >= _FEW


class _ByChannels(torch.autograd.Function):
    """torchvision's operators, each on a share of the channels: no two write to one place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rois: Tensor,
        threads: int,
        size: tuple[int, int],
        scale: float,
        ratio: int,
        aligned: bool,
    ) -> Tensor:
        ctx.save_for_backward(rois)
        ctx.shape, ctx.threads, ctx.options = x.shape, threads, (size, scale, ratio, aligned)
        return _in_threads(lambda share: roi_align(share, rois, *ctx.options), x, threads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rois,) = ctx.saved_tensors
        (height, width), scale, ratio, aligned = ctx.options
        batch, _, *sides = ctx.shape

        def gradient(share: Tensor) -> Tensor:
            shape = (batch, share.shape[1], *sides)
            return torch.ops.torchvision._roi_align_backward(
                share, rois, scale, height, width, *shape, ratio, aligned
            )

        return (_in_threads(gradient, grad, ctx.threads), *[None] * 6)


def _in_threads(compute: Callable[[Tensor], Tensor], x: Tensor, threads: int) -> Tensor:
    """``compute`` of [N, C, h, w], by shares of the channels."""
    shares = [share.contiguous() for share in x.chunk(threads, dim=1)]

    def without_gradients(share: Tensor) -> Tensor:
        with torch.no_grad():  # a new thread does not know of it
            return compute(share)

    with ThreadPoolExecutor(threads) as pool:
        return torch.cat(list(pool.map(without_gradients, shares)), dim=1)
