"""The classes from which networks are built: Detectron2's, or stand-ins where it is not installed.

The stand-ins have the same names of parameters and compute the same. With them the layers and the
classifiers work without Detectron2; detectors need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torchvision
from torch import Tensor, nn

from lambda_det.errors import importing_detectron2

__all__ = [
    "Backbone",
    "CNNBlockBase",
    "Conv2d",
    "FrozenBatchNorm2d",
    "ShapeSpec",
    "get_norm",
]


try:
    with importing_detectron2():
        from detectron2.layers import CNNBlockBase, Conv2d, FrozenBatchNorm2d, ShapeSpec, get_norm
        from detectron2.modeling import Backbone
except ImportError:

    @dataclass
    class ShapeSpec:
        """Channels of a map, and its stride in pixels of the image."""

        channels: int | None = None
        height: int | None = None
        width: int | None = None
        stride: int | None = None

    class Backbone(nn.Module):
        """A network whose outputs are maps by name."""

        size_divisibility = 0

    class Conv2d(nn.Conv2d):
        """A convolution, then ``norm``, then ``activation``; each of these may be None."""

        def __init__(self, *args: Any, norm: Any = None, activation: Any = None, **named: Any):
            super().__init__(*args, **named)
            self.norm = norm
            self.activation = activation

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if self.norm is not None:
                x = self.norm(x)
            return x if self.activation is None else self.activation(x)

    class FrozenBatchNorm2d(torchvision.ops.FrozenBatchNorm2d):
        """A batch norm whose statistics and parameters are buffers."""

        def __init__(self, num_features: int, eps: float = 1e-5) -> None:
            super().__init__(num_features, eps)
            self.running_var -= eps  # it changes nothing at first, as in Detectron2

        @classmethod
        def convert_frozen_batchnorm(cls, module: nn.Module) -> nn.Module:
            """Replace the batch norms within ``module``; returns it, or its replacement."""
            if isinstance(module, (nn.BatchNorm2d, nn.SyncBatchNorm)):
                frozen = cls(module.num_features, module.eps)
                frozen.load_state_dict(module.state_dict())
                return frozen
            for name, child in module.named_children():
                setattr(module, name, cls.convert_frozen_batchnorm(child))
            return module

    class CNNBlockBase(nn.Module):
        """A block of known channels and stride."""

        def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
            super().__init__()
            self.in_channels = in_channels
            self.out_channels = out_channels
            self.stride = stride

    _NORMS: dict[str, Callable[[int], nn.Module]] = {
        "BN": nn.BatchNorm2d,
        "SyncBN": nn.SyncBatchNorm,
        "nnSyncBN": nn.SyncBatchNorm,
        "FrozenBN": FrozenBatchNorm2d,
        "GN": lambda channels: nn.GroupNorm(32, channels),
    }

    def get_norm(norm: str | Callable[[int], nn.Module], channels: int) -> nn.Module | None:
        """The norm of that name for a number of channels; None for "".

        Raises:
            KeyError: there is no such norm.
        """
        if norm == "":
            return None
        return (_NORMS[norm] if isinstance(norm, str) else norm)(channels)
