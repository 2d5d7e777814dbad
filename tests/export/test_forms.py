"""What the forms of a detector's .onnx leave to their user, done here: what Detectron2 finds."""

import contextlib
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from detectron2.layers.mask_ops import paste_masks_in_image
from PIL import Image

from lambda_det.errors import ConfigError
from lambda_det.export import detector_network
from lambda_det.export.command_line import tensorrt
from lambda_det.export.detections import exportable_detections
from lambda_det.export.exported import ExportedDetector, as_input
from lambda_det.export.networks import fields
from lambda_det.export.onnx_file import finish_onnx
from lambda_det.export.session import Comparison, Report, describe
from lambda_det.export.triton import _tensor
from lambda_det.prediction import Predictor
from tests.export.test_detector import head

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")

FORMS = {
    "resize": {"outside": ["resize"]},
    "normalise": {"outside": ["normalise"]},
    "nms": {"outside": ["resize", "nms"]},
    "nms of batches": {"outside": ["normalise", "nms"], "batch": 0},
    "fixed": {"outside": ["normalise"], "batch": 3, "fixed": (64, 96)},
}


@pytest.mark.parametrize(
    ("name", "form", "order"),
    [
        ("faster_rcnn", "resize", "RGB"),
        ("faster_rcnn", "nms", "BGR"),
        ("faster_rcnn", "nms of batches", "RGB"),
        ("retinanet", "nms", "BGR"),
        ("retinanet", "nms of batches", "BGR"),
        ("fcos", "nms of batches", "BGR"),
        ("cascade_mask_rcnn", "normalise", "RGB"),
        ("cascade_mask_rcnn", "fixed", "BGR"),
    ],
)
def test_a_form_with_the_rest_done_is_detectron2(name, form, order):
    """The functions of the graph, not recorded, read as a file is, beside the model itself."""
    model, of_bytes = head(name), form in ("resize", "nms")
    about = {f"pixel_{k}": getattr(model, f"pixel_{k}").flatten().tolist() for k in ("mean", "std")}
    about |= {"input_format": order, "min_size_test": 64, "max_size_test": 96}
    network = detector_network(model, about, **FORMS[form])

    def run(images, *sizes):
        assert images.dtype == (torch.uint8 if of_bytes else torch.float32)
        with exportable_detections():
            found = network.module(images, *sizes)
        if network.finish:  # as an export does to compare
            finished = network.finish(found, images, *sizes)
            expected = network.original(images, *sizes)
            assert finished.keys() == expected.keys()
            for field, tensor in expected.items():
                torch.testing.assert_close(finished[field], tensor, rtol=1e-4, atol=1e-3)
        return {name.removeprefix("pred_"): value for name, value in found.items()}

    has_masks = getattr(getattr(model, "roi_heads", None), "mask_on", False)
    names = ["boxes", "classes", *["masks"] * has_masks, "scores"]
    report = Report(Path("d.onnx"), 0.0, 0, [Comparison((), dict.fromkeys(names, 0.0))])
    file = ExportedDetector(Path("d.onnx"), None, describe(network, report), lambda *_: run)
    assert file.channels == ("RGB" if of_bytes else order)
    rng, found, most = np.random.default_rng(0), [], 0
    # What lies around an image in a larger canvas changes its features
    sizes = ((64, 96), (60, 80), (90, 40))[: 1 if form == "fixed" else None]
    blobs = [torch.from_numpy(rng.uniform(0, 255, (1, 3, 9, 9))).byte() for _ in sizes]
    images = [
        torch.nn.functional.interpolate(blob, size)[0].permute(1, 2, 0).numpy()
        for blob, size in zip(blobs, sizes, strict=True)
    ]
    turn = 1 if file.channels == order else -1
    found = file([as_input(image[..., ::turn], file.resize) for image in images])
    for image, instances in zip(images, found, strict=True):
        expected = fields(model([as_input(image, file.resize)])[0]["instances"])
        instances = fields(instances)
        assert instances.keys() == expected.keys()
        if "pred_masks" in expected:  # rounding decides a pixel that is half covered
            assert (instances.pop("pred_masks") != expected.pop("pred_masks")).float().mean() < 1e-3
        for field, tensor in expected.items():
            torch.testing.assert_close(instances[field], tensor, rtol=1e-4, atol=1e-3)
        most = max(most, len(expected["scores"]))
    assert most > 1


def test_what_follows_from_the_boxes_is_not_left_without_them():
    for name in ("cascade_mask_rcnn", "keypoint_rcnn"):
        with pytest.raises(ConfigError, match="Masks and keypoints"):
            detector_network(head(name), outside=["nms"])
    with pytest.raises(ConfigError, match="no masks"):
        detector_network(head("retinanet"), pasted=True)


# Within the image, at its corner, of less than a pixel, and one that is missing
BOXES = [[3.2, 4.7, 40.1, 29.9], [50.5, 30.0, 64.0, 48.0], [20.1, 7.6, 20.4, 9.1], [0.0] * 4]
PASTED = {  # what is around a core that takes this
    "resizes": ({"resizes": True}, "float[3, h, w] images"),
    "resize": ({"outside": ["resize"]}, "uint8[h, w, 3] image"),
    "normalise": ({"outside": ["resize", "normalise"]}, "float[3, h, w] image"),
    "batch": ({"batch": 2}, "uint8[n, h, w, 3] images, int32[n, 2] sizes"),
    "fixed": (
        {"batch": 2, "fixed": [48, 64], "outside": ["resize", "normalise"]},
        "float[2, 3, 48, 64] images, int32[2, 2] sizes",
    ),
}


@pytest.mark.parametrize("form", PASTED)
def test_masks_are_pasted_as_detectron2_does(form, tmp_path, monkeypatch, capsys):
    """The file's exactly, and those of an image twice as large, by Predictor and the page's."""
    (about, takes), path = PASTED[form], tmp_path / "d.onnx"
    masks = torch.nn.functional.interpolate(torch.rand(4, 1, 5, 5), (14, 14), mode="bilinear")
    masks = masks.sub(0.5).mul(3).add(0.5).clamp(0, 1)
    values = {
        "found_boxes" if form == "resizes" else "boxes": torch.tensor(BOXES),
        "classes": torch.zeros(4, dtype=torch.int64),
        "found_masks": masks,
        "scores": torch.tensor([0.9, 0.8, 0.7, 0.0]),
    }
    if "batch" in about:
        values = {name: torch.stack([value] * 2) for name, value in values.items()}
        values["count"] = torch.tensor([3, 3])
    kinds = {torch.float32: "float", torch.int64: "int64"}
    ends = ", ".join(f"{kinds[v.dtype]}{list(v.shape)} {name}" for name, v in values.items())
    nodes = " ".join(f"{name} = Identity(of_{name})" for name in values)
    header = '<ir_version: 9, opset_import: ["": 18]>'
    core = onnx.parser.parse_model(f"{header} core ({takes}) => ({ends}) {{ {nodes} }}")
    core.graph.initializer.extend(
        onnx.numpy_helper.from_array(value.numpy(), f"of_{name}") for name, value in values.items()
    )
    onnx.save(core, path)
    names = [name.removeprefix("found_") for name in values]
    finish_onnx(
        path,
        {
            **{"outputs": names, "device": "cpu", "pasted": True, "outside": [], "stride": 32},
            **{"resizes": False, "fixed": None, "min_size_test": 48, "max_size_test": 64},
            **{"input_format": "BGR", "pixel_mean": [9.0] * 3, "pixel_std": [2.0] * 3},
            **{"classes": ["cell"], "input": "what is said", **about},
        },
    )
    image, detector = np.zeros((96, 128, 3), np.uint8), ExportedDetector(path)
    given = detector.fill([as_input(image, detector.resize)["image"]] * 2)
    found = detector._run(*given)
    height, width = {"resizes": (96, 128), "batch": (64, 64)}.get(form, (48, 64))  # of the canvas
    boxes, pasted = found["boxes"].reshape(-1, 4), found["masks"].flatten(0, -3)
    assert pasted.dtype == torch.bool and pasted.shape[1:] == (height, width)
    several = masks[:, 0].repeat(len(boxes) // 4, 1, 1)
    expected = paste_masks_in_image(several, boxes, (height, width), threshold=0.5)
    assert 100 < expected[0].sum() < expected[0].numel() / 2 and not pasted[3].any()
    assert (pasted != expected).sum() <= 2
    found = Predictor(path)(image)
    assert np.allclose(found.boxes, 2 * torch.tensor(BOXES[:3]), atol=1e-3)
    expected = paste_masks_in_image(masks[:3, 0], found.instances.pred_boxes, (96, 128)).numpy()
    assert found.masks.shape == expected.shape and (found.masks == expected).mean() > 0.99
    Image.fromarray(image).save(tmp_path / "i.png")
    monkeypatch.setattr(sys, "argv", ["detect.py", path, tmp_path / "i.png"])
    with contextlib.ExitStack() as stack:
        if form != "resizes":
            stack.enter_context(pytest.raises(SystemExit, match="takes what is said"))
        runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs/detect.py"))
    areas = [
        int(area) for area in re.findall(r"cell 0.*\n +a mask of (\d+)", capsys.readouterr().out)
    ]
    assert areas == (found.masks.sum(axis=(1, 2)).tolist() if form == "resizes" else [])


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"batch": 2}, "--fixed"),
        ({"batch": 1, "fixed": (32, 64)}, "trtexec --onnx=d.onnx --saveEngine=d.engine"),
        ({"batch": 0, "fixed": (32, 64)}, "--optShapes=images:8x32x64x3,sizes:8x2"),
        ({"batch": 0, "fixed": (32, 64), "outside": ["normalise"]}, "images:1x3x32x64,sizes:1x2"),
    ],
)
def test_what_tensorrt_and_triton_are_told(form, said):
    network = detector_network(head("retinanet"), **form)
    assert said in tensorrt("d.onnx", network)
    masks = SimpleNamespace(name="masks", type="tensor(bool)", shape=["batch", 9, "height", 64])
    assert _tensor(masks, True) == '{ name: "masks" data_type: TYPE_BOOL dims: [9, -1, 64] }'
