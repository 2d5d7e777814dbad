"""Whole detectors: the same detections from the file, whatever the size and however many."""

import dataclasses
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from detectron2.modeling.meta_arch.fcos import FCOS, FCOSHead
from torch import nn

from lambda_det.detection import load_config
from lambda_det.detection.model import build_model
from lambda_det.errors import ConfigError
from lambda_det.export import FORMATS, detector_network, export_network
from lambda_det.export.detections import exportable_detections
from lambda_det.export.networks import Network
from lambda_det.export.session import Report, compare
from tests.detection.heads.tiny import CONFIGS, HEADS
from tests.export.conftest import needs_any_size
from tests.export.tiny import lambda_detector_config, scramble

DENSE = ["p5", "p6", "p7"]  # of RetinaNet and FCOS: few levels, each of which finds something


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return scramble(build_model(lambda_detector_config()))


def head(name: str):
    """The detector of a shipped configuration, made small, that finds something everywhere."""
    if name == "fcos":
        return fcos()
    small = HEADS[name]
    arguments = Namespace(config_file=str(CONFIGS / f"{small.config}.yaml"), opts=small.opts())
    cfg = load_config(arguments).clone()
    cfg.defrost()
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.2
    cfg.MODEL.RETINANET.SCORE_THRESH_TEST = 0.009  # of the prior 0.01
    cfg.TEST.DETECTIONS_PER_IMAGE = 10  # scores that are apart by more than rounding
    if name in ("faster_rcnn", "cascade_mask_rcnn", "retinanet"):  # those that tests export
        cfg.MODEL.LAMBDA_RESNET.NAME = "resnet14_slim_lambda_c5"
    if name in ("faster_rcnn", "cascade_mask_rcnn"):  # two levels less take a third of the time
        cfg.MODEL.FPN.IN_FEATURES = ["res4", "res5"]
        for part in (cfg.MODEL.RPN, cfg.MODEL.ROI_HEADS):
            part.IN_FEATURES = part.IN_FEATURES[2:]
        cfg.MODEL.ANCHOR_GENERATOR.SIZES = cfg.MODEL.ANCHOR_GENERATOR.SIZES[2:]
    elif name == "retinanet":
        cfg.MODEL.RETINANET.IN_FEATURES = DENSE
        cfg.MODEL.ANCHOR_GENERATOR.SIZES = cfg.MODEL.ANCHOR_GENERATOR.SIZES[2:]
    torch.manual_seed(0)
    return scramble(build_model(cfg))


def fcos() -> FCOS:
    """On the features of the RetinaNet; Detectron2 has it as a LazyConfig alone."""
    backbone = head("retinanet").backbone
    shapes = {name: backbone.output_shape()[name] for name in DENSE}
    made = FCOS(
        backbone=backbone,
        head=FCOSHead(input_shape=list(shapes.values()), num_classes=3, conv_dims=[16]),
        head_in_features=list(shapes),
        num_classes=3,
        test_score_thresh=0.05,
        max_detections_per_image=10,
        pixel_mean=[103.53, 116.28, 123.675],
        pixel_std=[57.0] * 3,
    )
    return scramble(made)


def test_the_choice_of_boxes_is_detectron2s(model):
    """Boxes of no size, NaN, ties and more than are wanted, without any export."""
    from detectron2.modeling.roi_heads.fast_rcnn import fast_rcnn_inference

    from lambda_det.export.detections import _fast_rcnn_inference

    for count in (0, 1, 40):
        boxes = torch.rand(count, 3, 4) * 60 - 5
        boxes[..., 2:] += boxes[..., :2]
        scores = torch.rand(count, 4)
        if count > 2:
            boxes[1, 0, 0], scores[2, 1] = float("nan"), float("inf")
        arguments = ([boxes.flatten(1)], [scores], [(50, 40)], 0.3, 0.5, 20)
        (expected,), _ = fast_rcnn_inference(*arguments)
        (found,), _ = _fast_rcnn_inference(*arguments)
        assert torch.equal(found.pred_boxes.tensor, expected.pred_boxes.tensor)
        assert torch.equal(found.scores, expected.scores)
        assert torch.equal(found.pred_classes, expected.pred_classes)


@pytest.mark.parametrize(
    "name", ["faster_rcnn", "c4", "dc5", "cascade_mask_rcnn", "retinanet", "fcos"]
)
def test_what_torch_export_records_is_what_detectron2_computes(name):
    """The heads that it carries, in the form of the graph, without recording it."""
    network = detector_network(head(name))
    most = 0
    for size in ((64, 96), (45, 70), (20, 20)):
        image = torch.rand(3, *size) * 255
        expected = network.original(image)
        with exportable_detections():
            found = network.module(image)
        assert set(found) == set(expected)
        for field, tensor in expected.items():
            torch.testing.assert_close(found[field], tensor, rtol=1e-4, atol=1e-3)
        most = max(most, len(expected["scores"]))
    assert most > 1


@pytest.mark.slow
@needs_any_size
@pytest.mark.parametrize("name, words", [("keypoint_rcnn", "keypoint"), ("retinanet", "128")])
def test_what_torchscript_alone_or_onnx_holds(name, words, tmp_path):
    network = detector_network(head(name))
    for suffix in (".pt2", ".onnx")[: 2 if name == "keypoint_rcnn" else 1]:
        with pytest.raises(ConfigError, match=words):
            export_network(network, tmp_path / f"d{suffix}")
    report = export_network(network, tmp_path / "d.ts", sizes=((45, 70),))
    assert report.passed and any(c.detections for c in report.comparisons)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("panoptic_fpn", "PanopticFPN"),
        ("deeplab", "SemanticSegmentor"),
        ("point_rend", "PointRend"),
    ],
)
def test_heads_that_no_graph_holds_are_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        detector_network(head(name))


def test_an_exporter_that_fails_says_so_in_one_sentence(model, tmp_path, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("Could not guard\nlong")

    form = dataclasses.replace(FORMATS[".ts"], write=fails)
    monkeypatch.setitem(FORMATS, ".ts", form)
    with pytest.raises(ConfigError, match=r"TorchScript.*Could not guard"):
        export_network(detector_network(model), tmp_path / "d.ts")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stable, features_differ", [(False, False), (False, True), (True, False)])
def test_only_what_the_original_cannot_decide_is_left_out(stable, features_differ):
    """The file ranks two boxes otherwise than the original does."""
    boxes = torch.tensor([[0.0, 0.0, 9.0, 9.0], [20.0, 20.0, 50.0, 50.0]])

    def original(x):
        found = boxes if stable or not x.any() else boxes.flip(0)
        return {"pred_boxes": found, "scores": torch.full((2,), 0.5)}

    features = (lambda x: {"p2": x + features_differ}, lambda x: {"p2": x})
    network = Network(nn.Identity(), original, detector=True, features=features)
    outputs = {"pred_boxes": boxes.flip(0), "scores": torch.full((2,), 0.5)}
    made = compare(network, lambda x: outputs, (torch.zeros(3, 8, 8),))
    assert made.undecided == made.passed == (not stable and not features_differ)
    # and a file of which nothing could be compared does not pass
    assert not Report(Path("detector.ts"), 0.0, 0, [made]).passed
