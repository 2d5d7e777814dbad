"""Networks by name, and the backbones that Detectron2 builds from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, FPN, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool, LastLevelP6P7
from torch import Tensor, nn

from lambda_det.errors import ConfigError
from lambda_det.modeling.mobilenet import MobileNetV2
from lambda_det.modeling.resnet import LambdaResNet
from lambda_det.modeling.specs import STAGES, MobileNetSpec, ResNetSpec, get_spec
from lambda_det.modeling.weights import load_backbone_weights

_NETWORKS = {ResNetSpec: LambdaResNet, MobileNetSpec: MobileNetV2}


class Classifier(nn.Module):
    """An image classifier: ``backbone`` up to its ``linear`` layer."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, num_classes]."""
        return self.backbone(images)["linear"]


def create_classifier(name: str, num_classes: int = 1000, **overrides: Any) -> Classifier:
    """Make the classifier of that name.

    Args:
        name: one of :func:`lambda_det.list_models`.
        num_classes: size of the output.
        overrides: arguments of :class:`LambdaResNet` (or :class:`MobileNetV2`) and of its lambda
            layers.

    Raises:
        ConfigError: if there is no such model, or an option cannot work.
    """
    spec = get_spec(name)
    return Classifier(_NETWORKS[type(spec)](spec, num_classes=num_classes, **overrides))


def create_backbone(
    name: str,
    out_features: Sequence[str] = STAGES,
    weights: str | Path | None = None,
    **overrides: Any,
) -> Backbone:
    """Make the backbone of that name, for use without any configuration.

    Args:
        name: one of :func:`lambda_det.list_models`.
        out_features: names out of "stem", "res2" to "res5".
        weights: a checkpoint of the backbone, of a classifier or of a detector, that must hold
            every tensor of the backbone.
        overrides: arguments of :class:`LambdaResNet` (or :class:`MobileNetV2`) and of its lambda
            layers.

    Raises:
        ConfigError: if there is no such model, or an option cannot work.
        WeightsError: if the weights cannot be read or don't fit.
    """
    spec = get_spec(name)
    backbone = _NETWORKS[type(spec)](spec, out_features=out_features, **overrides)
    if weights is not None:
        load_backbone_weights(backbone, weights)
    return backbone


@BACKBONE_REGISTRY.register()
def build_lambda_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """The network of ``MODEL.LAMBDA_RESNET`` (see :func:`lambda_det.add_lambda_config`)."""
    options = cfg.MODEL.LAMBDA_RESNET
    # fmt: off
    overrides = {
        "norm":      options.NORM,
        "freeze_at": cfg.MODEL.BACKBONE.FREEZE_AT,
    }
    switches = {
        "stochastic_depth":       options.STOCHASTIC_DEPTH,
        "checkpoint_activations": options.CHECKPOINT_ACTIVATIONS,
        "mask_padding":           options.MASK_PADDING,
    }
    layer = {
        "query_depth": options.QUERY_DEPTH,
        "heads":       options.HEADS,
        "intra_depth": options.INTRA_DEPTH,
        "scope":       options.SCOPE,
    }
    # fmt: on
    switched_on = [name.upper() for name, value in switches.items() if value]
    if switched_on and isinstance(get_spec(options.NAME), MobileNetSpec):
        raise ConfigError(
            f"MODEL.LAMBDA_RESNET.NAME {options.NAME} takes no {', '.join(switched_on)}; leave it "
            "at its default, or take a ResNet."
        )
    overrides |= {name: value for name, value in (switches | layer).items() if value}
    if options.IMPLEMENTATION != "auto":
        overrides["implementation"] = options.IMPLEMENTATION
    return create_backbone(options.NAME, options.OUT_FEATURES, **overrides)


def _build_fpn(
    cfg: CfgNode, input_shape: ShapeSpec, make_top: Callable[[Backbone], nn.Module]
) -> FPN:
    bottom_up = build_lambda_resnet_backbone(cfg, input_shape)
    return FPN(
        bottom_up=bottom_up,
        in_features=cfg.MODEL.FPN.IN_FEATURES,
        out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
        norm=cfg.MODEL.FPN.NORM,
        top_block=make_top(bottom_up),
        fuse_type=cfg.MODEL.FPN.FUSE_TYPE,
    )


@BACKBONE_REGISTRY.register()
def build_lambda_resnet_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """FPN with p2 to p6, p6 by max pooling, as Detectron2's ``build_resnet_fpn_backbone``."""
    return _build_fpn(cfg, input_shape, lambda bottom_up: LastLevelMaxPool())


@BACKBONE_REGISTRY.register()
def build_retinanet_lambda_resnet_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """FPN with p3 to p7, p6 and p7 from res5, as ``build_retinanet_resnet_fpn_backbone``."""
    return _build_fpn(
        cfg,
        input_shape,
        lambda bottom_up: LastLevelP6P7(
            bottom_up.output_shape()["res5"].channels, cfg.MODEL.FPN.OUT_CHANNELS
        ),
    )
