import copy
import io
import json
from collections.abc import Iterator

import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.structures import BoxMode

from lambda_det.detection.data import check_detector_data, classes, register_coco_files
from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.evaluation import TolerantCOCOEvaluator
from lambda_det.errors import DataError
from lambda_det.weights.formats import write_torch
from tests.coco import found

DETECTOR = Detector("GeneralizedRCNN", keys={"test": "DATASETS.TEST"})


@pytest.fixture
def both(content, write) -> tuple[str, str]:
    """The same data set registered twice, in the second time with the ids exchanged."""
    content["annotations"].pop()  # an odd number: seven of apples and pears
    first = register_coco_files(*write(content), "train")
    swapped = copy.deepcopy(content)
    for category in swapped["categories"]:
        category["id"] = 6 - category["id"]
    for entry in swapped["annotations"]:
        entry["category_id"] = 6 - entry["category_id"]
    return first, register_coco_files(*write(swapped, "swapped"), "test")


@pytest.fixture
def extra() -> Iterator[str]:
    """A data set that another project registered by itself."""
    DatasetCatalog.register("classes_test", lambda: [{"file_name": "a.png"}])
    yield "classes_test"
    DatasetCatalog.remove("classes_test")
    MetadataCatalog.remove("classes_test")


def labels(name: str) -> list[list[str]]:
    """The classes of the objects of each image, by name."""
    records = DatasetCatalog.get(name)
    names = MetadataCatalog.get(name).thing_classes
    return [[names[a["category_id"]] for a in r["annotations"]] for r in records]


def evaluate_truth(name: str, run: list[dict], folder) -> dict:
    """COCO's AP of a model that finds what is there, with the class numbers of ``run``."""
    evaluator = TolerantCOCOEvaluator(name, tasks=("bbox",), output_dir=str(folder))
    evaluator.reset()
    for record, truth in zip(DatasetCatalog.get(name), run, strict=True):
        size = record["height"], record["width"]
        boxes = [BoxMode.convert(a["bbox"], a["bbox_mode"], 0) for a in truth["annotations"]]
        instances = found(size, boxes, [a["category_id"] for a in truth["annotations"]])
        evaluator.process([record], [{"instances": instances}])
    return evaluator.evaluate()["bbox"]


def test_other_ids_are_taken_by_name(both, tmp_path):
    """The run's numbers on data with other ids: the same names, and the same AP of each."""
    first, second = both
    run, truth = classes.describe([first]), DatasetCatalog.get(first)
    assert run["thing_classes"] == ["apple", "pear"]
    assert evaluate_truth(second, truth, tmp_path)["AP"] < 1  # as it was, without a word
    classes.align(DETECTOR, [first, second], run, "model.pth")
    assert labels(second) == labels(first) and sum(map(len, labels(first))) == 7
    assert MetadataCatalog.get(second).thing_classes == ["apple", "pear"]
    truth[0]["annotations"].pop()  # one of three pears is not found
    before, after = (evaluate_truth(name, truth, tmp_path / name) for name in both)
    assert before == pytest.approx(after, abs=0, nan_ok=True)
    assert before["AP-apple"] == pytest.approx(100) and before["AP-pear"] < 80
    check_detector_data(DETECTOR, train=None, test=both)
    # A second time nothing changes, and the order of the file can be had back
    classes.align(DETECTOR, both, run, "model.pth")
    assert labels(second) == labels(first)
    classes.align(DETECTOR, [second], {"thing_classes": ["pear", "apple"]}, "other.pth")
    assert labels(second) == labels(first)
    assert MetadataCatalog.get(second).thing_classes == ["pear", "apple"]


def test_results_are_read_by_name(both, tmp_path):
    first, second = both
    evaluate_truth(first, DatasetCatalog.get(first), tmp_path)
    results = tmp_path / "coco_instances_results.json"
    entries = json.loads(results.read_text())
    assert classes.renumbered(entries, results, first) == entries
    now = classes.renumbered(entries, results, second)
    assert [e["category_id"] for e in now] == [6 - e["category_id"] for e in entries]
    (tmp_path / "categories.json").write_text('[{"id": 1, "name": "plum"}]')
    with pytest.raises(DataError, match=r"results.json.*plum.*swapped.*apple"):
        classes.renumbered(entries, results, second)
    (tmp_path / "categories.json").unlink()  # an evaluation of an earlier version
    assert classes.renumbered(entries, results, second) == entries


def test_colours_follow_their_classes(extra):
    metadata = MetadataCatalog.get(extra)
    metadata.set(thing_classes=["a", "b", "c"], thing_colors=[[1, 1, 1], [2, 2, 2], [3, 3, 3]])
    classes.align(DETECTOR, [extra], {"thing_classes": ["c", "a", "b"]}, "model.pth")
    assert MetadataCatalog.get(extra).thing_colors == [[3, 3, 3], [1, 1, 1], [2, 2, 2]]
    assert DatasetCatalog.get(extra) == [{"file_name": "a.png"}]


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
    """The order matters where it cannot be changed: in masks and keypoints."""
    MetadataCatalog.get(extra).set(**{key: ["cat", "dog"]})
    for names in (["cat", "cow"], ["cat"], ["cat", "dog", "cow"]):
        with pytest.raises(DataError, match=r"classes_test.*cat.*dog.*model\.pth.*cat"):
            classes.align(detector, [extra], {key: names}, "model.pth")
    swapped = {key: ["dog", "cat"]}
    if key != "thing_classes":
        with pytest.raises(DataError, match=r"first in number 0"):
            classes.align(detector, [extra], swapped, "model.pth")
    # What the detector does not predict may differ
    classes.align(Detector("SemanticSegmentor"), [extra, "nowhere"], {"thing_classes": []}, "m")
    classes.align(DETECTOR, [extra], {"stuff_classes": ["x"], "keypoint_names": ["x"]}, "m")


def test_a_checkpoint_holds_all_that_a_data_set_says(extra):
    MetadataCatalog.get(extra).set(
        thing_classes=["b", "a"],
        thing_dataset_id_to_contiguous_id={7: 1, 9: 0},
        thing_colors=np.array([[1, 2, 3], [4, 5, 6]]),
        stuff_classes=("sky",),
        stuff_dataset_id_to_contiguous_id={3: 0},
        ignore_label=np.int64(255),
        keypoint_names=("left_eye", "right_eye"),
        keypoint_flip_map=[("left_eye", "right_eye")],
        keypoint_connection_rules=[("left_eye", "right_eye", (1, 2, 3))],
        evaluator_type="coco",
    )
    described = classes.describe(["nowhere", extra])
    file = io.BytesIO()
    write_torch({"model": {}, "dataset": described}, file)
    assert described == {
        "thing_classes": ["b", "a"],
        "thing_ids": [9, 7],
        "thing_colors": [[1, 2, 3], [4, 5, 6]],
        "stuff_classes": ["sky"],
        "stuff_ids": [3],
        "ignore_label": 255,
        "keypoint_names": ["left_eye", "right_eye"],
        "keypoint_flip_map": [["left_eye", "right_eye"]],
        "keypoint_connection_rules": [["left_eye", "right_eye", [1, 2, 3]]],
    }
    assert json.loads(json.dumps(described)) == described


@pytest.mark.parametrize("entry", [None, 3, "coco", {"thing_classes": [1]}, {"thing_classes": 1}])
def test_an_entry_of_another_kind_says_nothing(entry):
    assert (
        classes.of_checkpoint({"model": {}} | ({} if entry is None else {"dataset": entry})) is None
    )
