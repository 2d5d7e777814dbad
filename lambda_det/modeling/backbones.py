"""The backbones that Detectron2 builds from a configuration.

They are registered as soon as Detectron2's networks are imported, which may happen while modules of
this package are only half imported. So ours that make networks are imported in the functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, FPN, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool, LastLevelP6P7
from torch import nn

from lambda_det.config import LAMBDA_LAYER_KEYS
from lambda_det.errors import ConfigError


def layer_options(section: CfgNode) -> dict[str, Any]:
    """The options of lambda layers in ``MODEL.LAMBDA_RESNET``, which override the named model's.

    Returns:
        Arguments of :func:`create_backbone`, as plain values.
    """
    given = {key: section[key] for key, o in LAMBDA_LAYER_KEYS.items() if section[key] != o.default}
    return {key.lower(): list(v) if isinstance(v, tuple) else v for key, v in given.items()}


def _build_network(cfg: CfgNode, dilation: dict[str, int], **overrides: Any) -> Backbone:
    from lambda_det.modeling.build import create_backbone, norm_option

    options = cfg.MODEL.LAMBDA_RESNET
    _refuse_other_convolutions(cfg)
    if max(dilation.values()) > 1:
        overrides["dilation"] = dilation
    for key in ("STOCHASTIC_DEPTH", "CHECKPOINT_ACTIVATIONS", "MASK_PADDING"):
        if options[key]:
            overrides[key.lower()] = options[key]
    return create_backbone(
        options.NAME,
        options.OUT_FEATURES,
        **norm_option(options.NAME, options.NORM),
        freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,
        **layer_options(options),
        **overrides,
    )


def _refuse_other_convolutions(cfg: CfgNode) -> None:
    """Refuse keys of Detectron2's ResNet that ask for what our blocks do not have.

    Its DEPTH, NORM, STEM_OUT_CHANNELS and the like are left over in nearly every file, describe the
    network that ours replaces, and are not looked at.
    """
    options = cfg.MODEL.RESNETS
    asked = {
        "DEFORM_ON_PER_STAGE": any(options.DEFORM_ON_PER_STAGE),
        "NUM_GROUPS": options.NUM_GROUPS != 1,
    }
    for key in (key for key, is_asked in asked.items() if is_asked):
        raise ConfigError(
            f"MODEL.RESNETS.{key} is {options[key]}, but the networks of MODEL.LAMBDA_RESNET have "
            "only plain convolutions; leave it at its default, or take build_resnet_backbone."
        )


@BACKBONE_REGISTRY.register()
def build_lambda_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """The network of ``MODEL.LAMBDA_RESNET`` (see :func:`lambda_det.add_lambda_config`).

    As in Detectron2's ``build_resnet_backbone``, ``MODEL.RESNETS.RES5_DILATION`` 2 makes res5 a
    dilated stage of stride 1, for the DC5 layout.

    Raises:
        ConfigError: a key asks for what the network cannot be.
    """
    options = cfg.MODEL.RESNETS
    if options.get("RES4_DILATION", 1) != 1:
        raise ConfigError(
            f"MODEL.RESNETS.RES4_DILATION is {options.RES4_DILATION}, which is DeepLab's; set "
            "MODEL.BACKBONE.NAME to build_lambda_resnet_deeplab_backbone, which follows it."
        )
    return _build_network(cfg, {"res5": _dilation(cfg, "RES5_DILATION", (1, 2))})


@BACKBONE_REGISTRY.register()
def build_lambda_resnet_deeplab_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """As ``build_resnet_deeplab_backbone``: dilated res4 and res5, and a multi-grid in res5.

    They are ``MODEL.RESNETS.RES4_DILATION``, ``RES5_DILATION`` and ``RES5_MULTI_GRID``, keys of
    DeepLab's ``add_deeplab_config``. The stem is the network's own, whatever ``STEM_TYPE`` says.

    Raises:
        ConfigError: a key asks for what the network cannot be, or the keys are not there.
    """
    if "RES5_MULTI_GRID" not in cfg.MODEL.RESNETS:
        raise ConfigError(
            "build_lambda_resnet_deeplab_backbone needs the configuration keys of DeepLab; call "
            "detectron2.projects.deeplab.add_deeplab_config(cfg) before a file is read."
        )
    dilation = {
        "res4": _dilation(cfg, "RES4_DILATION", (1, 2)),
        "res5": _dilation(cfg, "RES5_DILATION", (1, 2, 4)),
    }
    if dilation["res4"] == 2 and dilation["res5"] != 4:
        raise ConfigError(
            f"MODEL.RESNETS.RES5_DILATION is {dilation['res5']}; with RES4_DILATION 2 it must be "
            "4, as in Detectron2's DeepLab."
        )
    return _build_network(cfg, dilation, multi_grid=list(cfg.MODEL.RESNETS.RES5_MULTI_GRID))


def _dilation(cfg: CfgNode, key: str, possible: tuple[int, ...]) -> int:
    value = cfg.MODEL.RESNETS[key]
    if value not in possible:
        raise ConfigError(
            f"MODEL.RESNETS.{key} is {value}; here it can be {' or '.join(map(str, possible))}."
        )
    return value


def _build_fpn(
    cfg: CfgNode, input_shape: ShapeSpec, make_top: Callable[[Backbone], nn.Module]
) -> FPN:
    bottom_up = build_lambda_resnet_backbone(cfg, input_shape)
    if cfg.MODEL.RESNETS.RES5_DILATION != 1:
        raise ConfigError(
            f"MODEL.RESNETS.RES5_DILATION is {cfg.MODEL.RESNETS.RES5_DILATION}, but an FPN needs "
            "each stage at half the resolution of the one before; set it to 1."
        )
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

    def make_top(bottom_up: Backbone) -> nn.Module:
        channels = bottom_up.output_shape()["res5"].channels
        return LastLevelP6P7(channels, cfg.MODEL.FPN.OUT_CHANNELS)

    return _build_fpn(cfg, input_shape, make_top)
