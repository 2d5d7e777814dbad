"""A sample of a test set, which evaluations before the last one are on."""

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.detection.data import register_coco_files
from lambda_det.detection.data.registration import check_files
from lambda_det.detection.data.sample import sample_of
from lambda_det.detection.evaluation import TolerantCOCOEvaluator
from tests.coco import annotation, coco_content, found


@pytest.fixture
def name(write) -> str:
    images = {number: f"{number}.png" for number in range(10)}
    objects = [annotation(n + 1, n, [4, 6, 20, 16], category_id=1 + 4 * (n % 2)) for n in images]
    content = coco_content(images, objects, {1: "apple", 5: "pear"})
    registered = register_coco_files(*write(content), "test")
    check_files(registered)
    return registered


@pytest.mark.parametrize(
    ("size", "ids"), [(4, [0, 2, 5, 7]), (1, [0]), (9, [0, 1, 2, 3, 4, 5, 6, 7, 8])]
)
def test_images_are_spread_evenly(name, size, ids):
    sample = sample_of(name, size)
    assert [record["image_id"] for record in DatasetCatalog.get(sample)] == ids
    assert sample_of(name, size) == sample


@pytest.mark.parametrize("size", [0, 10, 11])
def test_no_sample(name, size):
    assert sample_of(name, size) == name


def test_other_kinds_are_not_sampled():
    other = "sample_of_masks"
    DatasetCatalog.register(other, lambda: [{"file_name": str(n)} for n in range(9)])
    MetadataCatalog.get(other).set(evaluator_type="sem_seg")
    try:
        assert sample_of(other, 4) == other
    finally:
        DatasetCatalog.remove(other)
        MetadataCatalog.remove(other)


def test_only_objects_of_the_sample_count(name, tmp_path):
    """With the ids that the whole has for its categories."""
    sample = sample_of(name, 4)
    evaluator = TolerantCOCOEvaluator(sample, tasks=("bbox",), output_dir=str(tmp_path))
    evaluator.reset()
    for record in DatasetCatalog.get(sample):
        (object_,) = record["annotations"]
        box = [4, 6, 24, 22]
        instances = found((record["height"], record["width"]), [box], [object_["category_id"]])
        evaluator.process([record], [{"instances": instances}])
    assert evaluator.evaluate()["bbox"]["AP"] == pytest.approx(100)
    assert '"category_id": 5' in (tmp_path / "coco_instances_results.json").read_text()
