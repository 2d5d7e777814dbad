"""Detectors out of a configuration: the layout of their maps, and their copy for inference."""

import copy
from types import SimpleNamespace

import pytest
import torch
from detectron2.modeling.meta_arch.dense_detector import DenseDetector
from detectron2.structures import Instances
from detectron2.utils import comm
from torch import Tensor, nn

from lambda_det.detection.model import (
    LossNormalizers,
    channels_last_pays,
    for_inference,
    patch_point_rend,
)
from lambda_det.detection.task import DetectionTask
from tests.training.tiny_detector import tiny_config


class Dense(DenseDetector):
    """Detectron2's, without its parts."""

    def __init__(self):
        nn.Module.__init__(self)


def test_a_resumed_retinanet_divides_its_losses_as_before():
    whole, resumed = (nn.Sequential(nn.Linear(1, 1), Dense()) for _ in range(2))
    hook = LossNormalizers()
    hook.trainer = SimpleNamespace(model=whole)
    assert hook.state_dict() == {}  # before the first step
    whole[1]._ema_update("loss_normalizer", 7.5, 100.0)
    state = hook.state_dict()
    hook.trainer = SimpleNamespace(model=resumed)
    hook.load_state_dict(state)
    for model in (whole, resumed):
        model[1]._ema_update("loss_normalizer", 20.0, 100.0)
    assert resumed[1].loss_normalizer == whole[1].loss_normalizer != 100.0
    hooks = DetectionTask(tiny_config()).build_hooks()
    assert any(isinstance(hook, LossNormalizers) for hook in hooks)


def _images(count: int = 2) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    return [{"image": torch.rand(3, 64, 80, generator=generator) * 255} for _ in range(count)]


@pytest.mark.slow
def test_the_whole_detector_computes_channels_last_and_the_same():
    cfg = tiny_config()
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0
    outputs, layouts, weights = [], [], None
    for cfg.MODEL.CHANNELS_LAST in (False, True):
        model = DetectionTask(cfg).build_model().eval()
        weights = weights or model.state_dict()
        model.load_state_dict(weights)
        layouts.append(set())
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.BatchNorm2d):
                seen = layouts[-1]
                module.register_forward_hook(lambda *x, seen=seen: seen.update(_layouts(x[-1])))
        with torch.no_grad():
            outputs.append([found["instances"] for found in model(_images())])
    assert layouts == [{"first"}, {"last"}]
    for here, there in zip(*outputs, strict=True):
        _assert_the_same(here, there)


@pytest.fixture
def processor(monkeypatch):
    def processor(capability: str, reason: str | None) -> None:
        """Let the processor have these instructions, and no kernels for a reason."""
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr("lambda_det.detection.model.missing", lambda: reason)

    return processor


@pytest.mark.parametrize(
    ("capability", "reason", "device", "others", "fast"),
    [
        ("AVX2", "no compiler", "cpu", False, False),
        ("AVX512", "no compiler", "cpu", False, True),
        ("AVX2", None, "cpu", False, True),
        ("AVX2", "no compiler", "cuda", False, True),
        ("AVX512", None, "cpu", True, False),  # all processes of a training have one layout
    ],
)
def test_the_layout_that_is_faster(
    capability, reason, device, others, fast, processor, monkeypatch
):
    processor(capability, reason)
    monkeypatch.setattr(comm, "all_gather", lambda own: [own, others])
    assert channels_last_pays(device) == fast


@pytest.mark.slow
@pytest.mark.parametrize(("reason", "layout"), [(None, "last"), ("no compiler", "first")])
def test_a_training_has_the_layout_that_is_faster_there(reason, layout, processor):
    processor("AVX2", reason)
    cfg = tiny_config()
    cfg.MODEL.ROI_BOX_HEAD.NUM_CONV = 1
    model = DetectionTask(cfg).build_model()
    assert _layouts(*model.parameters()) == {layout}
    # Whatever it is in training
    assert _layouts(*for_inference(model).parameters()) == {"last"}
    assert _layouts(*for_inference(model, channels_last=False).parameters()) == {layout}


def _layouts(*tensors: Tensor) -> set[str]:
    """Of kernels and maps whose size tells them apart."""
    tensors = [x for x in tensors if x.dim() == 4 and min(x.shape[1:]) > 1]
    last = {x.is_contiguous(memory_format=torch.channels_last) for x in tensors}
    return {"last" if is_last else "first" for is_last in last}


def test_of_equal_proposals_the_same_are_taken_whatever_topk_does(monkeypatch):
    """An RPN whose hidden channels are 0 gives the same logit at each place."""
    cfg = tiny_config()
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0
    cfg.MODEL.RPN.PRE_NMS_TOPK_TEST = 20
    model = DetectionTask(cfg).build_model().eval()
    torch.nn.init.constant_(model.proposal_generator.rpn_head.conv.weight, 0)
    model, topk = for_inference(model), Tensor.topk

    def backward(values: Tensor, count: int, dim: int) -> tuple[Tensor, Tensor]:
        found, index = topk(values.flip(dim), count, dim)
        return found, values.shape[dim] - 1 - index

    found = []
    for each in (topk, backward):
        monkeypatch.setattr(Tensor, "topk", each)
        with torch.no_grad():
            found.append(model(_images(1))[0]["instances"].pred_boxes.tensor)
    assert len(found[0])
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_keypoints_and_scores_of_bfloat16_are_not_rounded():
    cfg = tiny_config()
    cfg.MODEL.MASK_ON, cfg.MODEL.KEYPOINT_ON = False, True
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0
    cfg.MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS = (8,)
    found = for_inference(DetectionTask(cfg).build_model().eval(), "bfloat16")
    scores = []
    found.roi_heads.box_predictor.register_forward_hook(lambda *x: scores.append(x[-1][0]))
    with torch.no_grad():
        places = found(_images(1))[0]["instances"].pred_keypoints[..., :2]
    assert len(scores) == 1
    for exact in (places, *scores):
        assert exact.dtype == torch.float32
        assert (exact != exact.bfloat16()).any()


@pytest.mark.slow
def test_masks_of_bfloat16_are_pasted_in_float32():
    cfg = tiny_config()
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0
    found = for_inference(DetectionTask(cfg).build_model().eval(), "bfloat16")
    kinds = []
    found.roi_heads.register_forward_hook(
        lambda *x: kinds.extend(instances.pred_masks.dtype for instances in x[-1][0])
    )
    with torch.no_grad():
        found(_images(1))
    assert kinds == [torch.float32]


def _assert_the_same(found: Instances, expected: Instances) -> None:
    """To 1e-5 of the values, of the image's side for boxes; classes exactly.

    Logits of masks are near 0, so that pixels may turn at the threshold.
    """
    boxes, scores = expected.pred_boxes.tensor, expected.scores
    assert len(found) == len(expected) > 0
    bound = 1e-5 * max(expected.image_size)
    torch.testing.assert_close(found.pred_boxes.tensor, boxes, rtol=0, atol=bound)
    torch.testing.assert_close(found.scores, scores, rtol=1e-5, atol=0)
    assert torch.equal(found.pred_classes, expected.pred_classes)
    assert (found.pred_masks != expected.pred_masks).float().mean() < 1e-4


class PointRendMaskHead(nn.Module):
    """As that of Detectron2's project, for which a batch without foreground is an error."""

    mask_point_train_num_points = 5

    def _sample_train_points(self, coarse_mask, instances):
        return torch.cat([torch.ones(len(found)) for found in instances if len(found)])


def test_point_rend_trains_on_a_batch_without_foreground():
    model = nn.Sequential(PointRendMaskHead())
    patch_point_rend(model)
    for head in (model[0], copy.deepcopy(model)[0]):
        assert head._sample_train_points(None, [Instances((4, 4), a=[1])]).tolist() == [1]
        points, labels = head._sample_train_points(torch.ones(1, 2), [Instances((4, 4), a=[])] * 2)
        assert points.shape == (0, 5, 2) and labels.shape == (0, 5)
