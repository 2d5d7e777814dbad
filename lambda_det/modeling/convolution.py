"""Detectron2's convolution with its norm, within the range of float16."""

from __future__ import annotations

from detectron2.layers import Conv2d
from torch import Tensor, nn

from lambda_det.layers.saturation import saturate

__all__ = ["SaturatingConv2d"]


class SaturatingConv2d(Conv2d):
    """Detectron2's ``Conv2d``, whose sums and norms end at 65504 in float16 instead of in NaN.

    In other dtypes it is the same to the bit.
    """

    def forward(self, x: Tensor) -> Tensor:
        # What Detectron2 does before, for empty inputs, is for PyTorch before 1.6
        x = saturate(nn.Conv2d.forward(self, x))
        if self.norm is not None:
            x = saturate(self.norm(x))
        return x if self.activation is None else self.activation(x)
