"""Whole detectors as ONNX: resizing in the graph, the proof on images, and who reads the file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.data.transforms import AugmentationList
from detectron2.structures import Boxes, Instances

from lambda_det.detection.data.jitter import ResizeShortestEdgeAtLeastOnePixel
from lambda_det.export import detector_network, export_network
from lambda_det.export.onnx_file import finish_onnx
from lambda_det.export.proof import prove
from tests.export.conftest import needs_any_size
from tests.export.test_detector import head

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")

# The box of the whole picture, and one beyond the border; the mean of each channel
GRAPH = """
<ir_version: 9, opset_import: ["" : 18]>
core (float[3, height, width] images) =>
    (float[two, 4] found_boxes, int64[two] classes, float[three] scores)
<float[1, 4] more = {1, 1, 1.01, 1.01}, int64[2] classes = {4, 6}>
{
    size = Shape<start = 1>(images)
    sides = Cast<to = 1>(size)
    order = Constant<value_ints = [1, 0]>()
    xy = Gather(sides, order)
    corner = Sub(xy, xy)
    flat = Concat<axis = 0>(corner, xy)
    row = Constant<value_ints = [1, 4]>()
    whole = Reshape(flat, row)
    beyond = Mul(whole, more)
    found_boxes = Concat<axis = 0>(whole, beyond)
    axes = Constant<value_ints = [1, 2]>()
    scores = ReduceMean<keepdims = 0>(images, axes)
}
"""


@pytest.mark.parametrize("order", ["BGR", "RGB"])
@pytest.mark.parametrize("shortest, longest", [(64, 96), (40, 1333), (0, 0)])
def test_images_are_resized_as_in_an_evaluation_and_boxes_come_back(
    order, shortest, longest, tmp_path
):
    path, rng = tmp_path / "d.onnx", np.random.default_rng(0)
    graph = onnx.parser.parse_model(GRAPH)
    onnx.save(graph, path)
    finish_onnx(
        path,
        {
            "resizes": True,
            "min_size_test": shortest,
            "max_size_test": longest,
            "input_format": order,
            "classes": ["a", "b"],
        },
    )
    made = onnx.load(path).graph
    constants = {constant.name for constant in made.initializer}
    # OpenVINO divides the other way round
    assert not any(node.op_type == "Div" and node.input[0] in constants for node in made.node)
    session = onnxruntime.InferenceSession(path)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == ["a", "b"]
    resize = ResizeShortestEdgeAtLeastOnePixel([shortest] * 2, longest)
    for height, width in ((48, 64), (300, 40), (9, 1), (64, 64), (33, 100)):
        image = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        image[..., 0] //= 3
        boxes, classes, scores = session.run(None, {"image": image})
        np.testing.assert_allclose(boxes, [[0, 0, width, height]] * 2, rtol=1e-6)
        assert classes.tolist() == [4, 6]
        resized = resize.get_transform(image).apply_image(image)
        expected = resized.mean(axis=(0, 1))[:: 1 if order == "RGB" else -1]
        np.testing.assert_allclose(scores, expected, rtol=0, atol=0.03)  # borders, too


def test_openvino_resizes_to_the_same_size(tmp_path):
    openvino, path = pytest.importorskip("openvino"), tmp_path / "d.onnx"
    onnx.save(onnx.parser.parse_model(GRAPH), path)
    finish_onnx(path, {"resizes": True, "min_size_test": 64, "max_size_test": 96})
    model = onnx.load(path)
    sides = onnx.helper.make_tensor_value_info("sides", onnx.TensorProto.FLOAT, [2])
    model.graph.output.append(sides)  # of the resized image
    onnx.save(model, path)
    run = openvino.Core().compile_model(path, "CPU")
    for height, width in ((48, 64), (300, 40), (480, 640), (640, 427)):
        image = np.zeros((height, width, 3), np.uint8)
        resize = ResizeShortestEdgeAtLeastOnePixel([64] * 2, 96).get_transform(image)
        assert run(image)["sides"].tolist() == [resize.new_h, resize.new_w]


def boxes_of_the_data(cfg, shift: float):
    """A detector that finds what the data have, and its file, which is ``shift`` pixels off."""
    content, seen = json.loads(Path(cfg.DATASETS.TEST_JSON).read_text()), []

    def found(entry, shift=0.0):
        there = [a for a in content["annotations"] if a["image_id"] == seen[-1]]
        boxes = torch.tensor([a["bbox"] for a in there]).float()
        boxes[:, 2:] += boxes[:, :2]
        result = Instances((entry["height"], entry["width"]), pred_boxes=Boxes(boxes + shift))
        result.scores = torch.linspace(0.9, 0.5, len(there))
        result.pred_classes = torch.tensor([a["category_id"] - 1 for a in there])
        return result

    def run(inputs):
        seen.append(inputs[0]["image_id"])
        return [{"instances": found(inputs[0])}]

    def file(inputs):
        return [found(inputs[0], shift)]

    file.channels, file.resize, file.described = "RGB", AugmentationList([]), {"outputs": []}
    file.batch = 1
    return run, file


@pytest.mark.parametrize("shift, passes", [(0.0, True), (0.1, True), (4.0, False)])
def test_ap_beside_ap(run, shift, passes):
    known = {"thing_classes": ["circle", "rectangle", "triangle"]}
    model, file = boxes_of_the_data(run.cfg, shift)
    proof = prove(run.cfg, known, model, 3, {"file": file})
    assert proof.passed == passes and not proof.others and str(proof).startswith("3 images of ")
    assert proof.differences["file"] == pytest.approx({"boxes": shift, "scores": 0.0}, abs=1e-5)
    of_run, of_file = proof.rows["bbox AP"]
    assert of_run == pytest.approx(100) and (of_file < 90) == (not passes)


NOWHERE = ["DATASETS.TEST_JSON", "", "DATASETS.TEST_IMAGES", ""]


@pytest.mark.parametrize(
    "change, limit, words",
    [
        (NOWHERE, 9, "no validation images"),
        (["DATASETS.TEST_JSON", "gone.json"], 9, "gone.json"),
        ([*NOWHERE, "DATASETS.TEST", ("coco_2017_val",)], 9, "coco"),
        ([], 0, "--proof is 0"),
        ([], 9, "more to images"),
    ],
)
def test_without_images_the_reason_is_said(run, change, limit, words):
    cfg = run.cfg.clone()
    cfg.merge_from_list(change)
    proof = prove(cfg, {}, None, limit, {})
    assert proof.passed and words in str(proof)


@needs_any_size
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"), [("fcos", {"outside": ["nms"]}), ("cascade_mask_rcnn", {"pasted": True})]
)
def test_other_detectors(name, form, tmp_path):
    network = detector_network(head(name), **form)
    report = export_network(network, tmp_path / "d.onnx", sizes=((45, 70),))
    assert report.passed and any(c.detections for c in report.comparisons)
    kinds = {node.op_type for node in onnx.load(tmp_path / "d.onnx").graph.node}
    assert ("NonMaxSuppression" in kinds) == ("pasted" in form)
    session = onnxruntime.InferenceSession(tmp_path / "d.onnx")
    boxes, classes, *masks, scores = session.run(None, {"image": np.zeros((20, 30, 3), np.uint8)})
    assert boxes.shape[1:] == (4,) and len(boxes) == len(scores) == len(classes)
    assert not masks or masks[0].shape == (len(boxes), 20, 30)
