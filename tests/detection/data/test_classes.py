import io
import json

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.detection.data import check_detector_data, classes, register_coco_files
from lambda_det.detection.data.predictions import Detector
from lambda_det.errors import DataError

DETECTOR = Detector("GeneralizedRCNN", keys={"test": "DATASETS.TEST"})


@pytest.fixture
def both(content, write) -> tuple[str, str]:
    """The same data set registered twice, in the second time with the ids exchanged."""
    content["annotations"].pop()  # an odd number: seven of apples and pears
    first = register_coco_files(*write(content), "train")
    for category in content["categories"]:
        category["id"] = 6 - category["id"]
    for entry in content["annotations"]:
        entry["category_id"] = 6 - entry["category_id"]
    return first, register_coco_files(*write(content, "swapped"), "test")


@pytest.fixture
def extra() -> str:
    """A data set that another project registered by itself."""
    DatasetCatalog.register("classes_test", lambda: [{"file_name": "a.png"}])
    return "classes_test"


def test_another_order_is_refused_with_what_is_elsewhere(both):
    first, second = both
    run = classes.facts_of([first])
    assert run["thing_classes"] == ["apple", "pear"]
    classes.check(DETECTOR, [first], run, "model.pth")
    with pytest.raises(
        DataError, match=r"swapped\.json differ.*model.pth: only in order, pear for apple, apple"
    ):
        classes.check(DETECTOR, both, run, "model.pth")
    with pytest.raises(
        DataError, match=r"swapped\.json differ.*set\.json: only in order, pear for apple"
    ) as caught:
        check_detector_data(DETECTOR, train=[first], test=[second])
    assert not any(name in str(caught.value) for name in both)  # which are nobody's words
    with pytest.raises(DataError, match=r"swapped\.json"):
        check_detector_data(DETECTOR, train=both, test=[])


@pytest.mark.parametrize(
    ("detector", "key"),
    [
        (DETECTOR, "thing_classes"),
        (Detector("PanopticFPN"), "thing_classes"),
        (Detector("PanopticFPN"), "stuff_classes"),
        (Detector("SemanticSegmentor"), "stuff_classes"),
        (Detector("GeneralizedRCNN", keypoints=2), "keypoint_names"),
    ],
)
def test_other_classes_are_refused(extra, detector, key):
    MetadataCatalog.get(extra).set(**{key: ["cat", "dog"]})
    for names, difference in (
        (["cat", "cow"], "the first alone has dog, and the second cow"),
        (["cat"], "the first alone has dog, and the second none"),
        (["cat", "dog", "cow"], "the first alone has none, and the second cow"),
        (["cat", "dog", "dog"], "the first alone has none, and the second dog"),
        (["dog", "cat"], "only in order, cat for dog, dog for cat"),
    ):
        with pytest.raises(DataError, match=rf"classes_test.*model\.pth: {difference};"):
            classes.check(detector, [extra], {key: names}, "model.pth")
    # What the detector does not predict may differ
    classes.check(Detector("SemanticSegmentor"), [extra, "nowhere"], {"thing_classes": []}, "m")
    classes.check(DETECTOR, [extra], {"stuff_classes": ["x"], "keypoint_names": ["x"]}, "m")


def test_a_checkpoint_holds_all_that_a_data_set_says(extra):
    same = {"thing_classes": ["b", "a"], "thing_colors": [[1, 2, 3], [4, 5, 6]]}
    pairs, rules = [["l_eye", "r_eye"]], [["l_eye", "r_eye", [1, 2, 3]]]
    MetadataCatalog.get(extra).set(
        **same,
        thing_dataset_id_to_contiguous_id={7: 1, 9: 0},
        stuff_colors=np.array([[1, 2, 3]]),
        stuff_classes=("sky",),
        stuff_dataset_id_to_contiguous_id={3: 0},
        ignore_label=np.int64(255),
        keypoint_names=("l_eye", "r_eye"),
        keypoint_flip_map=list(map(tuple, pairs)),
        keypoint_connection_rules=rules,
        evaluator_type="coco",
    )
    described = classes.facts_of(["nowhere", extra])
    assert "nowhere" not in MetadataCatalog
    torch.save({"model": {}, "dataset": described}, io.BytesIO())
    assert described == {
        **same,
        "thing_ids": [9, 7],
        "stuff_colors": [[1, 2, 3]],
        "stuff_classes": ["sky"],
        "stuff_ids": [3],
        "ignore_label": 255,
        "keypoint_names": ["l_eye", "r_eye"],
        "keypoint_flip_map": pairs,
        "keypoint_connection_rules": rules,
    }
    assert json.loads(json.dumps(described)) == described


@pytest.mark.parametrize("entry", [3, "coco"])
def test_an_entry_of_another_kind_says_nothing(entry):
    assert classes.of_checkpoint({"model": {}, "dataset": entry}) is None
