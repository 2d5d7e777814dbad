"""The parts of a LambdaResNet: stem, squeeze-and-excitation, and the bottleneck block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from detectron2.layers import CNNBlockBase, get_norm
from detectron2.modeling.backbone.resnet import BasicStem
from fvcore.nn.weight_init import c2_msra_fill
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torchvision.ops import StochasticDepth

from lambda_det.errors import ConfigError
from lambda_det.layers import LambdaLayer
from lambda_det.layers.exporting import is_exporting
from lambda_det.layers.saturation import saturate
from lambda_det.modeling import residual
from lambda_det.modeling.convolution import SaturatingConv2d

Norm = str | Callable[[int], nn.Module]


def check_norm(norm: Norm) -> None:
    """Raise ConfigError where Detectron2 knows no norm of that name."""
    try:
        get_norm(norm, 32)
    except KeyError as error:
        raise ConfigError(
            f"NORM is {norm!r}, which Detectron2 doesn't know; it has BN, SyncBN, FrozenBN, GN, "
            "nnSyncBN, naiveSyncBN, naiveSyncBN_N, LN and '' for none."
        ) from error


def check_probability(name: str, value: float) -> None:
    """Raise ConfigError where a part could never take part in training."""
    if not 0 <= value < 1:
        raise ConfigError(
            f"{name} is {value}, but as the probability of leaving a part out it must be at least "
            "0 and below 1."
        )


def conv_norm(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    *,
    norm: Norm,
    stride: int = 1,
    dilation: int = 1,
    relu: bool = True,
) -> SaturatingConv2d:
    """A convolution without bias, then norm, then perhaps ReLU; initialised as Detectron2's."""
    conv = SaturatingConv2d(
        in_channels,
        out_channels,
        kernel_size,
        stride=stride,
        padding=kernel_size // 2 * dilation,
        dilation=dilation,
        bias=False,
        norm=get_norm(norm, out_channels),
        activation=F.relu_ if relu else None,
    )
    c2_msra_fill(conv)
    return conv


class ResNetRSStem(CNNBlockBase):
    """The stem of ResNet-RS: three 3x3 convolutions, and a strided fourth for the max pooling."""

    def __init__(self, in_channels: int, *, norm: Norm) -> None:
        super().__init__(in_channels, 64, 4)
        self.conv1 = conv_norm(in_channels, 32, 3, norm=norm, stride=2)
        self.conv2 = conv_norm(32, 32, 3, norm=norm)
        self.conv3 = conv_norm(32, 64, 3, norm=norm)
        self.conv4 = conv_norm(64, 64, 3, norm=norm, stride=2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map [B, C, H, W] to [B, 64, ceil(H / 4), ceil(W / 4)]; ``mask`` as in `Bottleneck`."""
        half = subsample_mask(mask, 2)
        x = blank(self.conv1(x), half)
        x = blank(self.conv2(x), half)
        x = blank(self.conv3(x), half)
        return self.conv4(x)


class VanillaStem(BasicStem):
    """The stem of He et al. (2016): a strided 7x7 convolution and max pooling."""

    def __init__(self, in_channels: int, out_channels: int, norm: Norm) -> None:
        super().__init__(in_channels, out_channels, norm)
        self.conv1.__class__ = SaturatingConv2d

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map [B, C, H, W] to [B, 64, ceil(H / 4), ceil(W / 4)]; ``mask`` as in `Bottleneck`."""
        x = F.relu_(self.conv1(x))
        return F.max_pool2d(blank(x, subsample_mask(mask, 2)), 3, stride=2, padding=1)


class SqueezeExcitation(nn.Module):
    """Squeeze-and-excitation with a ratio of 1/4 of the block's output width (ResNet-RS).

    torchvision's module is the same without the mask.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = SaturatingConv2d(channels, channels // 4, 1)
        self.expand = SaturatingConv2d(channels // 4, channels, 1)
        for conv in (self.reduce, self.expand):
            c2_msra_fill(conv)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Rescale the channels of [B, C, H, W]; only positions in mask [B, 1, H, W] count."""
        if mask is None:
            squeezed = x.mean((2, 3), keepdim=True)
        else:
            inside = mask.to(x.dtype)
            # Means, since sums over a large map leave float16's range.
            squeezed = (x * inside).mean((2, 3), keepdim=True) / inside.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.expand(F.relu_(self.reduce(squeezed))))


class Bottleneck(CNNBlockBase):
    """1x1, 3x3 and 1x1 convolution around a shortcut, the 3x3 one possibly a lambda layer.

    Where the block's stride is 2 a 3x3 average pooling follows the lambda layer. The norm and the
    ReLU of the 3x3 convolution stay after it: with N(0, 1) embeddings over 23x23 positions the
    layer's output has a standard deviation near 75 at the start.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        bottleneck_channels: channels between the 1x1 convolutions.
        stride: 1 or 2, at the 3x3 convolution.
        dilation: of the 3x3 convolution, or of the lambda layer's position lambdas.
        norm: a name that Detectron2's ``get_norm`` knows, or a function from channels to a module.
        lambda_options: options of the :class:`LambdaLayer`; None for a 3x3 convolution.
        se: whether squeeze-and-excitation follows the last norm.
        pooled_shortcut: ResNet-D's 2x2 average pooling before the shortcut's 1x1 convolution,
            instead of a stride in it.
        stochastic_depth: probability of leaving the residual branch of an image out in training.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        bottleneck_channels: int,
        stride: int = 1,
        dilation: int = 1,
        norm: Norm = "BN",
        lambda_options: Mapping[str, Any] | None = None,
        se: bool = False,
        pooled_shortcut: bool = True,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__(in_channels, out_channels, stride)
        self.pool_shortcut = pooled_shortcut and stride > 1
        self.shortcut = None
        if in_channels != out_channels or stride > 1:
            self.shortcut = conv_norm(
                in_channels,
                out_channels,
                1,
                norm=norm,
                stride=1 if self.pool_shortcut else stride,
                relu=False,
            )
        self.conv1 = conv_norm(in_channels, bottleneck_channels, 1, norm=norm)
        self.is_lambda = lambda_options is not None
        if lambda_options is not None:
            self.conv2 = LambdaLayer(
                bottleneck_channels,
                dilation=dilation,
                norm=partial(get_norm, norm),
                **lambda_options,
            )
            self.norm2 = get_norm(norm, bottleneck_channels) or nn.Identity()
        else:
            self.conv2 = conv_norm(
                bottleneck_channels,
                bottleneck_channels,
                3,
                norm=norm,
                stride=stride,
                dilation=dilation,
            )
        self.conv3 = conv_norm(bottleneck_channels, out_channels, 1, norm=norm, relu=False)
        self.se = SqueezeExcitation(out_channels) if se else None
        self.drop = StochasticDepth(stochastic_depth, "row") if stochastic_depth else None
        zero_last_norm(self.conv3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map [B, in_channels, H, W] to [B, out_channels, ceil(H / stride), ceil(W / stride)].

        Args:
            x: the input.
            mask: bool [B, 1, H, W], False at padded positions, or None. With it the output at the
                other positions is that of the unpadded image.
        """
        out = blank(self.conv1(x), mask)
        if self.is_lambda:
            out = self.conv2(out, mask)
            if self.stride > 1:
                out = average(blank(out, mask), self.stride)
            out = F.relu_(saturate(self.norm2(out)))
        else:
            out = self.conv2(out)
        kept = self.drop is None or not self.training
        unmasked = mask is None or self.se is None
        if kept and unmasked and residual.covers(self.conv3, self.se, out.device):
            out = nn.Conv2d.forward(self.conv3, out)  # without its norm
            return residual.finish(out, self._shortcut(x, mask), self.conv3.norm, self.se)
        out = self.conv3(out)
        if self.se is not None:
            out = self.se(out, subsample_mask(mask, self.stride))
        if self.drop is not None:
            out = self.drop(out)
        return F.relu_(saturate(out + self._shortcut(x, mask)))

    def _shortcut(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.shortcut is None:
            return x
        return self.shortcut(mean_pool(x, self.stride, mask) if self.pool_shortcut else x)


def zero_last_norm(conv: SaturatingConv2d) -> None:
    """Start a residual branch at zero: gamma = 0 in its last norm (Appendix E.1)."""
    weight = getattr(conv.norm, "weight", None)
    # A frozen norm holds buffers, from a checkpoint; there is nothing to initialise.
    if isinstance(weight, nn.Parameter):
        nn.init.zeros_(weight)


class _Average(torch.autograd.Function):
    """``avg_pool2d``, which keeps its input for a backward pass that reads nothing but its shape.

    That input is 8 MB at the start of c5 at 1024x1024.
    """

    @staticmethod
    def forward(ctx, x: Tensor, *sizes: int) -> Tensor:
        ctx.sizes = [[size, size] for size in sizes]
        ctx.shape, ctx.stride = x.shape, x.stride()
        return F.avg_pool2d(x, *ctx.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        like = grad.new_empty_strided(ctx.shape, ctx.stride)
        grad = torch.ops.aten.avg_pool2d_backward(grad, like, *ctx.sizes, False, True, None)
        return grad, None, None, None


def average(x: Tensor, stride: int) -> Tensor:
    """3x3 average pooling, in which zeros beyond the border count."""
    if not x.requires_grad or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return F.avg_pool2d(x, 3, stride, padding=1)
    return _Average.apply(x, 3, stride, 1)


def mean_pool(x: Tensor, stride: int, mask: Tensor | None) -> Tensor:
    """Average over stride x stride positions; sizes round up, as in a strided 3x3 convolution.

    Positions outside the map or the mask don't count.
    """
    pool = partial(F.avg_pool2d, kernel_size=stride, ceil_mode=True, count_include_pad=False)
    if is_exporting():  # other runtimes differ on which positions ceil_mode counts
        inside = x.new_ones((1, 1, *x.shape[2:])) if mask is None else mask.to(x.dtype)
        edge = (0, stride - 1, 0, stride - 1)
        sums, counts = (F.avg_pool2d(F.pad(part, edge), stride) for part in (x * inside, inside))
        return sums / counts.clamp(min=1 / stride**2)
    if mask is None:
        return pool(x)
    inside = mask.to(x.dtype)
    return pool(x * inside) / pool(inside).clamp(min=1 / stride**2)


def blank(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set padded positions to 0, which is what a convolution sees beyond the border of a map."""
    return x if mask is None else x * mask.to(x.dtype)


def subsample_mask(mask: Tensor | None, stride: int) -> Tensor | None:
    """The mask [B, 1, H, W] of the map after a layer of that stride, of ceil(H / stride) rows."""
    if mask is not None and is_exporting():  # its size in the terms of a convolution's
        return F.max_pool2d(mask.float(), 1, stride) > 0
    return None if mask is None else mask[:, :, ::stride, ::stride]
