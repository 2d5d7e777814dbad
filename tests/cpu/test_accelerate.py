"""Any model of Detectron2 with the kernels of this package."""

import copy

import torch
from detectron2.config import get_cfg
from detectron2.modeling import build_model
from detectron2.structures import Boxes
from torch import nn

import lambda_det
from lambda_det.cpu import pooling, winograd


@torch.no_grad()
def test_a_model_of_detectron2_computes_the_same():
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.BACKBONE.NAME = "build_resnet_fpn_backbone"
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 18, 64
    cfg.MODEL.FPN.IN_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.MODEL.RPN.IN_FEATURES = ["p2", "p3", "p4", "p5", "p6"]
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[32], [64], [128], [256], [512]]
    cfg.MODEL.ROI_HEADS.NAME = "StandardROIHeads"
    cfg.MODEL.ROI_HEADS.IN_FEATURES = ["p2", "p3", "p4", "p5"]
    cfg.MODEL.ROI_BOX_HEAD.NAME = "FastRCNNConvFCHead"
    cfg.MODEL.ROI_BOX_HEAD.NUM_FC = 1
    plain = build_model(cfg).eval()
    fast = lambda_det.accelerate(copy.deepcopy(plain))
    assert fast.state_dict().keys() == plain.state_dict().keys()
    kinds = {type(module) for module in fast.modules()}
    assert winograd._WinogradConv2d in kinds and pooling._ROIAlign in kinds
    convolutions = [m for m in fast.modules() if isinstance(m, nn.Conv2d) and m.kernel_size[0] > 1]
    assert all(m.weight.is_contiguous(memory_format=torch.channels_last) for m in convolutions)
    boxes = [Boxes(torch.tensor([[3.0, 5.0, 40.0, 60.0], [10.0, 0.0, 63.0, 21.0]]))]
    image = torch.randn(1, 3, 64, 64)
    found, expected = (
        {**model.backbone(image), "boxes": _pooled(model, image, boxes)} for model in (fast, plain)
    )
    for name, map in expected.items():
        assert (found[name] - map).abs().max() < 1e-5 * map.abs().max(), name


def _pooled(model, image, boxes):
    maps = model.backbone(image)
    return model.roi_heads.box_pooler([maps[name] for name in ("p2", "p3", "p4", "p5")], boxes)
