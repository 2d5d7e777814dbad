"""The results of a detector on each class, and its confusion of classes, by COCO's own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from lambda_det.detection.evaluation import counted_detections
from lambda_det.detection.matches import (
    FALSE,
    IGNORED,
    BestThreshold,
    best_score,
    evaluation_of,
    matches_of,
    objects_found,
)
from lambda_det.detection.prediction import DEFAULT_THRESHOLD
from lambda_det.detection.results import ClassScores, columns


class ClassResult(NamedTuple):
    """The results of a detector on one class.

    Attributes:
        name: of the class.
        objects: in the ground truth, without crowds.
        values: by the columns of :data:`lambda_det.detection.results.METRICS`; AP in percent.
    """

    name: str
    objects: int
    values: dict[str, float]


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

    @property
    def shapes(self) -> str:
        """What they are of, for readers."""
        return {"bbox": "boxes", "segm": "masks"}[self.iou_type]


def evaluate_detections(
    ground_truth: COCO,
    results: Sequence[Mapping[str, Any]],
    iou_type: str,
    score: float | None = None,
) -> Detections:
    """Evaluate predictions with COCO's own code.

    Args:
        ground_truth, results, iou_type: as for
            :func:`lambda_det.detection.matches.evaluation_of`.
        score: predictions of a lower score are left out of the confusion matrix; None for the
            score with the best F1, or where it is unknown the one that predict takes then.
    """
    evaluation = evaluation_of(ground_truth, results, iou_type)
    evaluation.params.maxDets[-1] = counted_detections(ground_truth)
    evaluation.evaluate()
    evaluation.accumulate()
    # [IoU thresholds, recalls, classes, sizes, numbers of detections], -1 where there is no object
    precision = evaluation.eval["precision"][..., -1]
    precision = np.where(precision < 0, np.nan, precision)
    matches = {one.category: one for one in matches_of(evaluation)}
    classes = []
    for index, category in enumerate(evaluation.params.catIds):
        of = matches.get(category)
        scores = ClassScores(precision[:, :, index], of.best_threshold() if of else BestThreshold())
        objects = ground_truth.getAnnIds(catIds=[category], iscrowd=False)
        values = {head: metric.of_class(scores) for head, metric in columns().items()}
        classes.append(ClassResult(ground_truth.cats[category]["name"], len(objects), values))
    if score is None:
        best = best_score(list(matches.values()))
        score = DEFAULT_THRESHOLD if best is None else best
    return Detections(iou_type, classes, score, _confusion(evaluation, score))


def _confusion(evaluation: COCOeval, score: float) -> np.ndarray:
    """Count the predicted class of each object; predictions in a crowd do not count."""
    place = {category: index for index, category in enumerate(evaluation.params.catIds)}
    nothing = len(place)
    matrix = np.zeros((nothing + 1, nothing + 1), int)
    objects = {i: one for i, one in evaluation.cocoGt.anns.items() if not one["iscrowd"]}
    missed = set(objects)
    found = objects_found(evaluation, across_classes=True)
    for prediction, number in zip(evaluation.cocoDt.anns.values(), found, strict=True):
        if prediction["score"] >= score and number != IGNORED:
            row = nothing if number == FALSE else place[objects[number]["category_id"]]
            matrix[row, place[prediction["category_id"]]] += 1
            missed.discard(number)
    for number in missed:
        matrix[place[objects[number]["category_id"]], nothing] += 1
    return matrix
