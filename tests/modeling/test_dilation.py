"""Dilated stages: against undilated ones and the strided network, and the keys for them."""

from __future__ import annotations

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.modeling import build_backbone
from detectron2.projects.deeplab import add_deeplab_config
from torch import nn

import lambda_det
from lambda_det.errors import ConfigError
from lambda_det.modeling.resnet import Bottleneck

DILATED = {"res4": 2, "res5": 4}


def _cfg(name="build_lambda_resnet_backbone", deeplab=False):
    cfg = get_cfg()
    lambda_det.add_lambda_config(cfg)
    if deeplab:
        add_deeplab_config(cfg)
        cfg.MODEL.RESNETS.RES5_MULTI_GRID = [1, 2]
    cfg.MODEL.BACKBONE.NAME = name
    cfg.MODEL.LAMBDA_RESNET.NAME = "lambda_resnet26"
    cfg.MODEL.LAMBDA_RESNET.SCOPE = 7
    cfg.MODEL.FPN.IN_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.MODEL.FPN.OUT_CHANNELS = 16
    return cfg


def _random_norms(module: nn.Module) -> nn.Module:
    """Norms that do something, and a last one that is not zero."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias)
            nn.init.normal_(part.running_mean)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    return module


@pytest.mark.parametrize("dilation", [2, 3])
@pytest.mark.parametrize("options", [None, {"scope": 5, "content": False, "heads": 2}])
def test_a_dilated_block_is_the_plain_block_on_every_subgrid(dilation, options):
    """Positions of one remainder see each other alone, as on a map of their own."""
    blocks = [
        Bottleneck(16, 16, bottleneck_channels=8, dilation=d, lambda_options=options)
        for d in (1, dilation)
    ]
    plain, dilated = (_random_norms(block).double().eval() for block in blocks)
    dilated.load_state_dict(plain.state_dict())
    x = torch.randn(2, 16, 11, 13, dtype=torch.float64, requires_grad=True)
    expected = torch.empty_like(x)
    for i in range(dilation):
        for j in range(dilation):
            expected[:, :, i::dilation, j::dilation] = plain(x[:, :, i::dilation, j::dilation])
    found = dilated(x)
    assert torch.allclose(found, expected, atol=1e-11)
    weight = torch.randn_like(x)
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, expected)]
    assert torch.allclose(*gradients, atol=1e-11)


def test_a_dilated_stage_holds_the_strided_stage_in_between():
    """Vanilla blocks have no pooling: what a stride leaves out is all that a dilation adds.

    The network with stride 2 in res5 equals that of dilation 2 at every other position, but for the
    first block, whose convolution looks twice as far (Detectron2's convention); with that one's
    dilation set back they are equal.
    """
    strided = lambda_det.create_backbone("resnet50", out_features=["res5"])
    dilated = lambda_det.create_backbone("resnet50", out_features=["res5"], dilation={"res5": 2})
    strided, dilated = (_random_norms(net).double().eval() for net in (strided, dilated))
    dilated.load_state_dict(strided.state_dict())
    x = torch.rand(1, 3, 70, 100, dtype=torch.float64)
    with torch.no_grad():
        expected = strided(x)["res5"]
        assert not torch.allclose(dilated(x)["res5"][:, :, ::2, ::2], expected)
        first = dilated.res5[0].conv2
        first.dilation, first.padding = (1, 1), (1, 1)
        assert torch.allclose(dilated(x)["res5"][:, :, ::2, ::2], expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("dilation", "strides", "sizes"),
    [
        (None, [4, 8, 16, 32], [(25, 33), (13, 17), (7, 9), (4, 5)]),
        ({"res5": 2}, [4, 8, 16, 16], [(25, 33), (13, 17), (7, 9), (7, 9)]),
        (DILATED, [4, 8, 8, 8], [(25, 33), (13, 17), (13, 17), (13, 17)]),
        ({"res4": 2, "res5": 2}, [4, 8, 8, 16], [(25, 33), (13, 17), (13, 17), (7, 9)]),
    ],
)
def test_strides_sizes_and_weights(dilation, strides, sizes):
    plain = lambda_det.create_backbone("lambda_resnet26", scope=7)
    net = lambda_det.create_backbone("lambda_resnet26", scope=7, dilation=dilation)
    assert [shape.stride for shape in net.output_shape().values()] == strides
    with torch.no_grad():
        features = net.eval()(torch.randn(1, 3, 97, 130))
    assert [tuple(f.shape[-2:]) for f in features.values()] == sizes
    assert {n: t.shape for n, t in net.state_dict().items()} == {
        n: t.shape for n, t in plain.state_dict().items()
    }


def test_the_keys_of_detectron2_reach_the_blocks():
    cfg = _cfg()
    cfg.MODEL.RESNETS.RES5_DILATION = 2
    net = build_backbone(cfg)
    assert [block.stride for block in net.res5] == [1, 1]
    assert [block.conv2.dilation for block in net.res5] == [2, 2]  # all lambda layers
    assert net.output_shape()["res5"].stride == 16
    cfg = _cfg("build_lambda_resnet_deeplab_backbone", deeplab=True)
    cfg.MODEL.RESNETS.RES4_DILATION, cfg.MODEL.RESNETS.RES5_DILATION = 2, 4
    net = build_backbone(cfg)
    assert [block.conv2.dilation for block in net.res4] == [(2, 2), 2]
    assert [block.conv2.dilation for block in net.res5] == [4, 8]
    assert [net.output_shape()[n].stride for n in ("res4", "res5")] == [8, 8]


def test_keys_of_deeplab_do_nothing_where_its_builder_is_not_named():
    """add_deeplab_config sets a multi-grid that only its own backbone looks at."""
    net = build_backbone(_cfg(deeplab=True))
    assert [block.conv2.dilation for block in net.res5] == [1, 1]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("RES5_DILATION", 3, "RES5_DILATION is 3"),
        ("RES5_DILATION", 4, "can be 1 or 2"),
        ("DEFORM_ON_PER_STAGE", [False, False, False, True], "deformable"),
        ("NUM_GROUPS", 32, "grouped convolutions"),
        ("RES4_DILATION", 2, "build_lambda_resnet_deeplab_backbone"),
    ],
)
def test_what_the_plain_backbone_cannot_follow_is_refused(key, value, words):
    cfg = _cfg(deeplab=True)
    cfg.MODEL.RESNETS[key] = value
    with pytest.raises(ConfigError, match=words):
        build_backbone(cfg)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RES4_DILATION": 2, "RES5_DILATION": 2}, "it must be 4"),
        ({"RES4_DILATION": 4, "RES5_DILATION": 4}, "can be 1 or 2"),
        ({"RES5_MULTI_GRID": [1, 2, 4]}, "res5 of this network has 2 blocks"),
    ],
)
def test_what_the_deeplab_backbone_cannot_follow_is_refused(changes, words):
    cfg = _cfg("build_lambda_resnet_deeplab_backbone", deeplab=True)
    for key, value in changes.items():
        cfg.MODEL.RESNETS[key] = value
    with pytest.raises(ConfigError, match=words):
        build_backbone(cfg)


def test_other_refusals():
    with pytest.raises(ConfigError, match="add_deeplab_config"):
        build_backbone(_cfg("build_lambda_resnet_deeplab_backbone"))
    cfg = _cfg("build_lambda_resnet_fpn_backbone")
    cfg.MODEL.RESNETS.RES5_DILATION = 2
    with pytest.raises(ConfigError, match="half the resolution"):
        build_backbone(cfg)
    cfg = _cfg()
    cfg.MODEL.LAMBDA_RESNET.NAME, cfg.MODEL.LAMBDA_RESNET.SCOPE = "mobilenet_v2_lambda", 0
    cfg.MODEL.RESNETS.RES5_DILATION = 2
    with pytest.raises(ConfigError, match="mobilenet_v2_lambda cannot be dilated"):
        build_backbone(cfg)
    for dilation in ({"res4": 2}, {"res5": 0}, {"res2": 2}):
        with pytest.raises(ConfigError, match="The dilation of"):
            lambda_det.create_backbone("lambda_resnet26", dilation=dilation)
