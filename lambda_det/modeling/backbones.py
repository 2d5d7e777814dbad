"""The backbones that Detectron2 builds from a configuration.

They are registered as soon as Detectron2's networks are imported, which may happen while modules of
this package are only half imported. So ours that make networks are imported in the functions.
"""

from __future__ import annotations

from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, FPN, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool, LastLevelP6P7

from lambda_det.config import LAMBDA_LAYER_KEYS
from lambda_det.errors import ConfigError


def layer_options(section: CfgNode) -> dict[str, Any]:
    """The options of lambda layers in ``MODEL.LAMBDA_RESNET``, which override the named model's.

    Returns:
        Arguments of :func:`create_backbone`, as plain values.
    """
    given = {key: section[key] for key, o in LAMBDA_LAYER_KEYS.items() if section[key] != o.default}
    return {key.lower(): list(v) if isinstance(v, tuple) else v for key, v in given.items()}


def network_options(section: CfgNode, layers: CfgNode) -> dict[str, Any]:
    """Arguments of :func:`create_backbone` and :func:`create_classifier`, as plain values.

    Args:
        section: has ``NORM`` and the other keys of a network.
        layers: ``MODEL.LAMBDA_RESNET``, with the options of its lambda layers.
    """
    keys = ("STOCHASTIC_DEPTH", "CHECKPOINT_ACTIVATIONS", "MASK_PADDING")
    given = {key.lower(): section[key] for key in keys if section.get(key)}
    if section.NORM != "BN":  # the default; a network with norms of its own takes none
        given["norm"] = section.NORM
    return given | layer_options(layers)


def _build_network(cfg: CfgNode, dilation: dict[str, int], **overrides: Any) -> Backbone:
    from lambda_det.modeling.build import create_backbone

    options = cfg.MODEL.LAMBDA_RESNET
    # Its DEPTH, NORM, STEM_OUT_CHANNELS and the like are left over in nearly every file, describe
    # the network that ours replaces, and are not looked at
    why = "the networks of MODEL.LAMBDA_RESNET have plain convolutions alone"
    _value(cfg, "DEFORM_ON_PER_STAGE", ([False] * 4,), why)
    _value(cfg, "NUM_GROUPS", (1,), why)
    if max(dilation.values()) > 1:
        overrides["dilation"] = dilation
    return create_backbone(
        options.NAME,
        options.OUT_FEATURES,
        freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,
        **network_options(options, options),
        **overrides,
    )


def _value(cfg: CfgNode, key: str, possible: tuple, why: str) -> Any:
    """The value of a key of ``MODEL.RESNETS``, which must be a possible one."""
    value = cfg.MODEL.RESNETS.get(key, possible[0])  # some keys are DeepLab's
    if value not in possible:
        raise ConfigError(
            f"MODEL.RESNETS.{key} is {value}, but here it can be "
            f"{' or '.join(map(str, possible))}: {why}."
        )
    return value


@BACKBONE_REGISTRY.register()
def build_lambda_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """The network of ``MODEL.LAMBDA_RESNET`` (see :func:`lambda_det.add_lambda_config`).

    As in Detectron2's ``build_resnet_backbone``, ``MODEL.RESNETS.RES5_DILATION`` 2 makes res5 a
    dilated stage of stride 1, for the DC5 layout.

    Raises:
        ConfigError: a key asks for what the network cannot be.
    """
    why = "others need MODEL.BACKBONE.NAME build_lambda_resnet_deeplab_backbone"
    _value(cfg, "RES4_DILATION", (1,), why)
    return _build_network(cfg, {"res5": _value(cfg, "RES5_DILATION", (1, 2), why)})


@BACKBONE_REGISTRY.register()
def build_lambda_resnet_deeplab_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """As ``build_resnet_deeplab_backbone``: dilated res4 and res5, and a multi-grid in res5.

    They are ``MODEL.RESNETS.RES4_DILATION``, ``RES5_DILATION`` and ``RES5_MULTI_GRID``, keys of
    DeepLab's ``add_deeplab_config``. The stem is the network's own, whatever ``STEM_TYPE`` says.

    Raises:
        ConfigError: a key asks for what the network cannot be.
    """
    why = "Detectron2's DeepLab has RES5_DILATION 4 with RES4_DILATION 2, and none above these"
    res4 = _value(cfg, "RES4_DILATION", (1, 2), why)
    res5 = _value(cfg, "RES5_DILATION", (4,) if res4 == 2 else (1, 2, 4), why)
    multi_grid = cfg.MODEL.RESNETS.get("RES5_MULTI_GRID")
    return _build_network(cfg, {"res4": res4, "res5": res5}, multi_grid=multi_grid)


def _build_fpn(cfg: CfgNode, input_shape: ShapeSpec, *, of_retinanet: bool) -> FPN:
    why = "an FPN needs each stage at half the resolution of the one before"
    _value(cfg, "RES5_DILATION", (1,), why)
    bottom_up, top = build_lambda_resnet_backbone(cfg, input_shape), LastLevelMaxPool()
    if of_retinanet:
        channels = bottom_up.output_shape()["res5"].channels
        top = LastLevelP6P7(channels, cfg.MODEL.FPN.OUT_CHANNELS)
    return FPN(
        bottom_up=bottom_up,
        in_features=cfg.MODEL.FPN.IN_FEATURES,
        out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
        norm=cfg.MODEL.FPN.NORM,
        top_block=top,
        fuse_type=cfg.MODEL.FPN.FUSE_TYPE,
    )


@BACKBONE_REGISTRY.register()
def build_lambda_resnet_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """FPN with p2 to p6, p6 by max pooling, as Detectron2's ``build_resnet_fpn_backbone``."""
    return _build_fpn(cfg, input_shape, of_retinanet=False)


@BACKBONE_REGISTRY.register()
def build_retinanet_lambda_resnet_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """FPN with p3 to p7, p6 and p7 from res5, as ``build_retinanet_resnet_fpn_backbone``."""
    return _build_fpn(cfg, input_shape, of_retinanet=True)
