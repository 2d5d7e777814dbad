"""Average precision on COCO-format data, also where the annotations are incomplete."""

from __future__ import annotations

import logging
import math
import os

from detectron2.config import CfgNode
from detectron2.evaluation import COCOEvaluator

from lambda_det.data.mapper import is_polygon

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


def build_evaluator(cfg: CfgNode, dataset_name: str) -> COCOEvaluator:
    """Box AP, and mask and keypoint AP where the model has them, written below OUTPUT_DIR."""
    # Named rather than taken from the predictions: a model that finds nothing still has a mask AP
    tasks = ["bbox"]
    if cfg.MODEL.MASK_ON:
        tasks.append("segm")
    if cfg.MODEL.KEYPOINT_ON:
        tasks.append("keypoints")
    folder = os.path.join(cfg.OUTPUT_DIR, "inference")
    if len(cfg.DATASETS.TEST) > 1:
        folder = os.path.join(folder, dataset_name)
    return TolerantCOCOEvaluator(
        dataset_name,
        tasks=tuple(tasks),
        output_dir=folder,
        kpt_oks_sigmas=cfg.TEST.KEYPOINT_OKS_SIGMAS,
    )
