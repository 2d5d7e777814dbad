"""Records that a user's function registers are decided about once, where they are loaded."""

import copy

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import DatasetCatalog, DatasetFromList, MetadataCatalog
from detectron2.structures import BoxMode

from lambda_det.detection.data.registration import check_files
from lambda_det.detection.data.truth import Decided, decided
from tests.coco import true_box

BOX = true_box(8, 6, 30, 20)
SOUND = {**BOX, "segmentation": [[8, 6, 38, 6, 38, 26, 8, 26]]}
RUNS = mask_util.encode(np.ones((48, 64), np.uint8, order="F"))
FAR = [10, 10, 9e5, 10, 9e5, 9e5, 10, 9e5]


@pytest.fixture
def load():
    """Register annotations of one image, and give what is loaded of them."""

    def load_annotations(*annotations, of=list, **metadata):
        record = {"file_name": "a.png", "height": 48, "width": 64, "annotations": [*annotations]}
        before = copy.deepcopy(record)
        DatasetCatalog.pop("own", None)
        DatasetCatalog.register("own", lambda: of([record]))
        MetadataCatalog.get("own").set(**metadata)
        for _ in range(2):  # the second changes nothing
            check_files("own")
        loaded = [DatasetCatalog.get("own") for _ in range(2)][1]
        assert repr(record) == repr(before)
        return loaded[0]["annotations"]

    return load_annotations


# test_coco.py has more values of each kind
@pytest.mark.parametrize(
    "change",
    [
        {"bbox": [0, 0, float("nan"), 9]},
        {"bbox": [40, 30, 9, 9]},  # elsewhere than its mask
        {"bbox_mode": None},
        {"bbox_mode": BoxMode.XYXY_REL},
    ],
)
def test_an_annotation_without_a_usable_box_is_left_out(load, caplog, change):
    assert load(SOUND, {**SOUND, **change}) == [SOUND]
    (message,) = [r.getMessage() for r in caplog.records]  # once, however often it is loaded
    assert "own: 1 x " in message and "without a usable box" in message and "a.png" in message


@pytest.mark.parametrize("mask", [{"size": [49, 64], "counts": [3136]}, np.ones((48, 64)), []])
def test_a_broken_mask_is_taken_away(load, caplog, mask):
    assert load({**SOUND, "segmentation": mask}) == [BOX]
    said = ["mask that cannot be used" in r.getMessage() for r in caplog.records]
    assert said == [True] * (len(mask) > 0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bbox": [8, 6, 38, 26], "bbox_mode": BoxMode.XYXY_ABS},
        {"bbox": [20, 20, 30, 10, 45], "bbox_mode": BoxMode.XYWHA_ABS},
        {"segmentation": RUNS, "bbox": [0, 0, 64, 48]},
        {"iscrowd": 1},
        {"keypoints": [1, 2, 2] * 2},
    ],
)
def test_what_is_sound_stays_as_it_is(load, caplog, changes):
    annotation = {**SOUND, **changes}
    assert load(annotation, keypoint_names=["a", "b"]) == [annotation]
    assert not caplog.records


def test_a_tuple_is_decided_about_and_a_data_set_of_pytorch_is_left_to_the_loader(load):
    assert load(SOUND, {**SOUND, "bbox": [1, 2]}, of=tuple) == [SOUND]
    assert len(load(SOUND, {**SOUND, "bbox": [1, 2]}, of=DatasetFromList)) == 2


@pytest.mark.parametrize("box", [None, [], "abcd"])
def test_a_box_that_is_missing_is_that_of_the_mask(load, caplog, box):
    for mask, expected in ((SOUND["segmentation"], SOUND["bbox"]), (RUNS, [0, 0, 64, 48])):
        (found,) = load({**SOUND, "segmentation": mask, "bbox": box})
        assert found["bbox"] == expected
    assert "the box of its mask" in caplog.text
    assert load({**BOX, "bbox": box}) == []


@pytest.mark.parametrize(("pixels", "is_kept"), [(100, True), (101, False)])
def test_a_mask_in_run_lengths_is_in_its_box_by_its_pixels(load, pixels, is_kept):
    """A speck far away, as brushes leave it, makes no other object of it."""
    mask = np.zeros((48, 64), np.uint8, order="F")
    mask[10:20, 10:20] = 1
    mask[36:, 50:].flat[:pixels] = 1
    found = load(SOUND, {**SOUND, "bbox": [10, 10, 10, 10], "segmentation": mask_util.encode(mask)})
    assert len(found) == 1 + is_kept


def test_nothing_is_decided_twice(load):
    record = {"annotations": load(SOUND)}
    assert isinstance(record["annotations"], Decided)
    assert decided(record)[0] is record


def test_keypoints_of_another_number_are_taken_away(load, caplog):
    keypoints = {**SOUND, "keypoints": [1, 2, 2]}
    assert load(keypoints, keypoint_names=["a", "b"]) == [SOUND]
    assert "keypoints" in caplog.text


def test_boxes_are_cut_at_the_border(load):
    corners = {**BOX, "bbox": [50, 30, 68, 50], "bbox_mode": BoxMode.XYXY_ABS}
    assert load(corners) == [{**BOX, "bbox": [50, 30, 14, 18]}]
    assert load({**BOX, "bbox": [80, 30, 18, 20]}) == []


def test_polygons_are_cut_and_split(load):
    """Outside of the image; where one crosses itself, so that its lobes cancel out."""
    crossed = [4, 4, 44, 24, 44, 4, 4, 24]
    whole = {**SOUND, "bbox": [0, 0, 64, 48]}
    (found,) = load({**whole, "segmentation": [FAR, crossed, [1, 2, 3]]})
    parts = found["segmentation"]
    masks = mask_util.decode(mask_util.frPyObjects(parts, 48, 64))
    assert masks.sum((0, 1)).tolist() == pytest.approx([54 * 38, 200, 200], abs=25)
    assert np.max(parts[0]) == 64
