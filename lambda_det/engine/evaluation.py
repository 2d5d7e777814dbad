"""Evaluation by what a model predicts; AP also where the annotations are incomplete."""

from __future__ import annotations

import logging
import math
import os

import numpy as np
from detectron2.config import CfgNode
from detectron2.evaluation import (
    COCOEvaluator,
    DatasetEvaluator,
    DatasetEvaluators,
    SemSegEvaluator,
)
from detectron2.utils.file_io import PathManager
from PIL import Image

from lambda_det.data.mapper import is_polygon
from lambda_det.data.predictions import evaluated
from lambda_det.engine.panoptic_quality import PanopticQualityEvaluator

__all__ = ["TolerantCOCOEvaluator", "build_evaluator"]


class TolerantCOCOEvaluator(COCOEvaluator):
    """COCOEvaluator for files without the keys that pycocotools asks for without need.

    ``info`` is missing in most files that tools export; ``iscrowd`` and ``area`` have an obvious
    meaning where they are not given. An object without a usable mask counts as its box, and one
    whose box has numbers that are not finite as an object of no size, which nobody finds.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        dataset = self._coco_api.dataset
        dataset.setdefault("info", {})
        without_mask = 0
        keypoints = _keypoint_values(dataset) if "keypoints" in (self._tasks or ()) else 0
        for annotation in dataset.get("annotations", ()):
            # On polygons that are not whole and on NaN, pycocotools fails once all is predicted.
            x, y, w, h = annotation["bbox"] = [
                v if math.isfinite(v) else 0 for v in annotation["bbox"]
            ]
            annotation.setdefault("iscrowd", 0)
            if annotation.get("area") is None:
                annotation["area"] = w * h
            if isinstance(annotation.get("segmentation"), list):
                annotation["segmentation"] = list(filter(is_polygon, annotation["segmentation"]))
            if not annotation.get("segmentation"):
                annotation["segmentation"] = [[x, y, x + w, y, x + w, y + h, x, y + h]]
                without_mask += 1
            if keypoints:  # pycocotools asks for them in every annotation
                annotation.setdefault("keypoints", [0] * keypoints)
                labelled = sum(v > 0 for v in annotation["keypoints"][2::3])
                annotation.setdefault("num_keypoints", labelled)
        if without_mask and "segm" in (self._tasks or ()):
            logging.getLogger(__name__).warning(
                f"{without_mask} annotation(s) have no usable mask; their boxes stand for it in "
                "mask AP"
            )

    def _derive_coco_results(self, coco_eval, iou_type, class_names=None):
        """Detectron2's, where a detector that finds nothing has an AP of 0 and not of NaN."""
        results = super()._derive_coco_results(coco_eval, iou_type, class_names)
        if coco_eval is None:
            results |= dict.fromkeys(("AP", "AP50", "AP75"), 0.0)
        return results


def _keypoint_values(dataset: dict) -> int:
    """How many numbers the keypoints of an object have: three for each."""
    return max((len(a.get("keypoints") or ()) for a in dataset.get("annotations", ())), default=0)


def build_evaluator(cfg: CfgNode, dataset_name: str) -> DatasetEvaluators:
    """The measures of what the model predicts and the data set knows, written below OUTPUT_DIR.

    Box AP, with mask and keypoint AP where the model has them, mean IoU of semantic masks, and
    panoptic quality.

    Raises:
        ConfigError: the data set has not the truth of anything that the model predicts.
    """
    folder = os.path.join(cfg.OUTPUT_DIR, "inference")
    if len(cfg.DATASETS.TEST) > 1:
        folder = os.path.join(folder, dataset_name)
    measured = evaluated(cfg, dataset_name)
    evaluators: list[DatasetEvaluator] = []
    if "instances" in measured:
        evaluators.append(_build_coco_evaluator(cfg, dataset_name, folder))
    if "semantic" in measured:
        evaluators.append(
            SemSegEvaluator(dataset_name, output_dir=folder, sem_seg_loading_fn=_read_labels)
        )
    if "panoptic" in measured:
        evaluators.append(PanopticQualityEvaluator(dataset_name))
    return DatasetEvaluators(evaluators)


def _build_coco_evaluator(cfg: CfgNode, dataset_name: str, folder: str) -> COCOEvaluator:
    # Named rather than taken from the predictions: a model that finds nothing still has a mask AP
    tasks = ["bbox"]
    if cfg.MODEL.MASK_ON:
        tasks.append("segm")
    if cfg.MODEL.KEYPOINT_ON:
        tasks.append("keypoints")
    return TolerantCOCOEvaluator(
        dataset_name,
        tasks=tuple(tasks),
        output_dir=folder,
        kpt_oks_sigmas=cfg.TEST.KEYPOINT_OKS_SIGMAS,
    )


def _read_labels(path: str, dtype: type) -> np.ndarray:
    """A semantic mask [H, W]. Detectron2's own reader fails with numpy 2, which must copy here."""
    with PathManager.open(path, "rb") as file:
        return np.array(Image.open(file), dtype=dtype)
