"""A detector on tiles: in a Predictor, and in the evaluation of whole images."""

import functools
import json
import logging

import cv2
import numpy as np
import pycocotools.mask
import pytest
import torch
from detectron2.evaluation import inference_on_dataset
from detectron2.structures import Boxes, Instances

from lambda_det.detection.merging import runs
from lambda_det.detection.prediction import Predictor
from lambda_det.detection.prediction.files import plan_files, predict
from lambda_det.detection.run_masks import RunMasks
from lambda_det.detection.saved_run import open_run
from lambda_det.detection.task import DetectionTask
from tests.coco import annotation, coco_content
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


def bits(prediction):
    names = ("boxes", "scores", "classes", "masks")
    return [getattr(prediction, name).tobytes() for name in names]


@pytest.mark.parametrize("shape", [(SIZE, SIZE), (50, 33)])
def test_one_tile_is_the_image_to_the_bit(predictor, images, shape):
    image = images[0][: shape[0], : shape[1]]
    scores = predictor(0, 0.0, 1)(image).scores
    for threshold in (0.0, float(scores[1:3].mean())):
        whole = predictor(0, threshold, 1)(image)
        tiled = predictor(SIZE, threshold, 1)(image)
        assert bits(tiled) == bits(whole)
        assert isinstance(tiled.instances.pred_masks, torch.Tensor)
    assert 0 < len(whole) < len(scores)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_image_of_four_images_has_their_results(predictor, images, batch_size):
    four = predictor(0, 0.0, batch_size)(images)
    rows = [np.concatenate(images[i : i + 2], 1) for i in (0, 2)]
    found = predictor(SIZE, 0.0, batch_size)(np.concatenate(rows))
    assert len(found) == sum(map(len, four)) > 4
    assert (np.diff(found.scores) <= 0).all()
    assert found.masks.shape == (len(found), 2 * SIZE, 2 * SIZE)
    there = {
        (*box.tolist(), score, number, mask.tobytes())
        for box, score, number, mask in zip(
            found.boxes, found.scores, found.classes, found.masks, strict=True
        )
    }
    for number, one in enumerate(four):
        y, x = number // 2 * SIZE, number % 2 * SIZE
        for i in range(len(one)):
            mask = np.zeros((2 * SIZE, 2 * SIZE), bool)
            mask[y : y + SIZE, x : x + SIZE] = one.masks[i]
            box = one.boxes[i] + np.float32([x, y, x, y])
            assert (*box.tolist(), one.scores[i], one.classes[i], mask.tobytes()) in there


def test_masks_as_run_lengths():
    rng = np.random.default_rng(0)
    size = (30, 41)
    pixels = rng.random((9, *size)) < 0.5
    pixels[0], pixels[1], pixels[2, :, 3:9] = False, True, True  # columns that go on
    masks = RunMasks([runs(mask, 0, 0) for mask in pixels], size)
    np.testing.assert_array_equal(masks.numpy(), pixels)
    np.testing.assert_array_equal(np.asarray(masks), pixels)
    again = RunMasks.of_coco([masks.coco(number) for number in range(9)], size)
    np.testing.assert_array_equal(again.numpy(), pixels)
    assert RunMasks.of(torch.from_numpy(pixels)).coco(5) == masks.coco(5) == again.coco(5)
    for number, mask in enumerate(pixels):
        np.testing.assert_array_equal(masks[number].numpy(), mask)
        crop, (x, y) = masks.cropped(number)
        put = np.zeros(size, bool)
        put[y : y + crop.shape[0], x : x + crop.shape[1]] = crop
        np.testing.assert_array_equal(put, mask)
        expected = pycocotools.mask.encode(np.asfortranarray(mask, np.uint8))
        assert masks.coco(number)["counts"] == expected["counts"].decode()
        assert masks.area(number) == mask.sum()
    instances = Instances(size, pred_masks=masks, pred_boxes=Boxes(torch.zeros(9, 4)))
    chosen = {"of a number": (4, pixels[4:5]), "of a slice": (slice(2, 5), pixels[2:5])}
    chosen["of numbers"] = torch.tensor([3, 1]), pixels[[3, 1]]
    chosen["of booleans"] = torch.arange(9) > 4, pixels[5:]
    for index, expected in chosen.values():
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
        values = [value for value in pixels.unique() if value]
        masks = torch.stack([pixels == value for value in values]) if values else torch.zeros(0, 1)
        masks = masks.bool().reshape(-1, *pixels.shape)
        boxes = [[*c.min(1)[0][[1, 0]], *c.max(1)[0][[1, 0]] + 1] for c in map(_where, masks)]
        found = Instances(tuple(pixels.shape))
        found.pred_boxes = Boxes(torch.tensor(boxes).reshape(-1, 4).float())
        found.scores = torch.linspace(0.9, 0.5, len(values))
        found.pred_classes = torch.zeros(len(values), dtype=torch.int64)
        found.pred_masks = masks
        return found


def _where(mask):
    return torch.stack(mask.nonzero(as_tuple=True))


def save_images(folder):
    """A wide image of 150 squares and two long bars, one of the size of a tile, a smaller one."""
    wide = np.zeros((130, 300), np.uint8)
    corners = [(x, y, 8, 6) for y in range(2, 90, 9) for x in range(1, 286, 19)]
    for value, (x, y, w, h) in enumerate([*corners, (5, 100, 290, 5), (290, 3, 5, 92)], start=1):
        wide[y : y + h, x : x + w] = value
    images = {"wide.png": wide, "tile.png": wide[:64, :64], "small.png": wide[:50, :40]}
    annotations, number = [], 1
    for image_id, (name, pixels) in enumerate(images.items(), start=1):
        cv2.imwrite(str(folder / name), pixels)
        for value in np.unique(pixels[pixels > 0]):
            y, x = np.nonzero(pixels == value)
            box = [int(n) for n in (x[0], y[0], np.ptp(x) + 1, np.ptp(y) + 1)]
            annotations.append(annotation(number, image_id, box, category_id=1))
            number += 1
    names = dict(enumerate(images, start=1))
    content = coco_content(names, annotations, {1: "thing"})
    for image, pixels in zip(content["images"], images.values(), strict=True):
        image["height"], image["width"] = pixels.shape
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


@pytest.mark.slow
def test_the_losses_of_an_evaluation_are_those_of_the_tiles_of_a_training(task):
    cfg = task.config.clone()
    cfg.defrost()
    cfg.TEST.LOSS = True
    loader = DetectionTask(cfg).components.make_loss_loader(cfg.DATASETS.TEST[0])
    entries = [entry for (entry,) in loader]
    assert {tuple(entry["image"].shape[1:]) for entry in entries} == {(64, 64), (50, 40)}
    assert all(len(entry["instances"]) for entry in entries)


@pytest.mark.parametrize("number", [1, 2])
def test_the_progress_of_predict_counts_tiles(predictor, images, number, tmp_path, capsys):
    for name in range(number):
        cv2.imwrite(str(tmp_path / f"{name}.png"), np.concatenate([images[0], images[1]]))
    predict(predictor(SIZE, 0.0, 1), plan_files([tmp_path], tmp_path / "drawn", False))
    progress = capsys.readouterr().err
    assert "tile 1 of 2" in progress and "tile 2 of 2" in progress
