"""The C4 layout: the res5 of the network itself in the heads."""

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.modeling import build_model
from detectron2.structures import Boxes, ImageList, Instances

import lambda_det
from lambda_det.errors import ConfigError
from lambda_det.layers import LambdaLayer
from lambda_det.weights.loading import load

C4 = """MODEL.DEVICE cpu MODEL.BACKBONE.NAME build_lambda_resnet_backbone MODEL.BACKBONE.FREEZE_AT 0
MODEL.LAMBDA_RESNET.NAME lambda_resnet26_slim MODEL.LAMBDA_RESNET.SCOPE 7
MODEL.LAMBDA_RESNET.OUT_FEATURES ['res4'] MODEL.ROI_HEADS.NAME LambdaRes5ROIHeads
MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION 6"""


def _c4_cfg(*pairs):
    cfg = get_cfg()
    lambda_det.add_lambda_config(cfg)
    cfg.merge_from_list([*C4.split(), *pairs])
    return cfg


def test_the_res5_of_the_c4_heads_is_that_of_the_network():
    model = build_model(_c4_cfg()).eval()
    whole = lambda_det.create_backbone("lambda_resnet26_slim", scope=7).eval()
    assert not hasattr(model.backbone, "res5")
    whole.res5.load_state_dict(model.roi_heads.res5.state_dict())
    assert any(isinstance(m, LambdaLayer) for m in model.roi_heads.res5.modules())
    regions = torch.randn(3, 256, 6, 6)
    with torch.no_grad():
        expected = whole.res5[1](whole.res5[0](regions))
        assert torch.equal(model.roi_heads.res5(regions), expected)
    assert expected.shape == (3, 512, 3, 3)


@pytest.mark.parametrize("prefix", ["", "module.backbone.bottom_up."])
def test_the_weights_of_a_classifier_land_in_both_places(tmp_path, prefix):
    source = lambda_det.create_classifier("lambda_resnet26_slim", num_classes=3, scope=7).backbone
    path = tmp_path / "weights.pth"
    torch.save({"model": {prefix + n: t for n, t in source.state_dict().items()}}, path)
    model = build_model(_c4_cfg())
    load(model, str(path))
    own = model.state_dict()
    for name, tensor in source.state_dict().items():
        if not name.startswith("linear"):
            place = "roi_heads." if name.startswith("res5") else "backbone."
            assert torch.equal(own[place + name], tensor), name


def test_images_without_a_region():
    model = build_model(_c4_cfg()).eval()
    proposals = Instances((64, 64), proposal_boxes=Boxes(torch.zeros(0, 4)))
    proposals.objectness_logits = torch.zeros(0)
    features = {"res4": torch.randn(1, 256, 4, 4)}
    images = ImageList(torch.zeros(1, 3, 64, 64), [(64, 64)])
    with torch.no_grad():
        (result,), _ = model.roi_heads(images, features, [proposals])
    assert result.image_size == (64, 64) and len(result) == 0


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("LAMBDA_RESNET.NAME", "mobilenet_v2", "mobilenet_v2"),
        ("LAMBDA_RESNET.CHECKPOINT_ACTIVATIONS", True, "CHECKPOINT_ACTIVATIONS"),
        ("LAMBDA_RESNET.MASK_PADDING", True, "MASK_PADDING"),
        ("LAMBDA_RESNET.SHARE_POSITIONS", "size", "SHARE_POSITIONS"),
        ("ROI_HEADS.IN_FEATURES", ["res3"], "IN_FEATURES.*res4"),
        ("RESNETS.RES5_DILATION", 2, "RES5_DILATION"),
    ],
)
def test_what_the_c4_heads_cannot_follow_is_refused(key, value, words):
    cfg = _c4_cfg("MODEL.LAMBDA_RESNET.OUT_FEATURES", ["res3", "res4"], f"MODEL.{key}", value)
    if value == "mobilenet_v2":
        cfg.MODEL.LAMBDA_RESNET.SCOPE = 0
        cfg.MODEL.RPN.IN_FEATURES = ["res4"]
    with pytest.raises(ConfigError, match=words):
        build_model(cfg)
