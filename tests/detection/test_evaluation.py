"""Average precision where annotations lack what pycocotools asks for, or nothing is found."""

from __future__ import annotations

import json
import math

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.structures import Boxes, Instances

from lambda_det.detection.data import check_datasets
from lambda_det.detection.evaluation import TolerantCOCOEvaluator, build_evaluator


@pytest.fixture
def bare_data(tmp_path):
    """Two images with one box each; no info, area, iscrowd, and one segmentation only.

    Registered as "bare"; the image files are empty.
    """
    annotations = [
        {"id": 1, "image_id": 1, "category_id": 7, "bbox": [2, 3, 10, 8]},
        {
            "id": 2,
            "image_id": 2,
            "category_id": 7,
            "bbox": [4, 4, 6, 6],
            "area": None,
            "segmentation": [[4, 4, 10, 4, 10, 10, 4, 10]],
        },
    ]
    images = [{"id": i, "file_name": f"{i}.png", "height": 20, "width": 20} for i in (1, 2)]
    for image in images:
        (tmp_path / image["file_name"]).touch()
    content = {"images": images, "annotations": annotations, "categories": [{"id": 7, "name": "a"}]}
    path = tmp_path / "bare.json"
    path.write_text(json.dumps(content))
    register_coco_instances("bare", {}, str(path), str(tmp_path))
    yield annotations
    DatasetCatalog.remove("bare")
    MetadataCatalog.remove("bare")


def _evaluate(tmp_path, predictions):
    """What a run does: look the data over, then evaluate."""
    cfg = get_cfg()
    cfg.MODEL.MASK_ON = True
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 1
    cfg.DATASETS.TEST = ("bare",)
    cfg.OUTPUT_DIR = str(tmp_path / "output")
    check_datasets(cfg, train=False, test=True)
    DatasetCatalog.get("bare")  # the loader's reading, which fills in the metadata
    evaluator = build_evaluator(cfg, "bare")
    evaluator.reset()
    for image_id, boxes in predictions.items():
        instances = Instances((20, 20))
        instances.pred_boxes = Boxes(torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4))
        instances.scores = torch.ones(len(boxes))
        instances.pred_classes = torch.zeros(len(boxes), dtype=torch.int64)
        masks = torch.zeros(len(boxes), 20, 20, dtype=torch.bool)
        for mask, (x0, y0, x1, y1) in zip(masks, boxes, strict=True):
            mask[y0:y1, x0:x1] = True
        instances.pred_masks = masks
        evaluator.process([{"image_id": image_id}], [{"instances": instances}])
    return evaluator.evaluate()


def test_bare_annotations_are_evaluated(bare_data, tmp_path):
    results = _evaluate(tmp_path, {1: [[2, 3, 12, 11]], 2: [[4, 4, 10, 10]]})
    assert results["bbox"]["AP"] == pytest.approx(100)
    assert results["segm"]["AP"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"segmentation": [[1, 2]]}, 100),
        ({"segmentation": [[1, 2, 3, 4]]}, 100),
        ({"segmentation": [[1, 2, math.nan, 4, 5, 6]]}, 100),
        ({"area": []}, 100),
        ({"area": -1}, 100),
        ({"id": 0}, 100),  # pycocotools takes a match with it for no match
        # Cut at the border of the image, as its outline would not fit into memory
        ({"segmentation": [[4, 4, 9e5, 4, 9e5, 9e5, 4, 9e5]], "bbox": [4, 4, 16, 16]}, 100),
        # One of two objects is found: the precision is 1 up to a recall of 0.5, 51 points of 101.
        ({"bbox": [4, 4, math.nan, 6], "segmentation": None}, 100 * 51 / 101),
        ({"bbox": [4, 4, math.inf, 6], "segmentation": None}, 100 * 51 / 101),
    ],
    ids=str,
)
def test_what_the_checks_let_pass_does_not_break_the_evaluation(
    bare_data, tmp_path, monkeypatch, changes, expected
):
    # One in a hundred may be bad; here it is one in two
    monkeypatch.setattr("lambda_det.detection.data.report.MAX_BAD_BOX_SHARE", 0.5)
    bare_data[0]["segmentation"] = [[2, 3, 12, 3, 12, 11, 2, 11]]
    bare_data[1].update(changes)
    path = tmp_path / "bare.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "annotations": bare_data}))
    size = 16 if bare_data[1]["bbox"] == [4, 4, 16, 16] else 6
    results = _evaluate(tmp_path, {1: [[2, 3, 12, 11]], 2: [[4, 4, 4 + size, 4 + size]]})
    assert results["segm"]["AP"] == pytest.approx(expected)
    assert results["bbox"]["AP"] == pytest.approx(expected)


def test_nothing_predicted(bare_data, tmp_path):
    results = _evaluate(tmp_path, {1: [], 2: []})
    assert results["bbox"]["AP"] == results["segm"]["AP50"] == 0


def test_keypoints_of_another_number_do_not_count(bare_data, tmp_path):
    names = ["left", "right"]
    MetadataCatalog.get("bare").set(keypoint_names=names, keypoint_flip_map=[("left", "right")])
    bare_data[0]["keypoints"] = [3, 4, 2, 9, 9, 2]
    bare_data[1] |= {"keypoints": [5, 5, 2], "num_keypoints": "one"}
    path = tmp_path / "bare.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "annotations": bare_data}))
    evaluator = TolerantCOCOEvaluator("bare", tasks=("keypoints",), kpt_oks_sigmas=[0.05] * 2)
    DatasetCatalog.get("bare")  # which fills in the metadata
    evaluator.reset()
    instances = Instances((20, 20), scores=torch.ones(1), pred_classes=torch.zeros(1).long())
    instances.pred_boxes = Boxes(torch.tensor([[2.0, 3, 12, 11]]))
    # Half a pixel off: COCO counts keypoints from the corner of a pixel, Detectron2 from its middle
    instances.pred_keypoints = torch.tensor([[[3.5, 4.5, 1], [9.5, 9.5, 1]]])
    evaluator.process([{"image_id": 1}, {"image_id": 2}], [{"instances": instances}] * 2)
    # The object of image 2 has no keypoints left, so that what is found there counts neither way
    assert evaluator.evaluate()["keypoints"]["AP50"] == pytest.approx(100)
