"""Average precision where annotations lack what pycocotools asks for, or nothing is found."""

from __future__ import annotations

import json
import math

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.structures import Boxes, Instances

from lambda_det.engine.evaluation import build_evaluator


@pytest.fixture
def bare_data(tmp_path):
    """Two images with one box each; no info, area, iscrowd, and one segmentation only."""
    annotations = [
        {"id": 1, "image_id": 1, "category_id": 7, "bbox": [2, 3, 10, 8]},
        {
            "id": 2,
            "image_id": 2,
            "category_id": 7,
            "bbox": [4, 4, 6, 6],
            "segmentation": [[4, 4, 10, 4, 10, 10, 4, 10]],
        },
    ]
    images = [{"id": i, "file_name": f"{i}.png", "height": 20, "width": 20} for i in (1, 2)]
    content = {"images": images, "annotations": annotations, "categories": [{"id": 7, "name": "a"}]}
    path = tmp_path / "bare.json"
    path.write_text(json.dumps(content))
    MetadataCatalog.get("bare").set(
        json_file=str(path), thing_dataset_id_to_contiguous_id={7: 0}, thing_classes=["a"]
    )
    yield annotations
    MetadataCatalog.remove("bare")
    assert "bare" not in DatasetCatalog


def _evaluate(tmp_path, predictions):
    cfg = get_cfg()
    cfg.MODEL.MASK_ON = True
    cfg.OUTPUT_DIR = str(tmp_path)
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


def test_nothing_predicted(bare_data, tmp_path):
    results = _evaluate(tmp_path, {1: [], 2: []})
    assert math.isnan(results["bbox"]["AP"]) and math.isnan(results["segm"]["AP"])
