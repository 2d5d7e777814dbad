"""Results are read beside the data that they are of, and no others."""

import copy
from pathlib import Path

import pycocotools.mask as mask_util
import pytest
from detectron2.data import DatasetCatalog

from lambda_det.detection.data import register_coco_files
from lambda_det.detection.data.identity import FILE, check_identity
from lambda_det.detection.evaluation import TolerantCOCOEvaluator, ground_truth_of
from lambda_det.errors import DataError
from tests.coco import found, put


@pytest.fixture
def results(content, write, tmp_path) -> Path:
    """The results of an evaluation on :func:`content`."""
    name = register_coco_files(*write(content), "test")
    evaluator = TolerantCOCOEvaluator(name, tasks=("bbox",), output_dir=str(tmp_path))
    evaluator.reset()
    for record in DatasetCatalog.get(name):
        evaluator.process([record], [{"instances": found((48, 64), [[1, 1, 20, 20]])}])
    evaluator.evaluate()
    return tmp_path / "coco_instances_results.json"


def check(results: Path, content, write) -> None:
    name = register_coco_files(*write(content, "now"), "test")
    check_identity(results, name, ground_truth_of(name))


def _renumber(content, ids):
    """Give categories other ids, in which they are listed then."""
    for category in content["categories"]:
        category["id"] = ids[category["id"]]
    for entry in content["annotations"]:
        entry["category_id"] = ids[entry["category_id"]]


def _without_an_image(content):
    content["images"].pop()
    content["annotations"] = content["annotations"][:-2]


CHANGES = {
    "another box": put("annotations", 0, bbox=[5, 6, 20, 16]),
    "another size": put("images", 0, width=65),
    "another mask": put("annotations", 0, segmentation=[[4, 6, 24, 6, 24, 22]]),
    "a mask in runs": put(
        "annotations", 0, segmentation={"size": [48, 64], "counts": [198, 16, 2858]}
    ),
    "an object less": lambda content: content["annotations"].pop(),
    "an image less": _without_an_image,
    "another class": put("annotations", 0, category_id=5),
    "other names": put("categories", 0, name="plum"),
    "another order": lambda content: _renumber(content, {1: 5, 5: 1}),
    "another id": lambda content: _renumber(content, {1: 1, 5: 6}),
}


def test_the_form_of_masks_and_the_order_of_objects_do_not_matter(results, content, write):
    for entry in content["annotations"][::2]:
        (runs,) = mask_util.frPyObjects(entry["segmentation"], 48, 64)
        entry["segmentation"] = {**runs, "counts": runs["counts"].decode()}
    content["annotations"].reverse()
    check(results, content, write)


@pytest.mark.parametrize("row", CHANGES)
def test_results_of_other_data_are_refused(results, content, write, row):
    other = copy.deepcopy(content)
    CHANGES[row](other)
    with pytest.raises(DataError, match=r"results\.json.*set\.json.*4 images.*evaluate"):
        check(results, other, write)


def test_results_of_another_program_are_taken_as_they_are(results, content, write):
    results.with_name(FILE).unlink()
    content["annotations"].pop()
    check(results, content, write)


@pytest.mark.parametrize("text", ["{", "{}", "[]", "3", '{"categories": ["a"]}'])
def test_a_damaged_description_and_a_file_of_another_program(results, content, write, text):
    results.with_name(FILE).write_text(text)
    with pytest.raises(DataError, match=rf"{FILE} cannot be read.*evaluate again"):
        check(results, content, write)
