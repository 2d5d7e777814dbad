"""The data path on the real COCO, where LAMBDA_DET_COCO names the folder that holds coco/."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from detectron2.config import CfgNode, get_cfg

from lambda_det.config import add_lambda_config
from lambda_det.detection.data import build_train_loader, check_coco, register_json_datasets

COCO = Path(os.environ.get("LAMBDA_DET_COCO") or ".").absolute() / "coco"
pytestmark = pytest.mark.skipif(
    not os.environ.get("LAMBDA_DET_COCO") or not COCO.is_dir(),
    reason="LAMBDA_DET_COCO does not name a folder that holds coco/",
)
SIZE = 256


def _part(split: str) -> tuple[str, str]:
    """Annotations and images of "train" or "val"."""
    name = f"{split}2017"
    return str(COCO / "annotations" / f"instances_{name}.json"), str(COCO / name)


@pytest.fixture
def cfg() -> CfgNode:
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.DATASETS.TRAIN_JSON, cfg.DATASETS.TRAIN_IMAGES = _part("train")
    cfg.DATASETS.TEST = ()
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.MODEL.MASK_ON = True
    cfg.INPUT.LSJ.ENABLED = True
    cfg.INPUT.LSJ.SIZE = SIZE
    cfg.SEED = 1
    register_json_datasets(cfg)
    return cfg


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_annotations_pass_the_check(split):
    report = check_coco(*_part(split), files="sample")
    assert report.refusal() is None
    assert 0 < len(report.categories) <= 80


def test_jittered_batches(cfg):
    batches = itertools.islice(build_train_loader(cfg, 4), 5)
    images = list(itertools.chain.from_iterable(batches))
    assert len(images) == 20 and len({image["image_id"] for image in images}) > 1
    objects = 0
    for image in images:
        assert image["image"].shape == (3, SIZE, SIZE)
        instances = image["instances"]
        assert instances.image_size == (SIZE, SIZE)
        objects += len(instances)
        if not len(instances):
            continue
        boxes = instances.gt_boxes
        assert boxes.tensor.isfinite().all() and boxes.nonempty().all()
        assert boxes.tensor.min() >= 0 and boxes.tensor.max() <= SIZE
        assert len(instances.gt_masks) == len(instances)
        masks = instances.gt_masks.crop_and_resize(boxes.tensor, 28)
        assert masks.shape == (len(instances), 28, 28) and masks.any()
        if hasattr(instances.gt_masks, "tensor"):
            assert instances.gt_masks.tensor.shape[1:] == (SIZE, SIZE)
        else:
            corners = [xy for polygons in instances.gt_masks.polygons for xy in polygons]
            assert all(xy.min() >= 0 and xy.max() <= SIZE for xy in corners)
    assert objects > 20
