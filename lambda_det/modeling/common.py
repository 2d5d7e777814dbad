"""What the networks have in common: convolutions with norms, and stages whose maps have names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.config import BELOW_1, check
from lambda_det.errors import ConfigError
from lambda_det.foundation import Backbone, Conv2d, FrozenBatchNorm2d, ShapeSpec, get_norm

Norm = str | Callable[[int], nn.Module]
Activation = Callable[[Tensor], Tensor]


def conv_norm(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    *,
    norm: Norm,
    stride: int = 1,
    dilation: int = 1,
    activation: Activation | None,
) -> Conv2d:
    """A convolution without bias, then norm, then activation; initialised as Detectron2's.

    Args:
        in_channels: of the input [B, in_channels, H, W].
        out_channels: of the output [B, out_channels, ceil(H / stride), ceil(W / stride)].
        kernel_size: the odd side of the kernel; the padding keeps the size of the map.
        norm: a name that Detectron2's ``get_norm`` knows, or a function from channels to a module.
        stride: of the convolution.
        dilation: of its kernel.
        activation: is applied last; None for none.
    """
    conv = Conv2d(
        in_channels,
        out_channels,
        kernel_size,
        stride=stride,
        padding=kernel_size // 2 * dilation,
        dilation=dilation,
        bias=False,
        norm=get_norm(norm, out_channels),
        activation=activation,
    )
    initialise(conv)
    return conv


def initialise(conv: nn.Conv2d) -> None:
    """Initialise a convolution as He et al. (2015) do, by the number of its outputs."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)


class GlobalAveragePool(nn.Module):
    """Average the maps of [B, C, H, W]: [B, C, 1, 1]."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x.mean((2, 3), keepdim=True)
        # The gradient of a sum is a view. The gradient of a mean is a contiguous map, which adds
        # slowly to one that is channels last
        count = x.shape[2] * x.shape[3]
        if x.dtype == torch.float16:  # whose sums overflow
            return (x / count).sum((2, 3), keepdim=True)
        return x.sum((2, 3), keepdim=True) / count


class SqueezeExcitation(nn.Module):
    """Squeeze-and-excitation, whose inner layer has 1 / ``ratio`` of the block's output width."""

    def __init__(self, channels: int, ratio: int = 4) -> None:
        super().__init__()
        self.squeeze = GlobalAveragePool()
        self.reduce = Conv2d(channels, channels // ratio, 1, activation=F.relu_)
        self.expand = Conv2d(channels // ratio, channels, 1)
        initialise(self.reduce)
        initialise(self.expand)

    def forward(self, x: Tensor, means: Tensor | None = None) -> Tensor:
        """Rescale the channels of [B, C, H, W]; their means [B, C, 1, 1] may be given."""
        means = self.squeeze(x) if means is None else means
        return x * torch.sigmoid(self.expand(self.reduce(means)))


class StagedBackbone(Backbone):
    """A network of a stem and stages. Their maps are its features, by their names.

    Args:
        modules: "stem" and the stages by their names, in their order.
        shapes: channels and stride of the map that each of them gives; also of stages left out.
        out_features: "stem", stages or "linear"; None for the last stage.
        num_classes: also make the classifier ``linear``, with this number of classes.
        dropout: probability of dropping a feature before ``linear``.
        freeze_at: 1 freezes the stem, 2 the stem and the first stage, and so on.

    Raises:
        ConfigError: there is no such feature, or ``dropout`` is not a probability.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        shapes: Mapping[str, ShapeSpec],
        *,
        out_features: Sequence[str] | None,
        num_classes: int | None,
        dropout: float,
        freeze_at: int,
    ) -> None:
        super().__init__()
        check("DROPOUT", dropout, BELOW_1)  # of leaving a feature out
        for name, module in modules.items():
            self.add_module(name, module)
        self.stage_names = tuple(name for name in modules if name != "stem")
        self._shapes = shapes
        available = list(shapes)
        if num_classes is not None:
            available.append("linear")
            self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
            self.linear = nn.Linear(shapes[[*modules][-1]].channels, num_classes)
            nn.init.normal_(self.linear.weight, std=0.01)  # Goyal et al. (2017), section 5.1
            self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self._out_features = list(available[-1:] if out_features is None else out_features)
        if not self._out_features or not set(self._out_features) <= set(available):
            raise ConfigError(
                f"OUT_FEATURES is {self._out_features}; name some of {', '.join(available)}."
            )
        self.freeze(freeze_at)

    def freeze(self, freeze_at: int) -> None:
        """Freeze the stem and stages up to number ``freeze_at``: the stem is 1, res2 is 2.

        A number below 0 freezes none, as in Detectron2.
        """
        for name in ("stem", *self.stage_names)[: max(freeze_at, 0)]:
            frozen = getattr(self, name).requires_grad_(False)
            setattr(self, name, FrozenBatchNorm2d.convert_frozen_batchnorm(frozen))

    def output_shape(self) -> dict[str, ShapeSpec]:
        """Channels and stride of each map of ``out_features``."""
        return {name: self._shapes[name] for name in self._out_features if name != "linear"}

    def outputs(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """The maps that were asked for, and the classifier's logits of the last map."""
        if "linear" in self._out_features:
            pooled = torch.flatten(self.avgpool([*features.values()][-1]), 1)
            features["linear"] = self.linear(self.dropout(pooled))
        return {name: features[name] for name in self._out_features}


@contextmanager
def kept_statistics(module: nn.Module) -> Iterator[None]:
    """Keep running statistics as they are, so that a block computed twice counts its batch once."""
    norms = [one for one in module.modules() if getattr(one, "running_mean", None) is not None]
    kept = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    try:
        yield
    finally:
        with torch.no_grad():
            for norm, buffers in zip(norms, kept, strict=True):
                for name, buffer in norm.named_buffers():
                    buffer.copy_(buffers[name])
