"""Any model of Detectron2 with the kernels of this package."""

import copy
import functools

import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import build_model
from detectron2.modeling.roi_heads import MaskRCNNConvUpsampleHead
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints
from detectron2.utils.events import EventStorage
from torch import nn
from torchvision.ops import boxes as box_ops

import lambda_det
from lambda_det.cpu import pooling, winograd
from lambda_det.native import missing

DETECTORS = {
    "Mask R-CNN": "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml",
    "RetinaNet": "COCO-Detection/retinanet_R_50_FPN_1x.yaml",
    "Cascade R-CNN": "Misc/cascade_mask_rcnn_R_50_FPN_1x.yaml",
    "Keypoint R-CNN": "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x.yaml",
    "Panoptic FPN": "COCO-PanopticSegmentation/panoptic_fpn_R_50_1x.yaml",
}
SMALL = {
    **{"DEVICE": "cpu", "RESNETS.DEPTH": 18, "RESNETS.RES2_OUT_CHANNELS": 64},
    **{"FPN.OUT_CHANNELS": 64, "RPN.POST_NMS_TOPK_TEST": 100, "RETINANET.SCORE_THRESH_TEST": 0.0},
    **{"ROI_HEADS.BATCH_SIZE_PER_IMAGE": 32, "ROI_HEADS.SCORE_THRESH_TEST": 0.0},
    **{"ROI_BOX_HEAD.FC_DIM": 32, "ROI_MASK_HEAD.CONV_DIM": 16, "RETINANET.NUM_CONVS": 1},
    **{"ROI_KEYPOINT_HEAD.CONV_DIMS": (16, 16), "SEM_SEG_HEAD.CONVS_DIM": 32},
}


def _model(name):
    """In float64, where rounding decides no order of scores, and with statistics of its own."""
    cfg = lambda_det.detectron2_config(DETECTORS[name])
    cfg.merge_from_list([x for key, value in SMALL.items() for x in (f"MODEL.{key}", value)])
    cfg.merge_from_list(["TEST.DETECTIONS_PER_IMAGE", 20])
    model = build_model(cfg).double()
    for norm in model.modules():
        if isinstance(norm, FrozenBatchNorm2d):
            for number in (norm.weight, norm.running_var):
                number.uniform_(0.5, 1)
            for number in (norm.bias, norm.running_mean):
                number.uniform_(-0.1, 0.1)
    return model


def _batch(classes):
    size, corner = (96, 128), torch.tensor([[10.0, 20.0], [60.0, 5.0]])
    objects = Instances(size)
    objects.gt_boxes = Boxes(torch.cat([corner, corner + 50], 1).double())
    objects.gt_classes = torch.tensor([0, classes - 1])
    objects.gt_masks = BitMasks(torch.rand(2, *size) > 0.5)
    points = corner[:, None] + torch.rand(2, 17, 2) * 50
    objects.gt_keypoints = Keypoints(torch.cat([points, torch.full((2, 17, 1), 2.0)], 2))
    image = torch.rand(3, *size, dtype=torch.float64) * 255
    return [{"image": image, "instances": objects, "sem_seg": torch.randint(54, size)}]


def _loss_and_gradients(model, batch):
    torch.manual_seed(0)  # which boxes are sampled
    with EventStorage():
        losses = model.train()(batch)
    wanted = [weight for weight in model.parameters() if weight.requires_grad]
    return *losses.values(), *torch.autograd.grad(sum(losses.values()), wanted)


@torch.no_grad()
def _found(model, batch):
    (found,) = model.eval()(batch)
    objects = found["instances"]
    assert len(objects)
    fields = [getattr(x, "tensor", x) for x in objects.get_fields().values()]
    return [*fields, *([found["sem_seg"]] if "sem_seg" in found else [])]


@pytest.fixture(autouse=True)
def _suppression_in_float32(monkeypatch):
    """Detectron2 decodes boxes in float32, and torchvision wants one dtype."""
    real = box_ops.batched_nms
    monkeypatch.setattr(
        box_ops, "batched_nms", lambda boxes, scores, *rest: real(boxes, scores.float(), *rest)
    )


def _spied(called, call, name, *args, **options):
    called.add(name)
    return call(name, *args, **options)


def _check_contiguous(module, inputs, output):
    assert output.is_contiguous()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.release if "Cascade" in name else ())
        for name in DETECTORS
    ],
)
def test_a_model_of_detectron2_computes_the_same_and_gets_back_what_it_was(name, monkeypatch):
    # Small maps of few channels, too
    monkeypatch.setitem(winograd._PAYS_FROM, torch.float64, (1, 1))
    monkeypatch.setattr(winograd, "_LEAST", 0)
    called = set()
    for module in (winograd, pooling):
        spied = functools.partial(_spied, called, module.call)
        monkeypatch.setattr(module, "call", spied)
    plain = _model(name)
    fast, batch = lambda_det.accelerate(copy.deepcopy(plain)), _batch(1 if "Key" in name else 80)
    kinds = {type(module) for module in fast.modules()}
    assert winograd._Conv2d in kinds and (name == "RetinaNet" or pooling._ROIAlign in kinds)
    if "Panoptic" in name:  # its scores are enlarged, which copies a map that is channels last
        fast.sem_seg_head.predictor.register_forward_hook(_check_contiguous)
    again = lambda_det.accelerate(copy.deepcopy(fast), False)
    assert [type(m) for m in again.modules()] == [type(m) for m in plain.modules()]
    for measured in (_loss_and_gradients, _found):
        expected = measured(plain, batch)
        for model in (fast, again):
            for got, wanted in zip(measured(model, batch), expected, strict=True):
                # Boxes and the masks' truth are float32
                got, wanted = got.double(), wanted.double()
                assert (got - wanted).abs().max() <= 1e-9 + 1e-6 * wanted.abs().max()
    kernels = {"convolve", "convolution_gradient", "pool", "pool_gradient"}
    if missing() is None:
        assert kernels - called == ({"pool", "pool_gradient"} if name == "RetinaNet" else set())
    for model in (fast, again):
        for (key, weight), (own, same) in zip(
            model.state_dict().items(), plain.state_dict().items(), strict=True
        ):
            assert key == own and torch.equal(weight, same)
    for model, layout in ((fast, torch.channels_last), (again, torch.contiguous_format)):
        convs = (module for module in model.modules() if isinstance(module, nn.Conv2d))
        assert all(conv.weight.is_contiguous(memory_format=layout) for conv in convs)


@torch.no_grad()
def test_a_hook_before_an_activation_keeps_the_map_that_it_saw():
    head = lambda_det.accelerate(_model("Mask R-CNN")).roi_heads.mask_head
    kept = []
    head.deconv.register_forward_hook(lambda module, args, y: kept.append((y, y.clone())))
    lambda_det.accelerate(head)
    head.layers(torch.randn(2, 64, 5, 6, dtype=torch.float64))
    ((seen, as_it_was),) = kept
    assert (as_it_was < 0).any() and torch.equal(seen, as_it_was)


class _WithAnotherLoss(MaskRCNNConvUpsampleHead):
    """Computes its layers as Detectron2's does."""


class _WithTwoMaps(MaskRCNNConvUpsampleHead):
    def layers(self, x):
        before = self.deconv(x)
        return self.predictor(self.deconv_relu(before) + before)


@pytest.mark.parametrize(("kind", "is_inplace"), [(_WithAnotherLoss, True), (_WithTwoMaps, False)])
def test_a_mask_head_of_another_project_is_taken_where_its_layers_are_the_same(kind, is_inplace):
    model = _model("Mask R-CNN")
    model.roi_heads.mask_head.__class__ = kind
    assert lambda_det.accelerate(model).roi_heads.mask_head.deconv_relu.inplace is is_inplace
    assert not lambda_det.accelerate(model, False).roi_heads.mask_head.deconv_relu.inplace
