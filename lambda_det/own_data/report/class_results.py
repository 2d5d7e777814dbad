"""The results of a detector on each class, and its confusion of classes, by COCO's own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from lambda_det.detection.confidence import best_score, matches_of
from lambda_det.detection.evaluation import counted_detections
from lambda_det.detection.prediction.predictor import DEFAULT_THRESHOLD
from lambda_det.own_data.report.matching import FALSE, IGNORED, assign, overlaps

__all__ = ["ClassResult", "Detections", "evaluate_detections"]

_IOU_50 = 0  # index of the threshold 0.5 in COCO's list
_UNKNOWN = (float("nan"),) * 3  # threshold, precision and recall of a class without objects


class ClassResult(NamedTuple):
    """The results of a detector on one class; AP in percent, NaN where the class has no such
    object.

    Attributes:
        name: of the class.
        objects: in the ground truth, without crowds.
        ap, ap50, small, medium, large: of boxes or masks.
        threshold: the score that gives the best F1 at an IoU of 0.5.
        precision, recall: at that score.
    """

    name: str
    objects: int
    ap: float
    ap50: float
    small: float
    medium: float
    large: float
    threshold: float
    precision: float
    recall: float


@dataclass(frozen=True)
class Detections:
    """The results of boxes or of masks by class, and the confusion of classes.

    Attributes:
        iou_type: "bbox" or "segm".
        classes: the results of each.
        score: predictions of a lower score are left out of the confusion matrix.
        confusion: [classes + 1, classes + 1] counts; rows are true classes, columns
            predicted ones. The last column counts missed objects, the last row false predictions.
    """

    iou_type: str
    classes: list[ClassResult]
    score: float
    confusion: np.ndarray


def evaluate_detections(
    ground_truth: COCO,
    results: Sequence[Mapping[str, Any]],
    iou_type: str,
    score: float | None = None,
) -> Detections:
    """Evaluate predictions with COCO's own code.

    Args:
        ground_truth: with ``iscrowd`` and ``area`` in every annotation.
        results: entries of a results file in COCO's format, with the key that ``iou_type`` needs.
        iou_type: "bbox" or "segm".
        score: predictions of a lower score are left out of the confusion matrix; None for the
            score with the best F1, or where it is unknown the one that predict takes then.
    """
    # loadRes changes its input. It uses the areas of boxes where there are boxes, so entries for
    # masks must have none, as in Detectron2's evaluation.
    left_out = "bbox" if iou_type == "segm" else ""
    predictions = ground_truth.loadRes(
        [{key: value for key, value in entry.items() if key != left_out} for entry in results]
    )
    evaluation = COCOeval(ground_truth, predictions, iou_type)
    evaluation.params.maxDets[-1] = counted_detections(ground_truth)
    evaluation.evaluate()
    evaluation.accumulate()
    # [IoU thresholds, recalls, classes, sizes, numbers of detections], -1 where there is no object
    precision = evaluation.eval["precision"][..., -1]
    precision = np.where(precision < 0, np.nan, precision)
    matches = {one.category: one for one in matches_of(evaluation)}
    classes = []
    for index, category in enumerate(evaluation.params.catIds):
        by_size = [_percent(precision[:, :, index, size]) for size in range(4)]
        objects = ground_truth.getAnnIds(catIds=[category], iscrowd=False)
        classes.append(
            ClassResult(
                ground_truth.cats[category]["name"],
                len(objects),
                by_size[0],
                _percent(precision[_IOU_50, :, index, 0]),
                *by_size[1:],
                *(matches[category].best_threshold() if category in matches else _UNKNOWN),
            )
        )
    if score is None:
        best = best_score(list(matches.values()))
        score = DEFAULT_THRESHOLD if best is None else best
    confusion = _confusion(ground_truth, predictions, evaluation.params.catIds, iou_type, score)
    return Detections(iou_type, classes, score, confusion)


def _percent(values: np.ndarray) -> float:
    return float("nan") if np.isnan(values).all() else 100 * float(np.nanmean(values))


def _confusion(
    ground_truth: COCO, predictions: COCO, categories: Sequence[int], iou_type: str, score: float
) -> np.ndarray:
    """Count the predicted class of each object; predictions in a crowd do not count."""
    place = {category: index for index, category in enumerate(categories)}
    nothing = len(categories)
    matrix = np.zeros((nothing + 1, nothing + 1), int)
    for image in ground_truth.getImgIds():
        objects = ground_truth.loadAnns(ground_truth.getAnnIds(imgIds=[image]))
        found = predictions.loadAnns(predictions.getAnnIds(imgIds=[image]))
        found = sorted((p for p in found if p["score"] >= score), key=lambda p: -p["score"])
        shapes = (
            [
                entry["bbox"] if iou_type == "bbox" else ground_truth.annToRLE(entry)
                for entry in entries
            ]
            for entries in (found, objects)
        )
        crowds = [bool(o["iscrowd"]) for o in objects]
        chosen = assign(overlaps(*shapes, crowds), crowds)
        for prediction, index in zip(found, chosen, strict=True):
            if index != IGNORED:
                row = nothing if index == FALSE else place[objects[index]["category_id"]]
                matrix[row, place[prediction["category_id"]]] += 1
        for index, (left, crowd) in enumerate(zip(objects, crowds, strict=True)):
            if not crowd and index not in chosen:
                matrix[place[left["category_id"]], nothing] += 1
    return matrix
