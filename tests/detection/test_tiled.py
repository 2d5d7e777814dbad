"""A detector on tiles: in a Predictor, and in the evaluation of whole images."""

import functools
import json
import logging
from pathlib import Path

import cv2
import numpy as np
import pycocotools.mask
import pytest
import torch
from detectron2.evaluation import inference_on_dataset
from detectron2.structures import BitMasks, Boxes, Instances

from lambda_det import errors
from lambda_det.detection.data.label_files import polygons
from lambda_det.detection.evaluation import ground_truth_of
from lambda_det.detection.matches import FALSE, evaluation_of, objects_found
from lambda_det.detection.merging import runs
from lambda_det.detection.prediction import Predictor
from lambda_det.detection.prediction.files import plan_files, predict
from lambda_det.detection.run_masks import RunMasks
from lambda_det.detection.saved_run import open_run
from lambda_det.detection.task import DetectionTask
from lambda_det.own_data.report.class_results import evaluate_detections
from tests.coco import annotation, coco_content, found
from tests.training.tiny_detector import save_run, tiny_config

SIZE = 64


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("tiled"))[1]


@pytest.fixture(scope="module")
def predictor(run):
    """``predictor(tile, threshold, batch)``: each is made once; one of whole images has no tile."""

    @functools.cache
    def make(tile, threshold, batch_size):
        opts = ["INPUT.TILE.SIZE", str(tile), "INPUT.TILE.OVERLAP", "0"]
        saved = open_run(run, opts=opts) if tile else run
        return Predictor(saved, score_threshold=threshold, batch_size=batch_size)

    return make


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(3)
    return [rng.integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8) for _ in range(4)]


@pytest.mark.parametrize("shape", [(SIZE, SIZE), (50, 33)])
def test_one_tile_is_the_image_to_the_bit(predictor, images, shape):
    image = images[0][: shape[0], : shape[1]]
    scores = predictor(0, 0.0, 1)(image).scores
    for threshold in (0.0, float(scores[1:3].mean())):
        whole, tiled = (predictor(size, threshold, 1)(image) for size in (0, SIZE))
        for name in ("boxes", "scores", "classes", "masks"):
            assert getattr(tiled, name).tobytes() == getattr(whole, name).tobytes()
        assert isinstance(tiled.instances.pred_masks, torch.Tensor)
    assert 0 < len(whole) < len(scores)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_image_of_four_images_has_their_results(predictor, images, batch_size):
    four = predictor(0, 0.0, batch_size)(images)
    rows = [np.concatenate(images[i : i + 2], 1) for i in (0, 2)]
    whole = predictor(SIZE, 0.0, batch_size)(np.concatenate(rows))
    assert (np.diff(whole.scores) <= 0).all()
    expected = []
    for number, one in enumerate(four):
        y, x = number // 2 * SIZE, number % 2 * SIZE
        boxes = one.boxes + np.float32([x, y, x, y])
        masks = np.pad(one.masks, ((0, 0), (y, SIZE - y), (x, SIZE - x)))
        expected += _rows(boxes, one.scores, one.classes, masks)
    ours = _rows(whole.boxes, whole.scores, whole.classes, whole.masks)
    assert sorted(ours) == sorted(expected) and len(ours) > 4


def _rows(boxes, scores, classes, masks):
    return [
        (*box.tolist(), score, number, mask.tobytes())
        for box, score, number, mask in zip(boxes, scores, classes, masks, strict=True)
    ]


def test_masks_as_run_lengths():
    size = (30, 41)
    pixels = np.random.default_rng(0).random((9, *size)) < 0.5
    pixels[0], pixels[1], pixels[2, :, 3:9] = False, True, True  # columns that go on
    masks = RunMasks([runs(mask, 0, 0) for mask in pixels], size)
    for one in (masks, RunMasks.of(torch.from_numpy(pixels))):
        np.testing.assert_array_equal(one.numpy(), pixels)
        np.testing.assert_array_equal(torch.stack(list(one)), pixels)
    for number, mask in enumerate(pixels):
        assert masks.polygons(number) == polygons(mask)
        expected = pycocotools.mask.encode(np.asfortranarray(mask, np.uint8))
        assert masks.coco(number)["counts"] == expected["counts"].decode()
        assert masks.area(number) == mask.sum()
    instances = Instances(size, pred_masks=masks, pred_boxes=Boxes(torch.zeros(9, 4)))
    for index in (4, slice(2, 5), torch.tensor([3, 1]), torch.arange(9) > 4):
        expected = pixels[[index]] if isinstance(index, int) else pixels[index]
        np.testing.assert_array_equal(instances[index].pred_masks.numpy(), expected)


# -------------------------------------------------------------------------------------- evaluation
class SeesPixels:
    """A detector without faults: each grey value is an object."""

    def __init__(self):
        self.sizes = set()

    def __call__(self, inputs):
        return [{"instances": self._found(entry["image"][0])} for entry in inputs]

    def _found(self, pixels):
        self.sizes.add(tuple(pixels.shape))
        values = pixels.unique()
        masks = pixels == values[values > 0][:, None, None]
        result = found(tuple(pixels.shape), BitMasks(masks).get_bounding_boxes().tensor.tolist())
        result.scores = torch.linspace(0.9, 0.5, len(masks))
        result.pred_masks = masks
        return result


def save_images(folder):
    """A wide image of 150 squares and two long bars, one of the size of a tile, a smaller one."""
    wide = np.zeros((130, 300), np.uint8)
    corners = [(x, y, 8, 6) for y in range(2, 90, 9) for x in range(1, 286, 19)]
    for value, (x, y, w, h) in enumerate([*corners, (5, 100, 290, 5), (290, 3, 5, 92)], start=1):
        wide[y : y + h, x : x + w] = value
    images, annotations = {1: wide, 2: wide[:64, :64], 3: wide[:50, :40]}, []
    for image, pixels in images.items():
        cv2.imwrite(str(folder / f"{image}.png"), pixels)
        for value in np.unique(pixels[pixels > 0]):
            y, x = np.nonzero(pixels == value)
            box = [int(n) for n in (x[0], y[0], np.ptp(x) + 1, np.ptp(y) + 1)]
            annotations.append(annotation(len(annotations) + 1, image, box))
    content = coco_content({n: f"{n}.png" for n in images}, annotations, {1: "thing"})
    for entry, pixels in zip(content["images"], images.values(), strict=True):
        entry["height"], entry["width"] = pixels.shape
    (folder / "labels.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    save_images(folder)
    cfg = tiny_config()
    cfg.merge_from_list(
        f"DATASETS.TEST_JSON {folder}/labels.json DATASETS.TEST_IMAGES {folder} "
        "INPUT.TILE.SIZE 64 INPUT.TILE.OVERLAP 12 INPUT.MIN_SIZE_TEST 0 TEST.IMS_PER_BATCH 4 "
        f"MODEL.ROI_HEADS.NUM_CLASSES 1 DATALOADER.NUM_WORKERS 0 OUTPUT_DIR {folder}/out "
        "TEST.DETECTIONS_PER_IMAGE 30".split()
    )
    return DetectionTask(cfg).prepare(train=False)


def test_the_ap_is_of_whole_images(task, caplog):
    """Each of 152 objects is found once, with the bars that are longer than a tile in one piece."""
    (name,), model = task.components.test_sets, SeesPixels()
    with caplog.at_level(logging.WARNING):
        evaluator = task.components.make_evaluator(name, "")
    assert "TEST.DETECTIONS_PER_IMAGE" not in caplog.text  # a tile has fewer objects than its image
    results = inference_on_dataset(model, task.components.make_test_loader(name), evaluator)
    assert model.sizes == {(64, 64), (50, 40)}
    for kind in ("bbox", "segm"):
        assert results[kind]["AP"] == pytest.approx(100)
    # COCO's own evaluation would count the first hundred of an image
    file = Path(task.config.OUTPUT_DIR, "inference", "coco_instances_results.json")
    entries = json.loads(file.read_text())
    truth = ground_truth_of(name)
    assert FALSE not in objects_found(evaluation_of(truth, entries, "bbox"))
    [of_class] = evaluate_detections(truth, entries, "bbox", 0.5).classes
    assert of_class.values["AP"] == pytest.approx(100)


@pytest.mark.parametrize("processes", [2, 5])
def test_processes_share_images_and_not_tiles(task, monkeypatch, processes):
    """There are three images, so that some of five processes have none."""
    (name,) = task.components.test_sets
    seen = []
    for rank in range(processes):
        monkeypatch.setattr("detectron2.utils.comm.get_world_size", lambda: processes)
        monkeypatch.setattr("detectron2.utils.comm.get_rank", lambda rank=rank: rank)
        tiles = [entry for batch in task.components.make_test_loader(name) for entry in batch]
        seen += {entry["file_name"] for entry in tiles}
    assert len(seen) == len(set(seen)) == 3


def test_the_progress_of_predict_counts_tiles(predictor, images, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(errors, "_SILENCE", 0.001)
    cv2.imwrite(str(tmp_path / "1.png"), np.concatenate([images[0], images[1]]))
    predict(predictor(SIZE, 0.0, 1), plan_files([tmp_path], tmp_path / "drawn", False))
    progress = capsys.readouterr().err
    assert "so far; tile 2 of 2" in progress
