"""Detectors out of a configuration: unknown names, and models without values."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from detectron2.modeling.meta_arch.dense_detector import DenseDetector
from detectron2.structures import Instances
from detectron2.utils import comm
from torch import Tensor, nn

from lambda_det.detection.model import (
    LossNormalizers,
    build_model,
    channels_last_pays,
    for_inference,
    patch_point_rend,
)
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError
from tests.detection.tiny import on_meta
from tests.training.tiny_detector import tiny_config

CONFIGS = Path(__file__).parents[2] / "configs"


class Dense(DenseDetector):
    """Detectron2's, without its parts."""

    def __init__(self):
        nn.Module.__init__(self)


def test_a_resumed_retinanet_divides_its_losses_as_before():
    model = nn.Sequential(nn.Linear(1, 1), Dense())
    hook = LossNormalizers()
    hook.trainer = SimpleNamespace(model=model)
    assert hook.state_dict() == {}  # before the first step
    model[1]._ema_update("loss_normalizer", 7.5, 100.0)
    state = hook.state_dict()
    resumed = nn.Sequential(nn.Linear(1, 1), Dense())
    hook.trainer = SimpleNamespace(model=resumed)
    hook.load_state_dict(state)
    for detector in (model[1], resumed[1]):
        detector._ema_update("loss_normalizer", 20.0, 100.0)
    assert resumed[1].loss_normalizer == model[1].loss_normalizer != 100.0
    cfg = tiny_config()
    assert any(isinstance(hook, LossNormalizers) for hook in DetectionTask(cfg).build_hooks())


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("MODEL.BACKBONE.NAME", "build_resnet_fpn_backbon", "build_resnet_fpn_backbon"),
        ("MODEL.META_ARCHITECTURE", "GeneralisedRCNN", "GeneralisedRCNN"),
        ("MODEL.ROI_HEADS.NAME", "", ""),
        ("MODEL.FPN.NORM", "SynBN", "SynBN"),
        ("MODEL.FPN.IN_FEATURES", ["res2", "res3", "res4", "res6"], "res6"),
    ],
)
def test_an_unknown_name_is_one_sentence(key, value, name):
    cfg = tiny_config()
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError, match=f"^{key} .*'{name}"):
        on_meta(cfg)


def _images(count: int = 2) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    return [{"image": torch.rand(3, 64, 80, generator=generator) * 255} for _ in range(count)]


@pytest.mark.slow
def test_the_whole_detector_computes_channels_last_and_the_same():
    cfg = tiny_config()
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0
    outputs, layouts = {}, {}
    weights = None
    for channels_last in (False, True):
        cfg.MODEL.CHANNELS_LAST = channels_last
        model = build_model(cfg).eval()
        weights = weights or model.state_dict()
        model.load_state_dict(weights)
        seen = layouts[channels_last] = set()
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.BatchNorm2d):
                module.register_forward_hook(_note_layout(seen))
        with torch.no_grad():
            outputs[channels_last] = [found["instances"] for found in model(_images())]
    assert layouts[True] == {"last"} and layouts[False] == {"first"}
    for here, there in zip(outputs[True], outputs[False], strict=True):
        assert len(here) == len(there) > 0
        torch.testing.assert_close(
            here.pred_boxes.tensor, there.pred_boxes.tensor, rtol=1e-4, atol=1e-3
        )
        torch.testing.assert_close(here.scores, there.scores, rtol=1e-4, atol=1e-5)


def test_all_processes_of_a_training_have_one_layout(monkeypatch):
    monkeypatch.setattr(comm, "all_gather", lambda own: [own, True])
    assert not channels_last_pays("cpu", (512, 512))


@pytest.fixture
def processor(monkeypatch):
    def processor(capability: str, reason: str | None) -> None:
        """Let the processor have these instructions, and no kernels for a reason."""
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr("lambda_det.detection.model.missing", lambda: reason)

    return processor


@pytest.mark.parametrize("reason", [None, "there is no compiler"])
@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.parametrize(("smaller_side", "device"), [(64, "cpu"), (512, "cpu"), (512, "cuda")])
def test_the_layout_that_is_faster(capability, smaller_side, device, reason, processor):
    processor(capability, reason)
    fast = capability == "AVX512" or smaller_side < 512 or device == "cuda" or not reason
    assert channels_last_pays(device, (smaller_side, 1024)) == fast


@pytest.mark.slow
@pytest.mark.parametrize(("smaller_side", "fast"), [(64, True), (512, False)])
def test_a_training_has_the_layout_that_is_faster_there(smaller_side, fast, processor):
    processor("AVX2", "there is no compiler")
    cfg = tiny_config()
    cfg.merge_from_list(["INPUT.LSJ.ENABLED", True, "INPUT.LSJ.SIZE", smaller_side])
    cfg.MODEL.ROI_BOX_HEAD.NUM_CONV = 1
    model = DetectionTask(cfg).build_model()
    assert _layouts(model) == {"last" if fast else "first"}
    # Whatever it is in training
    assert _layouts(for_inference(model)) == {"last"}
    assert _layouts(for_inference(model, channels_last=False)) == _layouts(model)


def _layouts(model: nn.Module) -> set[str]:
    """Of the kernels whose size tells them apart."""
    kernels = [p for p in model.parameters() if p.dim() == 4 and min(p.shape[1:]) > 1]
    return {"first" if kernel.is_contiguous() else "last" for kernel in kernels}


def _note_layout(seen: set[str]):
    def hook(module: nn.Module, inputs: tuple, y: Tensor) -> None:
        if min(y.shape[1:]) > 1:
            last = y.is_contiguous(memory_format=torch.channels_last)
            seen.add("last" if last else "first")

    return hook


def _lambda_detector() -> nn.Module:
    torch.manual_seed(0)
    cfg = tiny_config()
    cfg.MODEL.BACKBONE.NAME = "build_lambda_resnet_fpn_backbone"
    cfg.MODEL.LAMBDA_RESNET.NAME = "lambda_resnet26_slim"
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0
    model = build_model(cfg)
    with torch.no_grad():
        for _ in range(3):  # statistics that are not those of a new norm
            model.train().backbone(torch.randn(4, 3, 64, 96))
    return model.eval()


@pytest.mark.slow
def test_keypoints_and_scores_of_bfloat16_are_not_rounded():
    torch.manual_seed(0)
    cfg = tiny_config()
    cfg.MODEL.MASK_ON, cfg.MODEL.KEYPOINT_ON = False, True
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0
    cfg.MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS = (8,)
    found = for_inference(build_model(cfg).eval(), "bfloat16")
    scores = []
    found.roi_heads.box_predictor.register_forward_hook(lambda *x: scores.append(x[-1][0]))
    with torch.no_grad():
        places = found(_images(1))[0]["instances"].pred_keypoints[..., :2]
    assert len(scores) == 1
    for exact in (places, *scores):
        assert exact.dtype == torch.float32
        assert (exact != exact.bfloat16()).any()


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_the_copy_for_inference_finds_the_same(precision, bound):
    model = _lambda_detector()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quick = for_inference(model, precision)
    images = model.preprocess_image(_images())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision != "float32"):
        found = quick.backbone(images.tensor)
        for_plain = quick(_images())
    with torch.no_grad():
        for name, expected in model.backbone(images.tensor).items():
            assert (found[name] - expected).abs().max() < bound * expected.abs().max(), name
    for instances in (result["instances"] for result in for_plain):
        assert len(instances) > 0
        assert instances.pred_boxes.tensor.dtype == instances.scores.dtype == torch.float32
    if precision == "float32":
        with torch.no_grad():
            for_model = model(_images())
        for one, two in zip(for_plain, for_model, strict=True):
            _assert_the_same(one["instances"], two["instances"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


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


@pytest.mark.parametrize(("key", "value"), [("PRECISION", "float8"), ("IMS_PER_BATCH", 0)])
def test_inference_that_cannot_be_is_refused_before_a_training(key, value):
    cfg = tiny_config()
    cfg.TEST[key] = value
    with pytest.raises(ConfigError, match=f"{key} is .*{value}"):
        DetectionTask(cfg)


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
