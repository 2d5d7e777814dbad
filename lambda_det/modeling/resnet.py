"""LambdaResNet, ResNet-RS and the vanilla ResNet: stem, block, stage and network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

from lambda_det.config import BELOW_1, check
from lambda_det.errors import ConfigError
from lambda_det.foundation import CNNBlockBase, Conv2d, ShapeSpec, get_norm
from lambda_det.modeling.checks import check_dilation, check_options
from lambda_det.modeling.common import (
    Activation,
    Norm,
    SqueezeExcitation,
    StagedBackbone,
    conv_norm,
    kept_statistics,
)
from lambda_det.modeling.padding import PaddingMask
from lambda_det.modeling.replacements import Replacements
from lambda_det.modeling.specs import STAGES, ResNetSpec
from lambda_det.native import is_recorded, layout_of
from lambda_det.native.calls import is_hooked

_ACTIVATIONS: dict[str, Activation] = {"relu": F.relu_, "silu": F.silu}

# For each name of a design the kernel, the share of the stem's width, and the stride of each
# convolution
_STEMS = {
    "rs": ((3, 1 / 2, 2), (3, 1 / 2, 1), (3, 1, 1), (3, 1, 2)),
    "vanilla": ((7, 1, 2),),
    "timm": ((3, 3 / 8, 2), (3, 1 / 2, 1), (3, 1, 1)),
}


class Stem(CNNBlockBase):
    """Convolutions ``conv1``, ``conv2`` and so on, and a max pooling unless the design is "rs".

    ResNet-RS has a fourth convolution, of stride 2, for the max pooling.

    Args:
        in_channels: channels of the images.
        spec: gives design, width and activation.
        norm: as in :class:`Bottleneck`.
    """

    def __init__(self, in_channels: int, spec: ResNetSpec, *, norm: Norm) -> None:
        super().__init__(in_channels, spec.width, 4)
        for number, (kernel, share, stride) in enumerate(_STEMS[spec.design], 1):
            width = int(spec.width * share)
            conv = conv_norm(
                in_channels,
                width,
                kernel,
                norm=norm,
                stride=stride,
                activation=_ACTIVATIONS[spec.activation],
            )
            self.add_module(f"conv{number}", conv)
            in_channels = width
        if spec.design != "rs":
            self.pool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, width, ceil(H / 4), ceil(W / 4)]."""
        for module in self.children():
            x = module(x)
        return x


class Bottleneck(CNNBlockBase):
    """1x1, 3x3 and 1x1 convolution around a shortcut, the 3x3 one possibly a lambda layer.

    Where the stride is 2 an average pooling follows the lambda layer. The norm and the activation
    of the 3x3 convolution stay after it: with N(0, 1) embeddings over 23x23 positions the
    layer's output has a standard deviation near 75 at the start.

    Of the designs "rs" has ResNet-D's 2x2 average pooling before the shortcut's 1x1 convolution,
    the others have a stride in it. The average pooling after a strided lambda layer is 3x3 and
    counts the zeros beyond the border; the one of "timm" is 2x2 and does not.

    Args:
        spec: gives design, channels, squeeze-and-excitation and activation.
        stage: "res2" to "res5", whose block it is.
        in_channels: channels of the input.
        stride: 1 or 2, at the 3x3 convolution.
        dilation: of the 3x3 convolution.
        norm: a name that Detectron2's ``get_norm`` knows, or a function from channels to a module.
        layer: what stands in the place of the 3x3 convolution, such as a
            :class:`lambda_det.layers.LambdaLayer`; None for the convolution.
        stochastic_depth: probability of leaving the residual branch of an image out in training.
        after: what follows the block, or None. Files of weights have it as ``attention``.
    """

    def __init__(
        self,
        spec: ResNetSpec,
        stage: str,
        in_channels: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        norm: Norm = "BN",
        layer: nn.Module | None = None,
        stochastic_depth: float = 0.0,
        after: nn.Module | None = None,
    ) -> None:
        out_channels, activation = spec.channels(stage), _ACTIVATIONS[spec.activation]
        super().__init__(in_channels, out_channels, stride)
        self.shortcut = self.shortcut_pool = None
        if in_channels != out_channels or stride > 1:
            in_conv = 1 if spec.design == "rs" else stride
            if in_conv != stride:
                self.shortcut_pool = _average(stride)
            self.shortcut = conv_norm(
                in_channels, out_channels, 1, norm=norm, stride=in_conv, activation=None
            )
        width = out_channels // 4
        self.activation = activation
        self.conv1 = conv_norm(in_channels, width, 1, norm=norm, activation=activation)
        self.is_lambda = layer is not None
        if layer is not None:
            self.conv2 = layer
            self.pool = nn.Identity()
            if stride > 1:
                strided = nn.AvgPool2d(3, stride, padding=1)
                self.pool = _average(stride) if spec.design == "timm" else strided
            self.norm2 = get_norm(norm, width) or nn.Identity()
        else:
            steps = {"stride": stride, "dilation": dilation}
            self.conv2 = conv_norm(width, width, 3, norm=norm, activation=activation, **steps)
        self.conv3 = conv_norm(width, out_channels, 1, norm=norm, activation=None)
        has_se = stage in spec.se_stages
        self.se = SqueezeExcitation(out_channels, spec.se_ratio) if has_se else None
        self.drop = StochasticDepth(stochastic_depth, "row") if stochastic_depth else None
        self.attention = after
        # Every residual branch starts at zero: gamma = 0 in its last norm (Appendix F.2)
        gamma = getattr(self.conv3.norm, "weight", None)
        if isinstance(gamma, nn.Parameter):  # in a frozen norm it is a buffer
            nn.init.zeros_(gamma)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, in_channels, H, W] to [B, out_channels, ceil(H / stride), ceil(W / stride)]."""
        out = self.conv1(x)
        out = self.conv2(out)
        if self.is_lambda:
            out = self.activation(self.norm2(self.pool(out)))
        out = self.widen(out)
        if self.drop is not None:
            out = self.drop(out)

        out += self._shorten(x)
        out = self.activation(out)
        return out if self.attention is None else self.attention(out)

    def _shorten(self, x: Tensor) -> Tensor:
        """What is added to the residual branch."""
        pool, conv = self.shortcut_pool, self.shortcut
        if conv is None:
            return x
        if pool is None:
            return conv(x)
        if not _is_one_convolution(x, pool, conv):
            return conv(pool(x))
        x = convolve_averages(x, conv.weight, conv.bias)
        return x if conv.norm is None else conv.norm(x)

    def widen(self, x: Tensor) -> Tensor:
        """The last convolution and what rescales it."""
        x = self.conv3(x)
        return x if self.se is None else self.se(x)


def _is_one_convolution(x: Tensor, pool: nn.Module, conv: nn.Module) -> bool:
    """Whether :func:`convolve_averages` may stand for a pooling and a 1x1 convolution, and pays."""
    # Its products, four times as many, take an NVIDIA GPU less time in 16 bits than a pass over the
    # map: 0.85 in place of 3.35 ms on an H200, of 8 maps of 256x256 from 256 to 512 channels. What
    # is compiled or recorded has its own ways, and may be for other sizes.
    if is_recorded():
        return False
    is_nvidia = x.is_cuda and not torch.version.hip
    halves = type(pool) is nn.AvgPool2d and pool.kernel_size == 2
    is_plain = isinstance(conv, Conv2d) and conv.activation is None
    pays = is_nvidia and x.dtype in (torch.bfloat16, torch.float16) and halves and is_plain
    return pays and not (is_hooked(pool) or is_hooked(conv))


def convolve_averages(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A 1x1 convolution of the averages over 2x2 positions, as one convolution of stride 2.

    At an odd side the last average is over the positions that there are, as in
    ``AvgPool2d(2, ceil_mode=True, count_include_pad=False)``: that of a row and its copy is the
    row. Maps are [B, C, H, W], the weight is [C', C, 1, 1].
    """
    if x.shape[2] % 2:
        x = torch.cat([x, x[:, :, -1:]], 2)
    if x.shape[3] % 2:
        x = torch.cat([x, x[..., -1:]], 3)
    weight = (weight / 4).expand(-1, -1, 2, 2).contiguous(memory_format=layout_of(x))
    return F.conv2d(x, weight, bias, stride=2)


def _average(stride: int) -> nn.Module:
    """Average to the positions of a strided 3x3 convolution; the border's zeros do not count."""
    return nn.AvgPool2d(stride, ceil_mode=True, count_include_pad=False)


def make_stage(
    spec: ResNetSpec,
    name: str,
    in_channels: int,
    *,
    stride: int,
    in_stride: int,
    layers: Replacements,
    dilation: int = 1,
    multi_grid: Sequence[int] | None = None,
    stochastic_depth: float,
) -> nn.Sequential:
    """The bottleneck blocks of one stage.

    Args:
        spec: the architecture.
        name: "res2" to "res5".
        in_channels: channels of its input.
        stride: of the first block.
        in_stride: of the input, in pixels of the image.
        layers: makes what replaces convolutions, and has the norm of the network.
        dilation: of the blocks.
        multi_grid: by which factor each block is dilated further; None for 1.
        stochastic_depth: as in :class:`Bottleneck`.
    """
    channels = spec.channels(name)
    blocks: list[Bottleneck] = []
    factors = multi_grid or [1] * spec.blocks[STAGES.index(name)]
    for number, spacing in enumerate((dilation * factor for factor in factors), 1):
        layer = after = None
        if spec.has_lambda(name, number) and spec.follows:
            after = layers.make(name, channels, stride=in_stride * stride)
        elif spec.has_lambda(name, number):
            before = in_stride if number == 1 else in_stride * stride
            layer = layers.make(name, channels // 4, stride=before, dilation=spacing)
        block = Bottleneck(
            spec,
            name,
            in_channels,
            stride=stride if number == 1 else 1,
            dilation=spacing,
            norm=layers.norm,
            layer=layer,
            stochastic_depth=stochastic_depth,
            after=after,
        )
        blocks.append(block)
        in_channels = channels
    return nn.Sequential(*blocks)


def make_res5(
    spec: ResNetSpec, *, norm: Norm, stochastic_depth: float, **lambda_options: Any
) -> tuple[nn.Sequential, int]:
    """The last stage by itself, for heads that see regions of the map of res4.

    Args:
        spec: the architecture.
        norm: as in :class:`LambdaResNet`.
        stochastic_depth: likewise.
        lambda_options: likewise.

    Returns:
        The stage, which maps [B, C, H, W] of res4 to half the resolution, and its channels.

    Raises:
        ConfigError: the network does not take one of the options.
    """
    check_options(LambdaResNet, spec, lambda_options)
    stage = make_stage(
        spec,
        "res5",
        spec.channels("res4"),
        stride=2,
        in_stride=16,
        layers=Replacements(spec, norm, **lambda_options),
        stochastic_depth=stochastic_depth,
    )
    return stage, spec.channels("res5")


class LambdaResNet(StagedBackbone):
    """A ResNet whose blocks may hold lambda layers.

    Modules are named as in Detectron2's ``ResNet``: ``stem``, ``res2`` to ``res5``, ``linear``. Any
    input size of at least 1x1 works; a stage of stride s gives ceil(size / s) positions.

    Args:
        spec: the architecture.
        in_channels: channels of the images.
        norm: a name that Detectron2's ``get_norm`` knows, or a function from channels to a module.
        out_features: names out of "stem", "res2" to "res5", "linear"; None for the last.
        num_classes: also make the classifier ``linear``, with this number of classes.
        freeze_at: as in Detectron2: 1 freezes the stem, 2 the stem and res2, and so on.
        stochastic_depth: probability of dropping the residual branch in res5; 2/5, 3/5 and 4/5 of
            it in res2, res3 and res4, as the ResNet-RS code does it.
        checkpoint_activations: keep only each block's input for the backward pass.
        mask_padding: give each image of a padded batch the features that it has by itself. Padding
            is what Detectron2 makes of it: rows at the bottom and columns at the right that are
            exactly 0 in all channels after normalisation.
        dilation: by stage, how far apart the positions are that its 3x3 convolutions and the
            position lambdas look at. A stage of a larger dilation than the one before has stride 1
            instead of 2: {"res5": 2} gives res5 at stride 16, {"res4": 2, "res5": 4} res4 and res5
            at stride 8. The weights keep their names and shapes.
        multi_grid: for each block of res5, the factor of its dilation (DeepLab).
        dropout: probability of dropping a feature before ``linear``.
        lambda_options: of the lambda layers, see :class:`Replacements`.

    Raises:
        ConfigError: an option cannot work, or the network does not take it.
    """

    def __init__(
        self,
        spec: ResNetSpec,
        *,
        in_channels: int = 3,
        norm: Norm = "BN",
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        freeze_at: int = 0,
        stochastic_depth: float = 0.0,
        checkpoint_activations: bool = False,
        mask_padding: bool = False,
        dilation: Mapping[str, int] | None = None,
        multi_grid: Sequence[int] | None = None,
        dropout: float = 0.0,
        **lambda_options: Any,
    ) -> None:
        check_options(LambdaResNet, spec, lambda_options)
        check("STOCHASTIC_DEPTH", stochastic_depth, BELOW_1)
        dilations = check_dilation(spec, dilation, multi_grid)
        if spec.kind and (mask_padding or max(*dilations.values(), *(multi_grid or ())) > 1):
            raise ConfigError(
                f"The networks with layers of the kind {spec.kind!r} take no MASK_PADDING, no "
                "dilation and no RES5_MULTI_GRID above 1; leave these out."
            )
        layers = Replacements(spec, norm, **lambda_options)
        stem = Stem(in_channels, spec, norm=norm)
        modules: dict[str, nn.Module] = {"stem": stem}
        shapes = {"stem": ShapeSpec(channels=stem.out_channels, stride=stem.stride)}
        channels, stride, widest = stem.out_channels, stem.stride, 1
        for index, name in enumerate(STAGES):
            # a stage without its stride is dilated by as much
            own_stride = 2 if index > 0 and dilations[name] == widest else 1
            widest = dilations[name]
            modules[name] = make_stage(
                spec,
                name,
                channels,
                stride=own_stride,
                in_stride=stride,
                layers=layers,
                dilation=widest,
                multi_grid=multi_grid if name == "res5" else None,
                stochastic_depth=stochastic_depth * (index + 2) / 5,
            )
            channels, stride = spec.channels(name), stride * own_stride
            shapes[name] = ShapeSpec(channels=channels, stride=stride)
        if out_features is not None and "linear" not in out_features:
            # stages whose maps nobody uses would wait for gradients that never come
            last = max((i for i, name in enumerate(modules) if name in out_features), default=0)
            modules = dict([*modules.items()][: last + 1])
        super().__init__(
            modules,
            shapes,
            out_features=out_features,
            num_classes=num_classes,
            dropout=dropout,
            freeze_at=freeze_at,
        )
        self.checkpoint_activations = checkpoint_activations
        self.padding = PaddingMask(self) if mask_padding else None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Map images [B, C, H, W] to the features of ``out_features``, by name."""
        if self.padding is not None:
            self.padding.find(x)
        x = self.stem(x)
        features = {"stem": x}
        for name in self.stage_names:
            for block in getattr(self, name):
                x = self._run(block, x)
            features[name] = x
        return self.outputs(features)

    def _run(self, block: Bottleneck, x: Tensor) -> Tensor:
        if not (self.checkpoint_activations and torch.is_grad_enabled()):
            return block(x)
        return checkpoint(
            block if self.padding is None else self.padding.bind(block),
            x,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), kept_statistics(block)),
        )
