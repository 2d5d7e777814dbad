"""Records of registered data sets are repaired once, where they are loaded."""

import copy

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import DatasetCatalog, DatasetFromList, MetadataCatalog
from detectron2.structures import BoxMode

from lambda_det.detection.data import truth

SOUND = {
    "bbox": [8, 6, 30, 20],
    "bbox_mode": BoxMode.XYWH_ABS,
    "category_id": 0,
    "segmentation": [[8, 6, 38, 6, 38, 26, 8, 26]],
}
RUNS = mask_util.encode(np.ones((48, 64), np.uint8, order="F"))
NAN, FAR = float("nan"), [10, 10, 9e5, 10, 9e5, 9e5, 10, 9e5]
BROKEN_BOXES = (
    *([0, 0, 0, 9], [0, 0, 5, -9], [0, 0, NAN, 9], [0, 0, 10**400, 5], [1, 2], None, "abcd"),
    [0, 0, 1e300, 9],
)
BROKEN_MASKS = (
    *([[1, 2, 3, 4]], [[1, 2, 3, 4, 5, 6, 7]], [[1, 2, 3, 4, 5, NAN]], [["a"] * 6], "nonsense", 3),
    [[5, 5, 20, 5, 30, 5]],  # without area
    {"size": [49, 64], "counts": [3136]},
    {"size": [48, 64], "counts": [5, 5]},
    np.ones((48, 64)),
)


@pytest.fixture
def load():
    """Register annotations of one image, sanitise, and give what is loaded of them."""

    def load_annotations(*annotations, checked=False, of=list, **metadata):
        record = {"file_name": "a.png", "height": 48, "width": 64, "annotations": [*annotations]}
        before = copy.deepcopy(record)
        DatasetCatalog.register("own", lambda: of([record]))
        MetadataCatalog.get("own").set(**metadata)
        for _ in range(2):  # the second changes nothing
            truth.sanitise("own", checked=checked)
        loaded = [DatasetCatalog.get("own") for _ in range(2)][1]
        assert repr(record) == repr(before)
        return loaded[0]["annotations"]

    yield load_annotations
    DatasetCatalog.remove("own")
    MetadataCatalog.remove("own")


@pytest.mark.parametrize("number", range(len(BROKEN_BOXES)))
def test_an_annotation_without_a_usable_box_is_left_out(load, caplog, number):
    assert load(SOUND, {**SOUND, "bbox": BROKEN_BOXES[number]}) == [SOUND]
    (message,) = [r.getMessage() for r in caplog.records]  # once, however often it is loaded
    assert "own: 1 x " in message and "usable box" in message and "a.png" in message


@pytest.mark.parametrize("mode", [None, BoxMode.XYXY_REL])
def test_none_has_a_usable_box(load, mode):
    assert load({**SOUND, "bbox_mode": mode}) == []


@pytest.mark.parametrize("number", range(len(BROKEN_MASKS)))
def test_a_broken_mask_is_taken_away(load, caplog, number):
    without = {key: value for key, value in SOUND.items() if key != "segmentation"}
    assert load({**SOUND, "segmentation": BROKEN_MASKS[number]}) == [without]
    assert ["broken mask" in r.getMessage() for r in caplog.records] == [True]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bbox": [8, 6, 38, 26], "bbox_mode": BoxMode.XYXY_ABS},
        {"bbox": [20, 20, 30, 10, 45], "bbox_mode": BoxMode.XYWHA_ABS},
        {"segmentation": RUNS},
        {"iscrowd": 1, "bbox": None},  # nothing reads it
        {"keypoints": [1, 2, 2] * 2},
    ],
    ids=["polygon", "corners", "rotated", "runs", "crowd", "keypoints"],
)
def test_what_is_sound_is_the_same_object(load, caplog, changes):
    annotation = {**SOUND, **changes}
    assert load(annotation, keypoint_names=["a", "b"])[0] is annotation
    assert not caplog.records


def test_a_tuple_is_repaired_and_a_data_set_of_pytorch_is_left_to_the_mapper(load):
    assert load(SOUND, {**SOUND, "bbox": None}, of=tuple) == [SOUND]
    DatasetCatalog.remove("own")
    assert len(load(SOUND, {**SOUND, "bbox": None}, of=DatasetFromList)) == 2


def test_nothing_is_repaired_twice(load):
    record = {"annotations": load(SOUND)}
    assert truth.sanitised([record], "own")[0] is record


def test_an_empty_list_is_no_mask(load, caplog):
    assert "segmentation" not in load({**SOUND, "segmentation": []})[0]
    assert not caplog.records


def test_keypoints_of_another_number_are_taken_away(load, caplog):
    keypoints = {**SOUND, "keypoints": [1, 2, 2]}
    assert load(keypoints, keypoint_names=["a", "b"]) == [SOUND]
    assert "keypoints" in caplog.text


@pytest.mark.parametrize("checked", [True, False])
def test_runs_are_compressed_unless_they_are_known_to_be_sound(load, checked):
    runs = {"size": [48, 64], "counts": [72, 3000]}
    (found,) = load({**SOUND, "segmentation": runs}, checked=checked)
    assert (found["segmentation"] is runs) == checked
    assert checked or mask_util.area(found["segmentation"]) == 3000


def test_polygons_are_cut_and_split(load):
    """Outside of the image; where one crosses itself, so that its lobes cancel out."""
    crossed = [4, 4, 44, 24, 44, 4, 4, 24]
    (found,) = load({**SOUND, "segmentation": [FAR, crossed, [1, 2, 3]]})
    parts = found["segmentation"]
    masks = mask_util.decode(mask_util.frPyObjects(parts, 48, 64))
    assert masks.sum((0, 1)).tolist() == pytest.approx([54 * 38, 200, 200], abs=25)
    assert np.max(parts[0]) == 64
