from __future__ import annotations

import json

import cv2
import numpy as np
import pycocotools.mask as mask_util
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.structures import Boxes, BoxMode, Instances

from lambda_det.errors import ConfigError, DataError
from lambda_det.report.results import Match, Pictures, draw_results, match

BOXES = {10: [4, 6, 20, 16], 20: [30, 10, 24, 30], 30: [8, 8, 30, 30]}


@pytest.fixture
def data(tmp_path):
    """Three registered grey images of 64x48 with one object each, of the categories 3 and 7."""
    folder = tmp_path / "images"
    folder.mkdir()
    images, annotations = [], []
    for image, box in BOXES.items():
        images.append({"id": image, "file_name": f"{image}.png", "width": 64, "height": 48})
        cv2.imwrite(str(folder / f"{image}.png"), np.full((48, 64, 3), 90, np.uint8))
        category = 7 if image == 20 else 3
        annotations.append(
            {"id": image, "image_id": image, "category_id": category, "bbox": box, "iscrowd": 0}
            | {"area": box[2] * box[3], "segmentation": []}
        )
    categories = [{"id": 3, "name": "apple"}, {"id": 7, "name": "pear"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (tmp_path / "truth.json").write_text(json.dumps(content))
    register_coco_instances("fruit", {}, str(tmp_path / "truth.json"), str(folder))
    yield "fruit"
    DatasetCatalog.remove("fruit")
    MetadataCatalog.remove("fruit")


def entry(image, category, box=None, score=0.9, **more):
    return {
        "image_id": image,
        "category_id": category,
        "bbox": BOXES[image] if box is None else box,
        "score": score,
        **more,
    }


@pytest.fixture
def write(tmp_path):
    def write_results(content):
        path = tmp_path / "coco_instances_results.json"
        path.write_text(json.dumps(content))
        return path

    return write_results


# 10 is found, 20 has the wrong class, 30 has a false one besides and one below the threshold
RESULTS = [
    entry(10, 3),
    entry(20, 3),
    entry(30, 3),
    entry(30, 3, [0, 0, 9, 9]),
    entry(20, 7, score=0.2),
]


@pytest.mark.parametrize(
    ("results", "options", "drawn", "counts"),
    [
        (RESULTS, {}, ["0000_10", "0001_20", "0002_30"], Match(found=2, missed=1, false=2)),
        (
            RESULTS,
            {"worst_first": True, "limit": 2},
            ["0000_20", "0001_30"],
            Match(found=1, missed=1, false=2),
        ),
        (  # of two images of which nothing is found
            [entry(10, 7), entry(20, 3), entry(20, 3, [0, 0, 9, 9]), entry(30, 3)],
            {"worst_first": True, "limit": 2},
            ["0000_20", "0001_10"],
            Match(found=0, missed=2, false=3),
        ),
        (
            RESULTS,
            {"score_threshold": 0.1},
            ["0000_10", "0001_20", "0002_30"],
            Match(found=3, missed=0, false=2),
        ),
    ],
    ids=["all", "worst", "most errors", "threshold"],
)
def test_counts_and_the_order_of_pictures(data, write, results, options, drawn, counts):
    pictures = Pictures()
    assert draw_results(write(results), data, pictures, **options) == counts
    assert [name for name, _ in pictures.kept] == drawn


def halves(picture):
    """The predicted and the true picture, at a scale of 8."""
    picture = picture[26:]  # below the caption
    return picture[:, :512], picture[:, -512:]


def test_predictions_are_at_the_left_where_the_file_says(data, write, tmp_path):
    mask = np.zeros((48, 64), np.uint8)
    mask[20:40, 34:60] = 1
    runs = mask_util.encode(np.asfortranarray(mask))
    runs = {"size": runs["size"], "counts": runs["counts"].decode()}
    pictures = Pictures()
    draw_results(
        write([entry(10, 7, [34, 20, 26, 20], segmentation=runs)]), data, pictures, limit=1
    )
    left, right = halves(pictures.kept[0][1])
    covered = (left != 90).any(2)
    assert covered[22 * 8 : 38 * 8, 36 * 8 : 58 * 8].all() and not covered[:, : 32 * 8].any()
    truth = (right != 90).any(2)
    assert truth[10 * 8 : 20 * 8, 8 * 8 : 20 * 8].all() and not truth[:, 40 * 8 :].any()


def test_keypoints_are_drawn_on_both_sides(data, write, tmp_path):
    points = [20, 40, 2, 50, 40, 2]
    DatasetCatalog.remove(data)
    record = {"file_name": str(tmp_path / "images" / "10.png"), "image_id": 10}
    record |= {"height": 48, "width": 64}
    record["annotations"] = [
        {"bbox": BOXES[10], "bbox_mode": BoxMode.XYWH_ABS, "category_id": 0, "keypoints": points}
    ]
    DatasetCatalog.register(data, lambda: [record])
    MetadataCatalog.remove(data)
    MetadataCatalog.get(data).set(
        thing_classes=["apple"],
        keypoint_names=["a", "b"],
        keypoint_connection_rules=[("a", "b", (0, 255, 0))],
    )
    pictures = Pictures()
    # A data set in code, without ids of its own: its categories count from 0
    draw_results(write([entry(10, 0, keypoints=points)]), data, pictures)
    for half in halves(pictures.kept[0][1]):
        assert (half[40 * 8, 22 * 8 : 48 * 8] != 90).any(1).all()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"a": 1}, "list"),
        ([{"image_id": 10}], "predictions"),
        ([{"image_id": 10, "category_id": 3, "score": 1}], "predictions"),
    ],
)
def test_other_files_are_refused(data, write, content, words):
    with pytest.raises(DataError, match=rf"coco_instances_results\.json.*{words}"):
        draw_results(write(content), data, Pictures())


def test_predictions_of_images_that_are_left_out_are_counted(data, write, tmp_path, caplog):
    results = [*RESULTS, entry(10, 3) | {"image_id": 99}]
    assert draw_results(write(results), data, Pictures()).found == 2
    assert "1 of the 6" in caplog.text


def test_missing_images_and_data_sets_are_named(data, write, tmp_path):
    with pytest.raises(ConfigError, match="fruit"):
        draw_results(write(RESULTS), "fruits", Pictures())
    (tmp_path / "images" / "20.png").unlink()
    with pytest.raises(DataError, match=r"20\.png"):
        draw_results(write(RESULTS), data, Pictures())


# ---- matching


def predicted(*entries):
    """Entries are (score, class, box)."""
    instances = Instances((100, 100))
    instances.pred_boxes = Boxes(torch.tensor([e[2] for e in entries]).reshape(-1, 4).float())
    instances.scores = torch.tensor([float(e[0]) for e in entries])
    instances.pred_classes = torch.tensor([e[1] for e in entries], dtype=torch.int64)
    return instances


def true(category, box, crowd=0):
    x0, y0, x1, y1 = box
    return {
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "bbox_mode": BoxMode.XYWH_ABS,
        "category_id": category,
        "iscrowd": crowd,
    }


BOX = (10, 10, 50, 50)
# Nearly BOX: an intersection over union of 0.9; HALF: of 0.45
NEAR, HALF = (10, 10, 50, 46), (10, 10, 50, 28)


@pytest.mark.parametrize(
    ("predictions", "truth", "expected"),
    [
        ([], [], Match(0, 0, 0)),
        ([], [true(0, BOX)], Match(0, 1, 0)),
        ([(0.9, 0, BOX)], [], Match(0, 0, 1)),
        ([(0.9, 0, NEAR)], [true(0, BOX)], Match(1, 0, 0)),
        ([(0.9, 1, NEAR)], [true(0, BOX)], Match(0, 1, 1)),
        ([(0.9, 0, HALF)], [true(0, BOX)], Match(0, 1, 1)),
        ([(0.9, 0, NEAR), (0.8, 0, BOX)], [true(0, BOX)], Match(1, 0, 1)),
        ([(0.8, 0, BOX), (0.9, 0, NEAR)], [true(0, BOX), true(0, NEAR)], Match(2, 0, 0)),
        # The better score takes what the other one needs, though it would fit the second object
        (
            [(0.8, 0, (0, 10, 40, 50)), (0.9, 0, (11, 10, 51, 50))],
            [true(0, BOX), true(0, (14, 10, 54, 50))],
            Match(1, 1, 1),
        ),
        ([(0.9, 0, (12, 12, 20, 20))], [true(0, BOX, crowd=1)], Match(0, 0, 0)),
        ([(0.9, 1, (12, 12, 20, 20))], [true(0, BOX, crowd=1)], Match(0, 0, 1)),
        ([(0.9, 0, (40, 40, 99, 99))], [true(0, BOX, crowd=1)], Match(0, 0, 1)),
    ],
)
def test_counts(predictions, truth, expected):
    assert match(predicted(*predictions), truth) == expected
