"""Backbones that Detectron2 builds from a configuration."""

from dataclasses import dataclass

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.modeling import build_backbone
from detectron2.projects.deeplab import add_deeplab_config

import lambda_det
from lambda_det.config import leaves
from lambda_det.errors import ConfigError
from lambda_det.layers import LambdaLayer
from lambda_det.modeling import build
from lambda_det.modeling.complexity import measure_named
from lambda_det.modeling.mobilenet import MobileNetV2
from lambda_det.modeling.specs import SPECS, MobileNetSpec

PLAIN, FPN, DEEPLAB = (f"build_lambda_resnet_{kind}backbone" for kind in ("", "fpn_", "deeplab_"))
MOBILENET = {"NAME": "mobilenet_v2_lambda", "SCOPE": 0}


def _cfg(name=PLAIN, deeplab=False):
    cfg = get_cfg()
    lambda_det.add_lambda_config(cfg)
    if deeplab:
        add_deeplab_config(cfg)
        cfg.MODEL.RESNETS.RES5_MULTI_GRID = [1, 2]
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.BACKBONE.NAME = name
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.LAMBDA_RESNET.NAME = "lambda_resnet26_slim"
    cfg.MODEL.LAMBDA_RESNET.SCOPE = 7
    cfg.MODEL.FPN.IN_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.MODEL.FPN.OUT_CHANNELS = 16
    return cfg


def test_config_adds_keys_and_changes_none():
    plain, ours = get_cfg(), get_cfg()
    lambda_det.add_lambda_config(ours)
    before, after = dict(leaves(plain)), dict(leaves(ours))
    assert before.items() <= after.items() and len(after) > len(before)


@pytest.mark.parametrize(
    ("kind", "first", "sides"), [("", 2, [24, 12, 6, 3, 2]), ("retinanet_", 3, [12, 6, 3, 2, 1])]
)
def test_fpn(kind, first, sides):
    cfg = _cfg(f"build_{kind}lambda_resnet_fpn_backbone")
    cfg.MODEL.FPN.IN_FEATURES = [f"res{n}" for n in range(first, 6)]
    backbone = build_backbone(cfg)
    features = backbone.eval()(torch.randn(1, 3, 64, 96))
    names = [f"p{n}" for n in range(first, first + 5)]
    assert {name: x.shape[-1] for name, x in features.items()} == dict(
        zip(names, sides, strict=True)
    )
    assert backbone.size_divisibility == 32


def test_options_reach_the_layers():
    cfg = _cfg()
    options = cfg.MODEL.LAMBDA_RESNET
    options.NAME, options.NORM = "lambda_resnet26", "GN"
    options.QUERY_DEPTH, options.HEADS, options.INTRA_DEPTH = 32, 8, 2
    options.IMPLEMENTATION, options.MASK_PADDING, options.STOCHASTIC_DEPTH = "dense", True, 0.1
    options.CHECKPOINT_ACTIVATIONS, cfg.MODEL.BACKBONE.FREEZE_AT = True, 1
    backbone = build_backbone(cfg)
    layer = next(m for m in backbone.modules() if isinstance(m, LambdaLayer))
    assert (layer.query_depth, layer.heads, layer.intra_depth) == (32, 8, 2)
    assert layer.position.embedding.shape[-1] == 7 and layer.implementation == "dense"
    assert type(layer.query_norm).__name__ == "GroupNorm"
    assert backbone.padding is not None and backbone.checkpoint_activations
    assert not backbone.stem.conv1.weight.requires_grad
    assert backbone.res5[0].drop.p == pytest.approx(0.1)


# Dilated stages: keys of Detectron2 and DeepLab


def test_the_keys_of_detectron2_reach_the_blocks():
    cfg = _cfg()
    cfg.MODEL.RESNETS.RES5_DILATION = 2
    net = build_backbone(cfg)
    assert [block.stride for block in net.res5] == [1, 1]
    assert [block.conv2.dilation for block in net.res5] == [2, 2]  # all lambda layers
    assert net.output_shape()["res5"].stride == 16
    cfg = _cfg(DEEPLAB, deeplab=True)
    cfg.MODEL.RESNETS.RES4_DILATION, cfg.MODEL.RESNETS.RES5_DILATION = 2, 4
    net = build_backbone(cfg)
    assert [block.conv2.dilation for block in net.res4] == [(2, 2), 2]
    assert [block.conv2.dilation for block in net.res5] == [4, 8]
    assert [net.output_shape()[n].stride for n in ("res4", "res5")] == [8, 8]


@pytest.mark.parametrize(("builder", "deeplab"), [(PLAIN, True), (DEEPLAB, False)])
def test_the_multi_grid_is_read_by_deeplab_s_builder_where_it_is_set(builder, deeplab):
    """add_deeplab_config sets one; without that call there is none, and nothing is dilated."""
    net = build_backbone(_cfg(builder, deeplab))
    assert [block.conv2.dilation for block in net.res5] == [1, 1]


@pytest.mark.parametrize(
    ("builder", "lambda_resnet", "resnets", "words"),
    [
        (PLAIN, {**MOBILENET, "MASK_PADDING": True}, {}, "MASK_PADDING"),
        (PLAIN, MOBILENET, {"RES5_DILATION": 2}, r"mobilenet_v2_lambda.*RES5_DILATION"),
        (FPN, {**MOBILENET, "SCOPE": 7, "STAGE_SCOPES": [3, 3, 3, 3]}, {}, "stage_scopes"),
        (PLAIN, {}, {"RES5_DILATION": 3}, "RES5_DILATION is 3"),
        (PLAIN, {}, {"RES4_DILATION": 2}, DEEPLAB),
        (PLAIN, {}, {"DEFORM_ON_PER_STAGE": [False, False, False, True]}, "DEFORM_ON_PER_STAGE"),
        (PLAIN, {}, {"NUM_GROUPS": 32}, "NUM_GROUPS"),
        (FPN, {}, {"RES5_DILATION": 2}, "RES5_DILATION is 2"),
        (DEEPLAB, {}, {"RES4_DILATION": 2, "RES5_DILATION": 2}, "RES5_DILATION is 2"),
        (DEEPLAB, {}, {"RES4_DILATION": 4, "RES5_DILATION": 4}, "RES._DILATION is 4"),
        (DEEPLAB, {}, {"RES5_MULTI_GRID": [1, 2, 4]}, "RES5_MULTI_GRID is .1, 2, 4."),
    ],
)
def test_keys_that_cannot_work_are_refused(builder, lambda_resnet, resnets, words):
    cfg = _cfg(builder, deeplab=True)
    for section, changes in (("LAMBDA_RESNET", lambda_resnet), ("RESNETS", resnets)):
        for key, value in changes.items():
            cfg.MODEL[section][key] = value
    with pytest.raises(ConfigError, match=words):
        build_backbone(cfg)


@dataclass(frozen=True)
class _PlainSpec(MobileNetSpec):
    """Of a kind of its own."""


class _Plain(MobileNetV2):
    """A kind of network that takes no norm and no options of lambda layers."""

    def __init__(self, spec, *, out_features=None, num_classes=None, freeze_at=0):
        what = {"out_features": out_features, "num_classes": num_classes, "freeze_at": freeze_at}
        super().__init__(spec, **what)


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setitem(build.NETWORK_KINDS, _PlainSpec, _Plain)
    monkeypatch.setitem(SPECS, "plain", _PlainSpec())
    cfg = _cfg()
    cfg.MODEL.LAMBDA_RESNET.NAME, cfg.MODEL.LAMBDA_RESNET.SCOPE = "plain", 0
    return cfg


def test_a_kind_of_network_is_a_row_of_the_table(plain):
    """It is built by its name and counted, and says itself which options it takes."""
    assert type(build_backbone(plain)) is _Plain
    classifier = lambda_det.create_classifier("plain", 1000)
    assert measure_named("plain", 64).params == sum(p.numel() for p in classifier.parameters())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("LAMBDA_RESNET.NORM", "FrozenBN"),
        ("LAMBDA_RESNET.SCOPE", 7),
        ("RESNETS.RES5_DILATION", 2),
    ],
)
def test_an_option_that_a_kind_of_network_does_not_take_is_refused(plain, key, value):
    plain.merge_from_list([f"MODEL.{key}", value])
    with pytest.raises(ConfigError, match=f"plain .*{key.partition('.')[2]}"):
        build_backbone(plain)
