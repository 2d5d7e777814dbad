"""Detectors for batches: what Detectron2 finds, in shapes that no image changes."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
import torchvision
from detectron2.structures import Boxes, pairwise_iou

from lambda_det.errors import ConfigError
from lambda_det.export import detector_network, export_network
from lambda_det.export.detections import exportable_detections, not_covered
from lambda_det.export.exported import ExportedDetector, as_input
from lambda_det.export.triton import write_repository
from lambda_det.prediction import Predictor
from tests.export.conftest import needs_any_size
from tests.export.test_detector import head

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")
HEADS = ["faster_rcnn", "cascade_mask_rcnn", "retinanet", "fcos", "c4"]


@pytest.mark.parametrize("name", HEADS)
def test_a_batch_is_what_detectron2_computes(name):
    """Images that fill parts of it, in the form of the graph, without recording it."""
    network = detector_network(head(name), {"input_format": "BGR"}, batch=3)
    for height, width in ((64, 96), (128, 96)):
        images = torch.nn.functional.interpolate(torch.rand(3, 3, 8, 8) * 255, (height, width))
        images = images.permute(0, 2, 3, 1).to(torch.uint8)
        sizes = torch.tensor([[height, width], [40, 90], [64, 30]], dtype=torch.int32)
        expected = network.original(images, sizes)
        with exportable_detections():
            found = network.module(images, sizes)
        assert set(found) == set(expected) and expected["count"].max() > 1
        for field, tensor in expected.items():
            torch.testing.assert_close(found[field], tensor, rtol=1e-4, atol=1e-3)
        # and what lies beside the images counts for nothing
        images[1, 40:], images[2, :, 30:] = 7, 9
        again = network.original(images, sizes)
        assert all(torch.equal(again[field], tensor) for field, tensor in expected.items())


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


def described(**changes):
    about = {"input_format": "BGR", "min_size_test": 32, "max_size_test": 64, "device": "cpu"}
    names = ["boxes", "classes", "scores", "count"]
    return {**about, "outputs": names, "batch": 2, "fixed": [48, 64], "stride": 16, **changes}


# A box of the whole canvas, and the upper left corner's pixel as its score
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
    onnx.helper.set_model_props(
        model, {k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()}
    )
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
@pytest.mark.parametrize("batch, fixed", [(2, [48, 64]), (0, None)])
def test_predictor_reads_a_file_alone_and_fills_its_batches(batch, fixed, suffix, tmp_path):
    """Without a .json beside it; three images for a batch of two, of which one has to shrink."""
    path = save(tmp_path / "d.onnx", described(batch=batch, fixed=fixed, classes=["cell"]))
    if suffix == ".xml":
        openvino = pytest.importorskip("openvino")
        openvino.save_model(openvino.convert_model(path), tmp_path / "d.xml")
    predictor = Predictor(path.with_suffix(suffix), score_threshold=0.1, batch_size=3)
    images = [
        np.full((h, w, 3), v, np.uint8) for h, w, v in ((48, 60, 200), (90, 60, 99), (5, 7, 0))
    ]
    for found, image in zip(predictor(images), images, strict=True):
        assert found.names == ["cell"] * int(image.max() > 0)
        np.testing.assert_allclose(found.scores, [image.max() / 255] * len(found), rtol=1e-3)
        height, width = image.shape[:2]
        assert np.allclose(found.boxes, [0, 0, width, height], rtol=1e-3)


@pytest.mark.parametrize("batch", ["batch", "2"])
def test_a_model_repository_of_triton(batch, tmp_path):
    """The configuration names what the file has; of a fixed batch Triton makes none."""
    path = tmp_path / "cells.onnx"
    onnx.save(onnx.parser.parse_model(GRAPH.replace("[batch", f"[{batch}")), path)
    made = write_repository(path, tmp_path / "models")
    assert made == tmp_path / "models/cells/config.pbtxt"
    assert (made.parent / "1/model.onnx").read_bytes() == path.read_bytes()
    text, free = made.read_text(), batch == "batch"
    first = "" if free else "2, "
    for line in (
        f"max_batch_size: {8 if free else 0}",
        f'input {{ name: "images" data_type: TYPE_UINT8 dims: [{first}-1, -1, 3] }}',
        f'input {{ name: "sizes" data_type: TYPE_INT32 dims: [{first}2] }}',
        f'output {{ name: "boxes" data_type: TYPE_FP32 dims: [{first}1, 4] }}',
        'output { name: "count" data_type: TYPE_INT64 dims: [1] reshape { shape: [] } }'
        if free
        else 'output { name: "count" data_type: TYPE_INT64 dims: [2] }',
    ):
        assert line in text.splitlines()
    assert ("dynamic_batching {" in text) == free
    with pytest.raises(ConfigError, match="cannot be written"):
        write_repository(path, path)


def test_images_are_made_to_fit(tmp_path):
    detector = ExportedDetector(save(tmp_path / "d.onnx", described()))
    image = np.full((90, 60, 3), 5, np.uint8)  # would be 48x32, then 64x43
    for shortest, shape in ((32, [48, 32]), (43, [48, 32]), (0, [48, 32])):
        (resize,) = detector.resize.augs
        resize.short_edge_length, resize.max_size = [shortest] * 2, 96
        batch, sizes = detector.fill([as_input(image, detector.resize)["image"]])
        assert batch.shape == (2, 48, 64, 3) and sizes.tolist() == [shape, [1, 1]]
        assert (batch[0, :48, :32] == 5).all() and batch.sum() == 5 * 48 * 32 * 3
    free = ExportedDetector(save(tmp_path / "f.onnx", described(batch=0, fixed=None)))
    batch, sizes = free.fill([torch.zeros(3, 17, 35), torch.zeros(3, 19, 33)])
    assert batch.shape == (2, 32, 48, 3) and sizes.tolist() == [[17, 35], [19, 33]]


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
    ("name", "outside"), [("faster_rcnn", ["normalise", "nms"]), ("cascade_mask_rcnn", [])]
)
def test_a_fixed_graph_has_only_fixed_shapes(name, outside, tmp_path):
    form = {"batch": 2, "fixed": (64, 128), "outside": outside}
    network = detector_network(head(name), {"input_format": "RGB"}, **form)
    report = export_network(network, tmp_path / "d.onnx")
    assert report.passed and any(c.detections for c in report.comparisons)
    check_static(tmp_path / "d.onnx")
