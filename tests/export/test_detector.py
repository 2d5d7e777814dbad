"""Whole detectors as ONNX: the same detections from the file, whatever the size and batch."""

import json
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from detectron2.modeling.meta_arch.fcos import FCOS, FCOSHead
from detectron2.modeling.proposal_generator.rpn import find_top_rpn_proposals
from detectron2.structures import Boxes, ImageList, pairwise_iou

from lambda_det.detection import load_config
from lambda_det.detection.data.records import as_input
from lambda_det.detection.model import ranks
from lambda_det.detection.prediction import Predictor
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError, DataError, WeightsError
from lambda_det.export import detector_network, export_network, onnx_file
from lambda_det.export.detections import (
    _find_top_rpn_proposals,
    exportable_detections,
    not_covered,
)
from lambda_det.export.exported import ExportedDetector
from lambda_det.export.networks import DetectorGraph, Network, fields
from lambda_det.export.session import TOLERANCE, differences
from tests.detection.heads.tiny import CONFIGS, HEADS
from tests.export.conftest import needs_any_size
from tests.export.tiny import few_rounds, lambda_detector_config, scramble

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")

DENSE = ["p5", "p6"]  # of RetinaNet and FCOS: few levels, each of which finds something


def head(name: str):
    """The detector of a shipped configuration, made small, that finds something everywhere."""
    if name == "fcos":
        return scramble(fcos(head("retinanet").backbone))
    if name == "mask_rcnn":
        torch.manual_seed(0)
        return scramble(DetectionTask(lambda_detector_config()).build_model())
    small = HEADS[name]
    arguments = Namespace(config_file=str(CONFIGS / f"{small.config}.yaml"), opts=small.opts())
    cfg = load_config(arguments).clone()
    cfg.defrost()
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.2
    cfg.MODEL.RETINANET.SCORE_THRESH_TEST = 0.009  # of the prior 0.01
    cfg.TEST.DETECTIONS_PER_IMAGE = 10  # scores that are apart by more than rounding
    # With a block a stage the C4 head finds nothing, and FCOS, which has RetinaNet's backbone, has
    # scores that are equal except for rounding
    if name in ("c4", "retinanet"):
        cfg.MODEL.LAMBDA_RESNET.NAME = "lambda_resnet26_slim"
    if name in ("faster_rcnn", "cascade_mask_rcnn"):  # two levels less take a third of the time
        cfg.MODEL.FPN.IN_FEATURES = ["res4", "res5"]
        for part in (cfg.MODEL.RPN, cfg.MODEL.ROI_HEADS):
            part.IN_FEATURES = part.IN_FEATURES[2:]
        cfg.MODEL.ANCHOR_GENERATOR.SIZES = cfg.MODEL.ANCHOR_GENERATOR.SIZES[2:]
    elif name == "retinanet":
        cfg.MODEL.FPN.IN_FEATURES = ["res5"]
        cfg.MODEL.RETINANET.IN_FEATURES = DENSE
        cfg.MODEL.ANCHOR_GENERATOR.SIZES = cfg.MODEL.ANCHOR_GENERATOR.SIZES[2:4]
    torch.manual_seed(0)
    return scramble(DetectionTask(cfg).build_model())


def fcos(backbone) -> FCOS:
    """Detectron2 has it as a LazyConfig alone."""
    return FCOS(
        backbone=backbone,
        head=FCOSHead(
            input_shape=[backbone.output_shape()[name] for name in DENSE],
            num_classes=3,
            conv_dims=[16],
        ),
        head_in_features=DENSE,
        num_classes=3,
        test_score_thresh=0.05,
        max_detections_per_image=10,
        pixel_mean=[103.53, 116.28, 123.675],
        pixel_std=[57.0] * 3,
    )


def expected_of(network: Network, images: torch.Tensor, sizes: torch.Tensor) -> dict:
    """What the graph of a detector has to give, by Detectron2's own functions."""
    graph = DetectorGraph(network.original, network.module.rgb)
    batch = ImageList(graph.prepare(images, sizes).tensor, [*map(tuple, sizes.tolist())])
    found = []
    for instances in graph.detect(batch):
        instances.pred_boxes.clip(instances.image_size)
        found.append(fields(instances[instances.pred_boxes.nonempty()]))
    outputs = {}
    for name in found[0]:
        missing = [graph.most - len(each["scores"]) for each in found]
        rows = [
            torch.cat([each[name], each[name].new_zeros(m, *each[name].shape[1:])])
            for each, m in zip(found, missing, strict=True)
        ]
        outputs[name] = torch.stack(rows)
    return {**outputs, "count": torch.tensor([len(each["scores"]) for each in found])}


EXPORTED = ["faster_rcnn", "c4", "dc5", "cascade_mask_rcnn", "retinanet", "fcos"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_the_graph_computes_what_detectron2_does(name):
    """Without recording it, on images that fill parts of a batch."""
    network, most = detector_network(head(name), {"input_format": "BGR"}, batch=3), 0
    for height, width in ((64, 96), (128, 96), (32, 32)):
        images = torch.nn.functional.interpolate(torch.rand(3, 3, 8, 8) * 255, (height, width))
        images = images.permute(0, 2, 3, 1).to(torch.uint8)
        sizes = torch.tensor([[height, width], [20, width - 6], [31, 30]], dtype=torch.int32)
        expected = expected_of(network, images, sizes)
        with exportable_detections():
            outputs = network.module(images, sizes)
        assert set(outputs) == set(expected)
        for field, tensor in expected.items():
            torch.testing.assert_close(outputs[field], tensor, rtol=1e-4, atol=1e-3)
        most = max(most, int(expected["count"].max()))
        # and what lies beside the images counts for nothing
        images[1, 20:], images[2, :, 30:] = 7, 9
        again = expected_of(network, images, sizes)
        assert all(torch.equal(again[field], tensor) for field, tensor in expected.items())
    assert most > 1


@pytest.mark.parametrize(
    ("name", "order", "fixed"),
    [
        ("fcos", "BGR", (64, 96)),
        ("cascade_mask_rcnn", "RGB", None),
        ("cascade_mask_rcnn", "BGR", (64, 96)),
    ],
)
def test_an_exported_detector_finds_what_the_model_finds(name, order, fixed, monkeypatch):
    """Resizing, filling a batch and pasting, around the graph that was not recorded."""
    model = head(name)
    about = {"input_format": order, "min_size_test": 64, "max_size_test": 96}
    network = detector_network(model, about, batch=2 if fixed else 0, fixed=fixed)
    has_masks = getattr(getattr(model, "roi_heads", None), "mask_on", False)
    about |= {"outputs": ["boxes", "classes", *["masks"][:has_masks], "scores", "count"]}
    about |= {"batch": network.batch, "fixed": fixed, "stride": network.stride}

    def run(images, sizes):
        assert images.dtype == torch.uint8
        with exportable_detections():
            return network.module(images, sizes)

    monkeypatch.setattr(onnx_file, "read", lambda path: (about, run))
    file, most = ExportedDetector(Path("d.onnx")), 0
    # What lies around an image in a larger canvas changes its features
    sizes = ((64, 96),) * 3 if fixed else ((64, 96), (60, 80), (90, 40))
    blobs = [torch.rand(1, 3, 9, 9) * 255 for _ in sizes]
    images = [
        torch.nn.functional.interpolate(blob, size)[0].permute(1, 2, 0).byte().numpy()
        for blob, size in zip(blobs, sizes, strict=True)
    ]
    outputs = file([as_input(image, file.resize) for image in images])
    for image, output in zip(images, outputs, strict=True):
        image = image if order == "RGB" else image[..., ::-1]
        expected = fields(model([as_input(image, file.resize)])[0]["instances"])
        instances = fields(output["instances"])
        assert instances.keys() == expected.keys()
        if "masks" in expected:  # rounding decides a pixel that is half covered
            assert (instances.pop("masks") != expected.pop("masks")).float().mean() < 1e-3
        for field, tensor in expected.items():
            torch.testing.assert_close(instances[field], tensor, rtol=1e-4, atol=1e-3)
        most = max(most, len(expected["scores"]))
    assert most > 1


def test_the_choice_of_boxes_is_detectron2s():
    """Boxes of no size, NaN, ties and more than are wanted, without any export."""
    from detectron2.modeling.roi_heads.fast_rcnn import fast_rcnn_inference

    from lambda_det.export.detections import _fast_rcnn_inference

    for count in (1, 40):
        boxes = torch.rand(count, 3, 4) * 60 - 5
        boxes[..., 2:] = boxes[..., :2] + torch.rand(count, 3, 2) * 60 + 1
        scores = torch.rand(count, 4)
        if count > 2:
            boxes[1, 0, 0], scores[2, 1] = float("nan"), float("inf")
        limits = (0.3, 0.5, 20)
        (expected,), _ = fast_rcnn_inference([boxes.flatten(1)], [scores], [(50, 40)], *limits)
        expected = expected[expected.pred_boxes.nonempty()]  # as a graph leaves them out
        sizes = torch.tensor([[50.0, 40.0]])
        with exportable_detections():
            (outputs,), _ = _fast_rcnn_inference([boxes.flatten(1)], [scores], [sizes], *limits)
        length = len(expected)
        assert outputs.scores.shape == (20,) and not outputs.scores[length:].any()
        assert torch.equal(outputs.scores[:length], expected.scores)
        assert torch.equal(outputs.pred_classes[:length], expected.pred_classes)
        assert torch.equal(outputs.pred_boxes.tensor[:length], expected.pred_boxes.tensor)


def topk_of_onnx(values, count, dim):
    """ONNX's TopK has equal values in the order of their places, PyTorch's in any."""
    values, index = values.sort(dim=dim, descending=True, stable=True)
    return values[:, :count], index[:, :count]


def test_proposals_of_equal_logits_are_chosen_as_in_the_graph(monkeypatch):
    """An RPN whose hidden channels are 0 gives the same logit at many places of an object."""
    generator = torch.Generator().manual_seed(0)
    boxes, logits = [], []
    for count in (400, 90, 1):
        corners = torch.rand(1, count, 2, generator=generator) * 60
        boxes.append(torch.cat([corners, corners + 40], 2))
        logits.append(torch.rand(1, count, generator=generator).mul(4).round() / 4)
    logits[1][0, :3] = torch.tensor([torch.inf, torch.nan, -torch.inf])
    choice = {"nms_thresh": 0.7, "pre_nms_topk": 100, "post_nms_topk": 50, "min_box_size": 0.0}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", topk_of_onnx)
        sizes = [torch.tensor([[90, 80]])]
        (graph,) = _find_top_rpn_proposals(boxes, logits, sizes, training=False, **choice)
    (run,) = find_top_rpn_proposals(boxes, ranks(logits), [(90, 80)], training=False, **choice)
    assert len(run) == 50
    torch.testing.assert_close(run.proposal_boxes.tensor, graph.proposal_boxes.tensor)


def test_nms_without_a_loop_over_boxes():
    """Random boxes, those of no size, ones that are missing, and a chain that covers by turns."""
    boxes = torch.rand(4, 200, 4) * 20
    boxes[..., 2:] += boxes[..., :2] + 1
    boxes[1, 5:9, 2:] = boxes[1, 5:9, :2]
    chain = torch.arange(200.0)[:20] * 2
    boxes[2, :20] = torch.stack([chain, chain * 0, chain + 9, chain * 0 + 9], 1)
    valid = torch.rand(4, 200) < 0.9
    classes = torch.randint(3, (4, 200))
    for i, found in enumerate(not_covered(boxes, valid, 0.5, classes)):
        there = valid[i].nonzero()[:, 0]
        scores = torch.linspace(1, 0.1, 200)
        moved = boxes[i] + classes[i, :, None] * 1000
        kept = there[torchvision.ops.nms(moved[there], scores[there], 0.5)]
        assert found.nonzero()[:, 0].tolist() == sorted(kept.tolist()) and 20 < len(kept) < 180
    everything = torch.ones(1, 20, dtype=torch.bool)
    by_turns = not_covered(boxes[2:3, :20], everything, 0.5, everything)[0]
    assert by_turns.tolist() == [True, False] * 10
    assert (pairwise_iou(*[Boxes(boxes[2, :20])] * 2) > 0.5).sum() == 20 + 2 * 19


@pytest.mark.parametrize(
    ("name", "most", "words"),
    [
        ("keypoint_rcnn", 10, "keypoint"),
        ("panoptic_fpn", 10, "PanopticFPN"),
        ("point_rend", 10, "PointRend"),
        ("retinanet", -1, r"TEST\.DETECTIONS_PER_IMAGE"),
    ],
)
def test_heads_that_no_graph_holds_are_refused(name, most, words):
    model = head(name)
    model.max_detections_per_image = most
    with pytest.raises(ConfigError, match=words):
        detector_network(model)


# ------------------------------------------------------------------------------- files
def about_file(**changes):
    about = {"input_format": "BGR", "min_size_test": 32, "max_size_test": 64, "device": "cpu"}
    names = ["boxes", "classes", "scores", "count"]
    return {**about, "outputs": names, "batch": 2, "fixed": [48, 64], "stride": 16, **changes}


# A box of the whole image, and the upper left corner's pixel as its score
GRAPH = """
<ir_version: 9, opset_import: ["" : 18]>
core (uint8[batch, height, width, 3] images, int32[batch, 2] sizes) =>
    (float[batch, 1, 4] boxes, int64[batch, 1] classes, float[batch, 1] scores, int64[batch] count)
<int64[3] origin = {0, 0, 0}, int64[3] one = {1, 1, 1}, int64[3] axes = {1, 2, 3},
 float most = {255}, int64[1] flat = {-1}, int64[2] row = {-1, 1}, int64[3] rows = {-1, 1, 4}>
{
    corner = Slice(images, origin, one, axes)
    pixel = Cast<to = 1>(corner)
    value = Reshape(pixel, row)
    scores = Div(value, most)
    classes = Cast<to = 7>(scores)
    ones = Sign(value)
    number = Reshape(ones, flat)
    count = Cast<to = 7>(number)
    yx = Cast<to = 1>(sizes)
    zero = Sub(yx, yx)
    order = Constant<value_ints = [1, 0]>()
    xy = Gather<axis = 1>(yx, order)
    side = Concat<axis = 1>(zero, xy)
    boxes = Reshape(side, rows)
}
"""


def save(path, about):
    model = onnx.parser.parse_model(GRAPH)
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()}
    onnx.helper.set_model_props(model, texts)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("batch, fixed", [(2, [48, 64]), (0, None)])
def test_predictor_reads_a_file_alone_and_fills_its_batches(batch, fixed, tmp_path):
    """Without a .json beside it; three images for a batch of two, one of which has to shrink."""
    path = save(tmp_path / "d.onnx", about_file(batch=batch, fixed=fixed, classes=["cell"]))
    predictor = Predictor(path, score_threshold=0.1, batch_size=3)
    images = [
        np.full((h, w, 3), v, np.uint8) for h, w, v in ((48, 60, 200), (90, 60, 99), (5, 7, 0))
    ]
    for prediction, image in zip(predictor(images), images, strict=True):
        assert prediction.names == ["cell"] * int(image.max() > 0)
        expected = [image.max() / 255] * len(prediction)
        np.testing.assert_allclose(prediction.scores, expected, rtol=1e-3)
        height, width = image.shape[:2]
        assert np.allclose(prediction.boxes, [0, 0, width, height], rtol=1e-3)
    predictor = Predictor(path, score_threshold=0.5, batch_size=3)  # above 99 / 255
    assert [len(prediction) for prediction in predictor(images)] == [1, 0, 0]


def test_images_are_made_to_fit(tmp_path):
    detector = ExportedDetector(save(tmp_path / "d.onnx", about_file()))
    image = np.full((90, 60, 3), 5, np.uint8)  # would be 48x32, then 64x43
    for shortest in (32, 43, 0):
        (resize,) = detector.resize.augs
        resize.short_edge_length, resize.max_size = [shortest] * 2, 96
        batch, sizes = detector.fill([as_input(image, detector.resize)["image"]])
        assert batch.shape == (2, 48, 64, 3) and sizes.tolist() == [[48, 32], [1, 1]]
        assert (batch[0, :48, :32] == 5).all() and batch.sum() == 5 * 48 * 32 * 3
    free = ExportedDetector(save(tmp_path / "f.onnx", about_file(batch=0, fixed=None)))
    batch, sizes = free.fill([torch.zeros(3, 17, 35), torch.zeros(3, 19, 33)])
    assert batch.shape == (2, 32, 48, 3) and sizes.tolist() == [[17, 35], [19, 33]]


@pytest.mark.parametrize(
    ("about", "device", "named"),
    [
        ({}, None, "no detector"),
        (about_file(outputs=["res2"]), None, "res2"),
        (about_file(), "cuda", "cuda"),
        (None, None, r"d\.onnx"),
    ],
)
def test_files_that_are_no_detectors(about, device, named, tmp_path):
    path = tmp_path / "d.onnx"
    path.write_bytes(b"none") if about is None else save(path, about)
    with pytest.raises((ConfigError, DataError, WeightsError), match=named):
        Predictor(path, device=device)


def test_an_image_that_a_file_refuses_is_named(tmp_path):
    path = save(tmp_path / "d.onnx", about_file(batch=0, fixed=None))
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 64
    onnx.save(model, path)
    with pytest.raises(DataError, match=r"d\.onnx.*16x64"):
        Predictor(path)(np.zeros((60, 1000, 3), np.uint8))


def test_an_exporter_that_fails_says_so_in_one_sentence(tmp_path, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("Could not guard\nlong")

    monkeypatch.setattr(onnx_file, "write", fails)
    monkeypatch.setattr(onnx_file, "check_possible", lambda: None)
    with pytest.raises(ConfigError, match=r"ONNX.*Could not guard"):
        network = detector_network(head("retinanet"))
        export_network(replace(network, why_none=""), tmp_path / "d.onnx")
    assert not list(tmp_path.iterdir())


def check_static(path):
    """No branch, no loop, and every shape a number."""
    graph = onnx.load(path).graph
    kinds = Counter(node.op_type for node in graph.node)
    assert not kinds.keys() & {"If", "Loop", "Scan", "NonZero", "Compress", "NonMaxSuppression"}
    values = {v.name: v for v in (*graph.input, *graph.output, *graph.value_info)}
    assert all(name in values for node in graph.node for name in node.output if name)
    shapes = [v.type.tensor_type.shape.dim for v in values.values()]
    assert all(dim.HasField("dim_value") for dims in shapes for dim in dims)


@needs_any_size
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "fixed"),
    [
        ("mask_rcnn", 2, (64, 128)),
        pytest.param("mask_rcnn", 0, None, marks=pytest.mark.release),
        pytest.param("retinanet", 1, None, marks=pytest.mark.release),
        pytest.param("cascade_mask_rcnn", 0, None, marks=pytest.mark.release),
        pytest.param("fcos", 0, None, marks=pytest.mark.release),
    ],
)
def test_a_file_computes_the_same_at_every_size_that_it_leaves_free(
    name, batch, fixed, tmp_path, monkeypatch
):
    """Free sizes of one image are exported in tests/detection/prediction/test_examples.py."""
    if fixed:
        few_rounds(monkeypatch)
    path = tmp_path / "d.onnx"
    network = detector_network(head(name), {"input_format": "RGB"}, batch=batch, fixed=fixed)
    assert export_network(replace(network, why_none=""), path).passed
    if fixed:
        check_static(path)
    (_, run), count = onnx_file.read(path), batch or 2
    for height, width in [fixed] if fixed else [(64, 96), (256, 32)]:
        images = torch.randint(256, (count, height, width, 3), dtype=torch.uint8)
        sizes = torch.tensor([[height, width - 7]] * count, dtype=torch.int32)
        expected = expected_of(network, images, sizes)
        assert max(differences(run(images, sizes), expected).values()) <= TOLERANCE
        assert expected["count"].sum()
