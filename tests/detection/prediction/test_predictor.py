import copy
import io
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from detectron2.config import instantiate
from detectron2.engine import DefaultPredictor
from PIL import Image

import lambda_det
from lambda_det.config import CONFIGS
from lambda_det.detection import DetectionTask
from lambda_det.detection.config_files import load_file
from lambda_det.detection.drawing import draw_predictions
from lambda_det.detection.lazy import dump_lazy
from lambda_det.detection.prediction import Prediction, Predictor
from lambda_det.detection.run_masks import RunMasks
from lambda_det.errors import ConfigError, DataError, WeightsError
from lambda_det.export import export_network
from lambda_det.export.sources import network_to_export
from tests.coco import found as made
from tests.detection.tiny import NARROW, TINY
from tests.export.unrecorded import record_nothing
from tests.training.tiny_detector import tiny_config


@pytest.fixture(scope="module")
def predictor(run):
    return Predictor(run[0].parent, score_threshold=0.0)


def same(one, other) -> bool:
    fields = ("boxes", "scores", "classes", "masks")
    return all(np.array_equal(getattr(one, f), getattr(other, f)) for f in fields)


@pytest.mark.parametrize(("channels", "size"), [("RGB", (200, 90)), ("BGR", (33, 7))])
def test_predicts_as_detectron2_does(run, channels, size):
    cfg = tiny_config()
    cfg.INPUT.FORMAT, cfg.MODEL.WEIGHTS = channels, str(run[1])
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0
    image = np.random.default_rng(1).integers(0, 255, (*size, 3), dtype=np.uint8)
    ours = Predictor(cfg, score_threshold=0.0)(image).instances
    theirs = DefaultPredictor(cfg)(image)["instances"]
    assert len(ours) == len(theirs) > 0 and ours.image_size == size
    torch.testing.assert_close(ours.pred_boxes.tensor, theirs.pred_boxes.tensor)
    torch.testing.assert_close(ours.scores, theirs.scores)
    # Folded norms round otherwise, which may move a border by a pixel
    assert (ours.pred_masks != theirs.pred_masks).float().mean() < 1e-3


@pytest.fixture(scope="module")
def lazy_run(tmp_path_factory):
    """The folder of a LazyConfig's run with random weights, and its configuration."""
    folder = tmp_path_factory.mktemp("lazy")
    opts = f"""{TINY[1]} {NARROW[1]} dataloader.image_size=96
        dataloader.train.mapper.image_format=RGB model.backbone.bottom_up.norm=BN
        model.backbone.norm=BN model.proposal_generator.post_nms_topk=[20,20]
        model.roi_heads.num_classes=3 model.roi_heads.box_predictor.test_topk_per_image=20"""
    lazy = load_file(CONFIGS / "mask_rcnn_lambdaresnet50.py", opts.split())
    (folder / "config.yaml").write_text(dump_lazy(lazy))
    torch.manual_seed(1)
    model = DetectionTask(lazy).components.make_model()
    torch.save({"model": model.state_dict()}, folder / "model_final.pth")
    (folder / "last_checkpoint").write_text("model_final.pth")
    lazy.train.init_checkpoint = str(folder / "model_final.pth")
    return folder, lazy


@pytest.mark.slow
def test_the_run_of_a_lazy_config_predicts_as_its_evaluation(lazy_run, image, tmp_path):
    folder, lazy = lazy_run
    found = Predictor(folder, score_threshold=0.0)(image)
    cv2.imwrite(str(tmp_path / "photo.png"), image)
    mapper = instantiate(lazy.dataloader.test.mapper)
    record = mapper({"file_name": str(tmp_path / "photo.png"), "height": 48, "width": 64})
    assert record["image"].shape[-1] == 96
    model = DetectionTask(lazy).components.make_model().eval()
    model.load_state_dict(torch.load(folder / "model_final.pth", weights_only=True)["model"])
    model.roi_heads.box_predictor.test_score_thresh = 0.0
    with torch.no_grad():
        expected = model([record])[0]["instances"]
    assert len(found) == len(expected) > 0
    torch.testing.assert_close(found.instances.scores, expected.scores)
    boxes = expected.pred_boxes.tensor.numpy()
    np.testing.assert_allclose(found.boxes, boxes, rtol=1e-4, atol=1e-3)
    assert found.class_names is None  # the checkpoint does not say them
    assert same(Predictor(lazy, score_threshold=0.0)(image), found)
    asked = Predictor(folder, score_threshold=0.0, precision="bfloat16")(image)
    assert not same(asked, found)
    lazy = copy.deepcopy(lazy)
    lazy.train.test_precision = "bfloat16"
    assert same(Predictor(lazy, score_threshold=0.0)(image), asked)


def test_the_caller_s_autocast_changes_nothing(run, predictor, image):
    expected = predictor(image)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(Predictor(run[1], score_threshold=0.0)(image), expected)
        assert same(predictor(image), expected)


def test_one_class_per_place_is_the_best_one(run, image, monkeypatch):
    """Of instances that overlap by more than half, the best; half or less are two objects."""
    boxes = [[0, 0, 20, 20], [0, 0, 20, 19], [0, 10, 20, 30], [40, 0, 60, 9], [40, 0, 60, 20]]
    scores, classes = torch.tensor([0.5, 0.9, 0.4, 0.3, 0.2]), torch.tensor([0, 1, 0, 2, 1])
    instances = made((48, 64), boxes, classes, scores, True)
    for agnostic, kept in ((False, [0, 1, 2, 3, 4]), (True, [1, 2, 3, 4])):
        predictor = Predictor(run[1], score_threshold=0.0, agnostic_nms=agnostic)
        monkeypatch.setattr(predictor, "_detect", lambda inputs: [{"instances": instances}])
        assert same(predictor(image), Prediction(instances[kept]))


def _found(**more) -> Prediction:
    """A circle of nine pixels and two squares, in 64x48 pixels."""
    boxes = [[30, 10, 33, 13], [2, 3, 22.5, 13], [40, 20, 60, 40]]
    instances = made((48, 64), boxes, [2, 0, 2], [0.9, 0.8, 0.7], masks=True)
    return Prediction(instances, ["square", "ring", "circle"], **more)


def test_a_result_is_a_line_a_table_and_areas():
    result = _found()
    assert repr(result) == "Prediction(1 square, 2 circle; 64x48)"
    assert result.counts == {"square": 1, "circle": 2}
    table = result.to_dict()
    assert list(table) == ["class", "score", "x0", "y0", "x1", "y1", "area"]
    assert table["class"] == ["circle", "square", "circle"] and table["x1"] == [33, 22.5, 60]
    assert table["area"] == [9, 20 * 10, 400] == result.areas.tolist()
    json.dumps(table)
    bare = Prediction(made((48, 64), [[2, 3, 22.5, 13]]))
    assert bare.areas.tolist() == [205] and bare.counts == {"0": 1}
    assert bare.masks is None and bare.keypoints is None
    assert "nothing" in repr(Prediction(made((48, 64), [])))


def test_masks_in_run_lengths_are_measured_and_drawn_without_their_pixels(image, monkeypatch):
    result = _found(image=image)
    of_pixels, areas = np.asarray(result.plot()), result.areas
    result.instances.pred_masks = RunMasks.of(result.instances.pred_masks)
    monkeypatch.setattr(RunMasks, "numpy", None)
    assert (result.areas == areas).all()
    of_runs = np.asarray(result.plot()).astype(int)
    assert (np.abs(of_runs - of_pixels) > 60).mean() < 0.02


def test_a_result_is_an_image(predictor, image, tmp_path):
    """Of a file, of pixels, and in a notebook; several results do not keep pixels."""
    path, new = tmp_path / "photo.png", tmp_path / "new" / "found.png"
    cv2.imwrite(str(path), image)
    result, bare = predictor(path), predictor([image])[0]
    expected = draw_predictions(image, result.instances, predictor.class_names)[:, :, ::-1]
    rgb = predictor(image[:, :, ::-1], channels="RGB")
    pillow = Image.open(path)
    for one in (result, predictor([path])[0], predictor(image), rgb, predictor(pillow)):
        np.testing.assert_array_equal(one.plot(), expected)
    for pixels in (image, pillow):
        np.testing.assert_array_equal(bare.plot(pixels), expected)
    assert predictor([pillow])[0].image is None
    np.testing.assert_array_equal(Image.open(io.BytesIO(result._repr_png_())), expected)
    result.save(new)
    np.testing.assert_array_equal(Image.open(new), expected)
    with pytest.raises(ConfigError, match=r"found\.png"):
        result.save(new)
    result.save(new, overwrite=True, scale=2)
    assert Image.open(new).size == (128, 96)
    assert bare.image is None and bare._repr_png_() is None
    for pixels, words in ((None, "several"), (image[:20], "48, 64")):
        with pytest.raises(ConfigError, match=words):
            bare.plot(pixels)
    large = Prediction(made((1500, 4000), []), image=np.zeros((1500, 4000, 3), np.uint8))
    assert Image.open(io.BytesIO(large._repr_png_())).size == (1000, 375)


def test_a_predictor_is_shown_by_its_file_classes_and_score(run, predictor):
    predictor.class_names = ["ring", "disc"]
    assert repr(predictor) == f"Predictor({run[1]}: ring, disc; from a score of 0)"


@pytest.mark.slow
def test_several_images_and_batches(run, predictor, image):
    wide = np.ascontiguousarray(image[:20])
    expected = [predictor(image), predictor(wide)]
    batches = Predictor(run[1], score_threshold=0.0, batch_size=3)
    for found in (predictor([image, wide]), predictor(iter((image, wide))), batches([image, wide])):
        assert all(map(same, found, expected))  # a padded image would have other scores
    assert predictor([]) == []
    assert len(batches(np.stack([image] * 4))) == 4
    for found, one in zip(batches([image, wide, image]), [*expected, expected[0]], strict=True):
        np.testing.assert_allclose(found.boxes, one.boxes, rtol=1e-4, atol=1e-3)


def _jpeg() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (64, 64)).save(content, "JPEG")
    return content.getvalue()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (np.zeros((4, 4, 4), np.uint8), "4, 4, 4"),
        (np.zeros((4, 4), np.uint8), "4, 4"),
        (np.zeros((0, 4, 3), np.uint8), "0, 4, 3"),
        (np.zeros((4, 4, 3)), "float64"),
        (None, "NoneType"),
        (io.BytesIO(b"pixels"), "bytes"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8), "Tensor"),
        ([b"pixels"], "bytes"),
        ("deep.png", r"deep\.png .*8 bits"),  # it would become white
        (Image.fromarray(np.full((64, 64), 3000, np.uint16)), "Pillow .*8 bits"),
        (Image.open(io.BytesIO(_jpeg()[:-9])), "Pillow image cannot be read .*truncated"),
    ],
)
def test_what_is_no_image(predictor, image, tmp_path, monkeypatch, wrong, named):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.full((64, 64), 3000, np.uint16)).save("deep.png")
    with pytest.raises((ConfigError, DataError), match=named):
        predictor(wrong)
    with pytest.raises(ConfigError, match="rgb"):
        predictor(image, channels="rgb")


@pytest.mark.slow
def test_the_best_and_averaged_weights_come_first(run, predictor, image, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run[0].parent, folder)
    content = torch.load(run[1], weights_only=True)
    average = {name: torch.zeros_like(value) for name, value in content["model"].items()}
    best = {**content, "ema": {"model": average}, "iteration": 99}
    torch.save(best, folder / "model_best.pth")
    torch.save({**best, "iteration": 149}, folder / "model_0000149.pth")
    found = Predictor(folder, score_threshold=0.0)
    np.testing.assert_allclose(found(image).scores, 0.25)  # of three classes and the background
    assert str(found.origin) == f"{folder / 'model_best.pth'} (after 100 steps, averaged weights)"
    for options, taken in (
        ({"raw": True}, "model_best.pth (after 100 steps, raw weights)"),
        ({"checkpoint": "150"}, "model_0000149.pth (after 150 steps, averaged weights)"),
        ({"checkpoint": "last"}, "model_final.pth (raw weights)"),
    ):
        found = Predictor(folder, score_threshold=0.0, **options)
        assert str(found.origin) == str(folder / taken)
        assert same(found(image), predictor(image)) == ("raw" in taken)


@pytest.mark.parametrize(
    ("source", "options", "named"),
    [
        ("empty", {}, "no checkpoint"),
        ("nowhere", {}, "nowhere"),
        ("broken.pth", {}, r"broken\.pth is no checkpoint.*name a run"),
        ("config.yaml", {}, r"config\.yaml is a configuration"),
        ("detector.onnx", {"precision": "bfloat16"}, "leave raw and precision"),
        ("model_final.pth", {"batch_size": 0}, "0"),
        ("model_final.pth", {"score_threshold": 50}, "50"),
        ("model_final.pth", {"device": "cuda:99"}, "cuda:99"),
    ],
)
def test_sources_and_options_that_cannot_be(run, tmp_path, source, options, named):
    folder = shutil.copytree(run[0].parent, tmp_path / "run")
    (folder / "empty").mkdir()
    (folder / "broken.pth").write_bytes(b"none")
    with pytest.raises((ConfigError, DataError, WeightsError), match=named):
        Predictor(folder / source, **options)


def test_an_exported_detector_that_does_not_say_its_sizes_warns(monkeypatch, caplog):
    detector = SimpleNamespace(about={}, channels="RGB", resize=None, batch=1, tiling=None)
    module = "lambda_det.detection.prediction.predictor"
    monkeypatch.setattr(f"{module}.resolve_name", lambda name: lambda path, device: detector)
    Predictor("d.onnx")
    assert "d.onnx does not say how its evaluation resizes images" in caplog.text


@pytest.mark.slow
def test_an_exported_detector_of_a_lazy_config_finds_the_same(
    lazy_run, image, tmp_path, monkeypatch
):
    record_nothing(monkeypatch)
    path, folder = tmp_path / "detector.onnx", lazy_run[0]
    opts = ["model.roi_heads.box_predictor.test_score_thresh=0.0"]
    network = network_to_export(folder, opts=opts)
    assert export_network(replace(network, why_none=""), path).passed
    found = lambda_det.Predictor(path, score_threshold=0.0)(image)
    expected = Predictor(folder, score_threshold=0.0)(image)
    np.testing.assert_allclose(found.boxes, expected.boxes, rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-3, atol=1e-4)
    assert (found.classes == expected.classes).all()
    assert (found.masks == expected.masks).mean() > 0.99
