"""A detector on tiles: in a Predictor, and in the evaluation of whole pictures."""

import numpy as np
import pycocotools.mask
import pytest
import torch
from detectron2.structures import Boxes, Instances

from lambda_det.detection.merging import runs
from lambda_det.detection.prediction import Predictor
from lambda_det.detection.saved_run import open_run
from lambda_det.detection.tiled import RunMasks
from tests.training.tiny_detector import save_run

SIZE = 64


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("tiled"))[1]


def predictor(run, size, overlap=0, **options):
    opts = ["INPUT.TILE.SIZE", str(size), "INPUT.TILE.OVERLAP", str(overlap)]
    return Predictor(open_run(run, opts=opts), **{"score_threshold": 0.0, **options})


@pytest.fixture(scope="module")
def pictures():
    rng = np.random.default_rng(3)
    return [rng.integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8) for _ in range(4)]


def bits(prediction):
    names = ("boxes", "scores", "classes", "masks")
    return [getattr(prediction, name).tobytes() for name in names]


@pytest.mark.parametrize("shape", [(SIZE, SIZE), (50, 33)])
def test_one_tile_is_the_picture_to_the_bit(run, pictures, shape):
    picture = pictures[0][: shape[0], : shape[1]]
    for threshold in (0.0, 0.5):
        whole = Predictor(run, score_threshold=threshold)(picture)
        tiled = predictor(run, SIZE, score_threshold=threshold)(picture)
        assert bits(tiled) == bits(whole)
        assert isinstance(tiled.instances.pred_masks, torch.Tensor)
    assert len(whole)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_picture_of_four_pictures_has_their_results(run, pictures, batch_size):
    four = Predictor(run, score_threshold=0.0, batch_size=batch_size)(pictures)
    rows = [np.concatenate(pictures[i : i + 2], 1) for i in (0, 2)]
    found = predictor(run, SIZE, batch_size=batch_size)(np.concatenate(rows))
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
