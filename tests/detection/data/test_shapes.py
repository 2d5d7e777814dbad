from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image

from lambda_det.detection.data import check_coco, make_shapes, register_shapes
from lambda_det.detection.data.shapes import SHAPE_CLASSES
from lambda_det.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    make_shapes(root, num_train=24, num_val=6, size=96, seed=3)
    return root


def load(root, split):
    return json.loads((root / "shapes/annotations" / f"instances_{split}.json").read_text())


def digests(root):
    """The annotations to the byte, and the images to the pixel."""
    found = {}
    for path in sorted((root / "shapes").rglob("*.*")):
        data = (
            np.asarray(Image.open(path)).tobytes() if path.suffix == ".png" else path.read_bytes()
        )
        found[str(path.relative_to(root))] = hashlib.sha256(data).hexdigest()
    return found


def test_layout_and_format(root):
    assert sorted(os.listdir(root)) == ["shapes"]  # nothing of the making is left
    for split, count in (("train", 24), ("val", 6)):
        json_file = root / "shapes/annotations" / f"instances_{split}.json"
        report = check_coco(json_file, root / "shapes" / split)
        assert report.problems == {}
        assert report.images == count
        assert tuple(report.categories.values()) == SHAPE_CLASSES
        assert len(os.listdir(root / "shapes" / split)) == count


def test_same_arguments_same_data(root, tmp_path):
    make_shapes(tmp_path, num_train=24, num_val=6, size=96, seed=3)
    assert digests(tmp_path) == digests(root)


def test_an_image_does_not_depend_on_the_number(root, tmp_path):
    make_shapes(tmp_path, num_train=5, num_val=9, size=96, seed=3)
    other, given = digests(tmp_path), digests(root)
    images = [name for name in other if name.endswith(".png") and name in given]
    assert len(images) == 5 + 6
    assert all(other[name] == given[name] for name in images)


def test_seeds_splits_and_images_differ(root, tmp_path):
    make_shapes(tmp_path, num_train=24, num_val=6, size=96, seed=4)
    images = [d for r in (root, tmp_path) for n, d in digests(r).items() if n.endswith(".png")]
    assert len(set(images)) == len(images) == 60


def test_annotations_agree_with_themselves(root):
    for entry in load(root, "train")["annotations"]:
        (points,) = entry["segmentation"]
        xy = np.array(points).reshape(-1, 2)
        assert (xy >= 0).all() and (xy <= 96).all()
        x, y, w, h = entry["bbox"]
        assert np.allclose([x, y, x + w, y + h], [*xy.min(0), *xy.max(0)], atol=0.011)
        runs = mask_util.merge(mask_util.frPyObjects([points], 96, 96))
        assert abs(float(mask_util.area(runs)) - entry["area"]) < 0.1 * entry["area"] + 15
        assert 0.08 * 96 < max(w, h) < 0.64 * 96


def test_shapes_are_seen_where_their_masks_are(root):
    """The last shape of an image lies over all: vivid inside its mask, and edges at its border."""
    content = load(root, "train")
    for image in content["images"]:
        pixels = np.asarray(Image.open(root / "shapes/train" / image["file_name"])).astype(float)
        entries = [a for a in content["annotations"] if a["image_id"] == image["id"]]
        runs = [mask_util.frPyObjects(a["segmentation"], 96, 96) for a in entries]
        masks = [mask_util.decode(mask_util.merge(r)).astype(bool) for r in runs]
        top = pixels[masks[-1]]
        background = pixels[~np.any(masks, axis=0)]
        saturation = [np.ptp(np.median(part, axis=0)) for part in (top, background)]
        assert saturation[0] > 60 > 40 > saturation[1]


def test_shapes_hide_each_other_but_not_too_much(root):
    overlapping = 0
    content = load(root, "train")
    for image in content["images"]:
        entries = [a for a in content["annotations"] if a["image_id"] == image["id"]]
        masks = [
            mask_util.decode(mask_util.merge(mask_util.frPyObjects(a["segmentation"], 96, 96)))
            for a in entries
        ]
        assert 1 <= len(masks) <= 4
        for index, mask in enumerate(masks):
            above = np.any([np.zeros_like(mask), *masks[index + 1 :]], axis=0)
            hidden = (mask.astype(bool) & above).sum() / mask.sum()
            assert hidden < 0.35
            overlapping += hidden > 0
    assert overlapping >= 3


def test_all_classes_and_sizes_occur(root):
    entries = load(root, "train")["annotations"]
    assert {a["category_id"] for a in entries} == {1, 2, 3}
    sides = [max(a["bbox"][2:]) for a in entries]
    assert min(sides) < 20 and max(sides) > 45


def test_a_second_call_does_nothing(root):
    json_file = root / "shapes/annotations/instances_train.json"
    before = json_file.stat().st_mtime_ns
    make_shapes(root, num_train=24, num_val=6, size=96, seed=3)
    assert json_file.stat().st_mtime_ns == before


def test_other_parameters_do_not_overwrite(root):
    before = digests(root)
    with pytest.raises(DataError, match=r"shapes .*'seed': 3"):
        make_shapes(root, num_train=24, num_val=6, size=96, seed=5)
    assert digests(root) == before


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes/mine.txt").write_text("precious")
    with pytest.raises(DataError, match="shapes"):
        make_shapes(tmp_path, num_train=2, num_val=2)
    assert [p.name for p in (tmp_path / "shapes").iterdir()] == ["mine.txt"]


def test_a_making_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="disk full"):
        make_shapes(tmp_path, num_train=2, num_val=2)
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    make_shapes(tmp_path, num_train=2, num_val=2)
    assert os.listdir(tmp_path) == ["shapes"]


def test_a_root_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file/below"):
        make_shapes(tmp_path / "file" / "below", num_train=2, num_val=2)


@pytest.mark.parametrize("change", [{"num_train": 0}, {"num_val": -1}, {"size": 8}, {"seed": -1}])
def test_numbers_that_cannot_work(tmp_path, change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        make_shapes(tmp_path, **change)
    assert os.listdir(tmp_path) == []


def test_registration_can_be_repeated_and_moved(root, tmp_path):
    before = MetadataCatalog.get("shapes_train").json_file
    try:
        for folder in (tmp_path, root, root):
            register_shapes(folder)
        records = DatasetCatalog.get("shapes_val")
        assert len(records) == 6 and records[0]["file_name"].startswith(str(root))
        assert MetadataCatalog.get("shapes_val").thing_classes == list(SHAPE_CLASSES)
    finally:
        register_shapes(os.path.dirname(os.path.dirname(os.path.dirname(before))))
    assert MetadataCatalog.get("shapes_train").json_file == before
