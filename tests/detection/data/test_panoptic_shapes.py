"""Shapes on patterns: keypoints, semantic and panoptic masks agree with each other."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image

from lambda_det.detection.data import check_coco, make_panoptic_shapes, register_panoptic_shapes
from lambda_det.detection.data.panoptic_shapes import KEYPOINTS, STUFF_CLASSES
from lambda_det.errors import DataError

SIZE = 96


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    make_panoptic_shapes(root, num_train=24, num_val=6, size=SIZE, seed=3)
    return root / "shapes_panoptic"


def _load(root, kind):
    return json.loads((root / "annotations" / f"{kind}_train.json").read_text())


def _pixels(root, kind, name):
    return np.asarray(Image.open(root / kind / name)).astype(int)


def test_the_instances_are_sound(root):
    report = check_coco(root / "annotations/keypoints_train.json", root / "train")
    assert report.problems == {} and report.images == 24


def test_semantic_and_panoptic_masks_agree(root):
    content = _load(root, "panoptic")
    is_thing = {c["id"]: c["isthing"] for c in content["categories"]}
    seen = set()
    for entry in content["annotations"]:
        name = entry["file_name"]
        stuff = _pixels(root, "stuff_train", name)
        ids = _pixels(root, "panoptic_train", name) @ [1, 256, 65536]
        assert set(np.unique(ids).tolist()) == {s["id"] for s in entry["segments_info"]}
        for segment in entry["segments_info"]:
            mask = ids == segment["id"]
            rows, columns = np.nonzero(mask)
            x, y, w, h = segment["bbox"]
            assert segment["area"] == mask.sum()
            assert (x, y) == (columns.min(), rows.min())
            assert (x + w, y + h) == (columns.max() + 1, rows.max() + 1)
            category = segment["category_id"]
            seen.add(category)
            expected = 0 if is_thing[category] else category - 3
            assert (stuff[mask] == expected).all()
    assert seen == {1, 2, 3, 4, 5, 6}


def test_a_panoptic_segment_is_the_visible_part_of_its_instance(root):
    instances, panoptic = _load(root, "keypoints"), _load(root, "panoptic")
    for entry in panoptic["annotations"]:
        ids = _pixels(root, "panoptic_train", entry["file_name"])[..., 0]
        things = [a for a in instances["annotations"] if a["image_id"] == entry["image_id"]]
        for number, thing in enumerate(things, start=1):
            rows, columns = np.nonzero(ids == number)
            x, y, w, h = thing["bbox"]
            assert x - 1 <= columns.min() and columns.max() <= x + w
            assert y - 1 <= rows.min() and rows.max() <= y + h
            assert 0.6 * thing["area"] - 20 < len(rows) < thing["area"] + 20


def test_keypoints_lie_in_their_shape_and_are_named_by_their_side(root):
    instances, panoptic = _load(root, "keypoints"), _load(root, "panoptic")
    files = {i["id"]: i["file_name"] for i in instances["images"]}
    hidden = 0
    numbers: dict[int, int] = {}
    for thing in instances["annotations"]:
        image = thing["image_id"]
        number = numbers[image] = numbers.get(image, 0) + 1
        ids = _pixels(root, "panoptic_train", files[image])[..., 0]
        points = np.reshape(thing["keypoints"], (-1, 3))
        assert len(points) == thing["num_keypoints"] == len(KEYPOINTS)
        for x, y, visibility in points:
            owner = ids[int(y + 0.5), int(x + 0.5)]
            assert visibility == (1 if number < owner < 10 else 2)
            hidden += visibility == 1
        left, top, right, bottom = points[:, :2]
        assert (points[:, 0] >= left[0] - 0.02).all() and (points[:, 0] <= right[0] + 0.02).all()
        assert (points[:, 1] >= top[1] - 0.02).all() and (points[:, 1] <= bottom[1] + 0.02).all()
    assert hidden
    assert len(panoptic["images"]) == 24


def test_the_patterns_can_be_told_apart(root):
    """The grey of plain ground is smooth; checks change both along and across, stripes do, too."""
    spread = {name: [] for name in STUFF_CLASSES}
    for name in os.listdir(root / "train"):
        grey = _pixels(root, "train", name).mean(axis=-1)
        stuff = _pixels(root, "stuff_train", name)
        for index, kind in enumerate(STUFF_CLASSES, start=1):
            if (stuff == index).sum() > 500:
                spread[kind].append(grey[stuff == index].std())
    plain = np.median(spread["plain"])
    assert np.median(spread["striped"]) > 1.5 * plain < np.median(spread["checked"])


def test_same_arguments_same_data_and_no_dependence_on_the_number(root, tmp_path):
    make_panoptic_shapes(tmp_path, num_train=5, num_val=9, size=SIZE, seed=3)
    for kind in ("train", "panoptic_train", "stuff_train"):
        for index in range(5):
            name = f"{index:06d}.png"
            again = _pixels(tmp_path / "shapes_panoptic", kind, name)
            assert (again == _pixels(root, kind, name)).all()
    with pytest.raises(DataError, match="'seed': 3"):
        make_panoptic_shapes(tmp_path, num_train=5, num_val=9, size=SIZE, seed=4)


def test_the_registered_sets(root):
    try:
        for _ in range(2):
            register_panoptic_shapes(root.parent)
        keypoints = DatasetCatalog.get("shapes_keypoints_val")
        panoptic = DatasetCatalog.get("shapes_panoptic_val")
        stuff = DatasetCatalog.get("shapes_stuff_val")
        assert len(keypoints) == len(panoptic) == len(stuff) == 6
        assert {a["category_id"] for r in panoptic for a in r["annotations"]} <= {0, 1, 2}
        assert all(os.path.isfile(r["sem_seg_file_name"]) for r in panoptic + stuff)
        assert MetadataCatalog.get("shapes_stuff_val").stuff_classes[1:] == list(STUFF_CLASSES)
    finally:
        register_panoptic_shapes(os.getenv("DETECTRON2_DATASETS", "datasets"))
