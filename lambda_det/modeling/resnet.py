"""LambdaResNet, ResNet-RS and the vanilla ResNet as Detectron2 backbones and classifiers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from detectron2.modeling.backbone.resnet import ResNet
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lambda_det.errors import ConfigError
from lambda_det.modeling.blocks import (
    Bottleneck,
    Norm,
    ResNetRSStem,
    VanillaStem,
    check_norm,
    check_probability,
    subsample_mask,
)
from lambda_det.modeling.specs import STAGES, ResNetSpec
from lambda_det.modeling.stages import check_dilation, make_stage, stage_channels


class LambdaResNet(ResNet):
    """A ResNet whose blocks may hold lambda layers; Detectron2's ``ResNet`` in all other respects.

    Parts are named as there: ``stem``, ``res2`` to ``res5``, ``linear``. Any input size of at least
    1x1 works; a stage of stride s gives ceil(size / s) positions.

    Args:
        spec: the architecture.
        in_channels: channels of the images.
        norm: a name that Detectron2's ``get_norm`` knows, or a function from channels to a module.
        out_features: names out of "stem", "res2" to "res5", "linear"; None for the last.
        num_classes: also make the classifier ``linear`` of so many classes.
        freeze_at: as in Detectron2: 1 freezes the stem, 2 the stem and res2, and so on.
        stochastic_depth: probability of dropping the residual branch in res5; 2/5, 3/5 and 4/5 of
            it in res2, res3 and res4, as the ResNet-RS code does it.
        checkpoint_activations: keep only each block's input for the backward pass.
        mask_padding: give each image of a padded batch the features that it has alone. Padding is
            what Detectron2 makes of it: rows at the bottom and columns at the right that are
            exactly 0 in all channels after normalisation.
        share_positions: let the lambda layers of a stage share their position embeddings.
        global_context: side of the largest image; the position lambdas then span the whole map of
            such an image instead of a local scope.
        dilation: by stage, how far apart the positions are that its 3x3 convolutions and the
            position lambdas look at. A stage of a larger dilation than the one before has stride 1
            instead of 2: {"res5": 2} gives res5 at stride 16, {"res4": 2, "res5": 4} res4 and res5
            at stride 8. The weights keep their names and shapes.
        multi_grid: for each block of res5, the factor of its dilation (DeepLab).
        dropout: probability of dropping a feature before ``linear``.
        lambda_options: options of the lambda layers, over those of the spec.
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
        share_positions: bool = False,
        global_context: int | None = None,
        dilation: Mapping[str, int] | None = None,
        multi_grid: Sequence[int] | None = None,
        dropout: float = 0.0,
        **lambda_options: Any,
    ) -> None:
        check_norm(norm)
        check_probability("STOCHASTIC_DEPTH", stochastic_depth)
        check_probability("DROPOUT", dropout)
        given = list(lambda_options)
        if global_context is not None:
            given.append("global_context")
            lambda_options = {**lambda_options, "scope": None}
        if share_positions:
            given.append("share_positions")
        if given and not any(spec.lambda_blocks.values()):
            raise ConfigError(
                f"{', '.join(given)}: options of lambda layers, which this network doesn't have; "
                "leave them out."
            )
        if spec.design == "rs":
            stem = ResNetRSStem(in_channels, norm=norm)
        else:
            stem = VanillaStem(in_channels, 64, norm)
        side = None if global_context is None else math.ceil(global_context / stem.stride)
        dilations = check_dilation(spec, dilation, multi_grid)
        stages = []
        channels = stem.out_channels
        widest = 1
        for index, name in enumerate(STAGES):
            # What a stage gives up in stride it makes up for in dilation
            stride = 2 if index > 0 and dilations[name] == widest else 1
            widest = dilations[name]
            grid = multi_grid if name == "res5" and multi_grid else [1] * spec.blocks[index]
            sides = None
            if side is not None:
                sides = [(side, side), (math.ceil(side / stride),) * 2]
                side = sides[1][0]
            blocks = make_stage(
                spec,
                name,
                channels,
                stride=stride,
                norm=norm,
                layer=lambda_options,
                share_positions=share_positions,
                map_size=sides,
                dilation=[widest * step for step in grid],
                stochastic_depth=stochastic_depth * (index + 2) / 5,
            )
            channels = stage_channels(name)
            stages.append(blocks)
        out_features = check_out_features(
            out_features, ("stem", *STAGES, *(["linear"] if num_classes is not None else []))
        )
        # Detectron2 drops the stages after the last one asked for, and takes "linear" for the
        # first.
        with_linear = out_features is None or "linear" in out_features
        super().__init__(
            stem,
            stages,
            num_classes=num_classes,
            out_features=None if with_linear else out_features,
            freeze_at=freeze_at,
        )
        if out_features is not None:
            self._out_features = out_features
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.checkpoint_activations = checkpoint_activations
        self.mask_padding = mask_padding

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Map images [B, C, H, W] to the features of ``out_features``, by name."""
        features = {}
        mask = image_area(x) if self.mask_padding else None
        x = self.stem(x, mask)
        mask = subsample_mask(mask, self.stem.stride)
        features["stem"] = x
        for name, stage in zip(self.stage_names, self.stages, strict=True):
            for block in stage:
                x = self._run(block, x, mask)
                mask = subsample_mask(mask, block.stride)
            features[name] = x
        if self.num_classes is not None:
            features["linear"] = self.linear(self.dropout(torch.flatten(self.avgpool(x), 1)))
        return {name: features[name] for name in self._out_features}

    def _run(self, block: Bottleneck, x: Tensor, mask: Tensor | None) -> Tensor:
        if not (self.checkpoint_activations and torch.is_grad_enabled()):
            return block(x, mask)
        return checkpoint(
            block,
            x,
            mask,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), kept_statistics(block)),
        )


def check_out_features(
    out_features: Sequence[str] | None, available: Sequence[str]
) -> list[str] | None:
    """``out_features`` as a list, or None.

    Raises:
        ConfigError: if a name is not one of ``available``.
    """
    if out_features is None:
        return None
    if len(out_features) == 0:
        raise ConfigError(f"OUT_FEATURES is empty; name some of {', '.join(available)}.")
    for name in out_features:
        if name not in available:
            raise ConfigError(
                f"OUT_FEATURES names {name!r}, but this backbone has {', '.join(available)}."
            )
    return list(out_features)


def image_area(images: Tensor) -> Tensor:
    """Where a padded batch [B, C, H, W] holds image: bool [B, 1, H, W], a rectangle at the top left
    each.

    Detectron2 pads at the bottom and the right with zeros, after the images were normalised. A
    pixel of an image is not exactly 0 in all channels there unless the pixel mean is a whole
    number, and only complete rows and columns of such pixels at the border could be mistaken for
    padding.
    """
    nonzero = (images != 0).any(1, keepdim=True)
    nonzero |= ~nonzero.any((2, 3), keepdim=True)  # an image of zeros alone is all image
    # By sums, since ONNX has no cummax
    rows = nonzero.any(3, keepdim=True).int().flip(2).cumsum(2).flip(2) > 0  # to the last row
    columns = nonzero.any(2, keepdim=True).int().flip(3).cumsum(3).flip(3) > 0
    return rows & columns


@contextmanager
def kept_statistics(module: nn.Module) -> Iterator[None]:
    """Leave running statistics alone, so that a block computed twice counts its batch once."""
    norms = [part for part in module.modules() if getattr(part, "running_mean", None) is not None]
    kept = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    try:
        yield
    finally:
        with torch.no_grad():
            for norm, buffers in zip(norms, kept, strict=True):
                for name, buffer in norm.named_buffers():
                    buffer.copy_(buffers[name])
