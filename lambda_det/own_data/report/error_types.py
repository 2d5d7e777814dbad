"""The error of each prediction, and AP50 without some of the errors.

The kinds of errors, and the repair of one kind at a time, are from TIDE (Bolya et al., ECCV 2020,
sections 2.2 and 2.3). The package tidecv is not used: it knows no sizes and no images.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pycocotools.mask as mask_util
from pycocotools.coco import COCO

from lambda_det.detection.matches import (
    FALSE,
    IGNORED,
    ClassMatches,
    evaluation_of,
    objects_found,
)

LEAST_IOU = 0.5  # of a match
NEAR = 0.1  # IoU from which a prediction is assigned to an object
_RECALLS = np.linspace(0, 1, 101)  # at which COCO takes the precision


class JudgedPrediction(NamedTuple):
    """A prediction, and its error.

    Attributes:
        image, category: ids; the category is the predicted one.
        score: of the prediction.
        verdict: "right"; "class": a good box or mask of another class; "localisation": it
            overlaps its object too little; "duplicate": the object was found already; "background":
            no object is near; "both": class and localisation are wrong.
        matched: id of the annotation to which it is assigned, None for "background".
    """

    image: Any
    category: int
    score: float
    verdict: str
    matched: int | None


def sort_errors(
    ground_truth: COCO, entries: Sequence[Mapping[str, Any]], iou_type: str
) -> tuple[list[JudgedPrediction], set[int]]:
    """The error of each prediction outside of crowds, and the objects without any prediction.

    Args:
        ground_truth, entries, iou_type: as for
            :func:`lambda_det.detection.matches.evaluation_of`.
    """
    key = {"bbox": "bbox", "segm": "segmentation"}[iou_type]
    of_image = defaultdict(list)
    found = objects_found(evaluation_of(ground_truth, entries, iou_type))
    for entry, number in zip(entries, found, strict=True):
        if number != IGNORED:
            of_image[entry["image_id"]].append((entry, number))
    predictions, missed = [], set()
    for image in ground_truth.getImgIds():
        objects = ground_truth.loadAnns(ground_truth.getAnnIds(imgIds=[image], iscrowd=False))
        classes = np.array([o["category_id"] for o in objects], int)
        shapes = [o["bbox"] if iou_type == "bbox" else ground_truth.annToRLE(o) for o in objects]
        own = sorted(of_image[image], key=lambda row: -row[0]["score"])
        iou = np.zeros((len(own), len(shapes)))
        if own and shapes:
            iou = mask_util.iou([entry[key] for entry, _ in own], shapes, [0] * len(shapes))
        matched = set()
        for row, (entry, number) in zip(iou, own, strict=True):
            verdict, assigned = "right", number
            if number == FALSE:
                verdict, place = _wrong(row, classes == entry["category_id"])
                assigned = None if place is None else objects[place]["id"]
            if verdict in ("right", "class", "localisation"):
                matched.add(assigned)
            predictions.append(
                JudgedPrediction(image, entry["category_id"], entry["score"], verdict, assigned)
            )
        missed |= {o["id"] for o in objects} - matched
    return predictions, missed


def _wrong(iou: np.ndarray, same: np.ndarray) -> tuple[str, int | None]:
    """The error of a false prediction and the index of its object, by IoU [objects] and class."""
    own, other = np.where(same, iou, 0.0), np.where(same, 0.0, iou)
    if max(iou, default=0.0) < NEAR:
        return "background", None
    if own.max() >= LEAST_IOU:
        return "duplicate", int(own.argmax())
    if other.max() >= LEAST_IOU:
        return "class", int(other.argmax())
    if own.max() >= NEAR:
        return "localisation", int(own.argmax())
    return "both", int(other.argmax())


def ap50(predictions: Sequence[JudgedPrediction], objects: Mapping[int, int]) -> float:
    """Mean AP at an IoU of 0.5 in percent, as COCO's evaluation computes it.

    Args:
        predictions: of :func:`sort_errors`.
        objects: number of objects of each category, without crowds.
    """
    of_class = defaultdict(list)
    for prediction in sorted(predictions, key=lambda p: -p.score):
        of_class[prediction.category].append(prediction)
    values = []
    for category, number in objects.items():
        own = of_class[category]
        right = np.array([[prediction.verdict == "right" for prediction in own]], bool)
        # all as in one image, because AP does not ask which
        scores, image = np.array([prediction.score for prediction in own]), np.zeros(len(own), int)
        matches = ClassMatches(category, scores, image, right, ~right, np.array([number]))
        values.append(matches.ap(np.array([1]), _RECALLS))
    return 100 * float(np.mean(values)) if values else float("nan")


def repaired(
    predictions: Sequence[JudgedPrediction],
    wrong: Sequence[JudgedPrediction],
    classes: Mapping[int, int],
) -> list[JudgedPrediction]:
    """The predictions after the repair of some.

    A prediction becomes right if it is the only one of its object; it is left out if another has
    found the object, or if it has none.

    Args:
        predictions: of :func:`sort_errors`.
        wrong: those of them to repair.
        classes: category by the id of the annotation.
    """
    taken = {p.matched for p in predictions if p.verdict == "right"}
    repairs = set(wrong)  # it has all those that are alike, or none
    result = [p for p in predictions if p not in repairs]
    for prediction in sorted(wrong, key=lambda p: -p.score):
        matched = prediction.matched
        if prediction.verdict in ("class", "localisation") and matched not in taken:
            taken.add(matched)
            result.append(prediction._replace(verdict="right", category=classes[matched]))
    return result
