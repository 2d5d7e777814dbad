"""What predictions find by COCO's own matching, and what that says besides AP: its interval by a
bootstrap over the images, and the score with the best F1.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

MOST_IMAGES = 500  # with more images the interval is narrow, and computing it takes seconds
# With more images matches that the evaluation did not keep are not computed again, because that
# takes up to a quarter of the time of pycocotools' evaluation
_MOST_AGAIN = 2000
_REPLICATES = 200
_TAILS = (2.5, 97.5)  # percent
IOU_50 = 0  # index of the threshold 0.5 in COCO's list
# What a prediction finds that finds no object: nothing, or a crowd. Ids of objects are above 0.
FALSE, IGNORED = 0, -1


class BestThreshold(NamedTuple):
    """A score, and the precision and recall of predictions from it on, from 0 to 1; NaN where
    nothing is right.
    """

    score: float = math.nan
    precision: float = math.nan
    recall: float = math.nan


@dataclass(frozen=True)
class ClassMatches:
    """The detections of one class, the highest scores first.

    Attributes:
        category: COCO's id of the class.
        scores: [detections].
        image: [detections] number of the image.
        right, wrong: [IoU thresholds, detections] of bool. A detection that is neither right nor
            wrong lies in a crowd.
        objects: [images] number of objects, without crowds.
    """

    category: int
    scores: np.ndarray
    image: np.ndarray
    right: np.ndarray
    wrong: np.ndarray
    objects: np.ndarray

    def ap(self, counts: np.ndarray, recalls: np.ndarray) -> float | None:
        """AP from 0 to 1 if image i occurs counts[i] times; None without an object."""
        objects = int(counts @ self.objects)
        if not objects:
            return None
        drawn = np.repeat(np.arange(len(self.image)), counts[self.image])
        right = np.cumsum(self.right[:, drawn], axis=1)
        wrong = np.cumsum(self.wrong[:, drawn], axis=1)
        precision = right / np.maximum(right + wrong, 1)
        # The precision at a recall is the highest one that is reached there or at a higher recall.
        precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        precision = np.pad(precision, ((0, 0), (0, 1)))
        values = [
            row[np.searchsorted(recall, recalls, side="left")]
            for row, recall in zip(precision, right / objects, strict=True)
        ]
        return float(np.mean(values))

    def at_thresholds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores, falling, and precision and recall at an IoU of 0.5 where each is the threshold.

        Detections of equal scores pass a threshold together. Without an object each recall is 0.
        """
        counted = self.right[IOU_50] | self.wrong[IOU_50]
        scores, right = self.scores[counted], np.cumsum(self.right[IOU_50][counted])
        last = np.flatnonzero(np.diff(scores, append=-np.inf))
        return scores[last], right[last] / (last + 1), right[last] / max(self.objects.sum(), 1)

    def best_threshold(self) -> BestThreshold:
        """``best_score`` of this class alone."""
        score = best_score([self])
        if score is None:
            return BestThreshold()
        scores, precision, recall = self.at_thresholds()
        last = np.flatnonzero(scores >= score)[-1]
        return BestThreshold(score, float(precision[last]), float(recall[last]))


def best_score(classes: Sequence[ClassMatches]) -> float | None:
    """The score with the highest F1 at an IoU of 0.5, averaged over the classes with objects.

    As in AP each class counts alike. The F1 of a class is 0 above its highest score.

    Returns:
        From 0 to 1; None where nothing is right.
    """
    of_classes = [one.at_thresholds() for one in classes if one.objects.any()]
    if not any(recall.any() for _, _, recall in of_classes):
        return None
    thresholds = np.unique(np.concatenate([scores for scores, _, _ in of_classes]))
    total = np.zeros(len(thresholds))
    for scores, precision, recall in of_classes:
        # of each threshold the last, and lowest, score of the class that reaches it
        reached = np.searchsorted(-scores, -thresholds, side="right")
        total += np.concatenate([[0], _f1(precision, recall)])[reached]
    place = int(np.argmax(total))
    # Between it and the next lower score, where the rounding of another program takes none away
    return float(thresholds[max(place - 1, 0) : place + 1].mean())


def _f1(precision: np.ndarray, recall: np.ndarray) -> np.ndarray:
    return 2 * precision * recall / np.maximum(precision + recall, 1e-12)


def ap_interval(
    evaluation: COCOeval, classes: Sequence[ClassMatches]
) -> tuple[float, float] | None:
    """The interval that holds AP in 95 of 100 test sets of the same kind and size.

    Test sets, always the same, are drawn from the images of this one with repetition, and their AP
    is computed as COCO does. The interval leaves out the lowest and the highest 2.5 % of these
    values. A class that is in none of the images that were drawn has its AP of all images, since
    the mean of other classes would be another measure. With few images it is a rough figure, and
    it ignores that images may be alike, such as the frames of one video.

    Args:
        evaluation: with ground truth and predictions, evaluated or not.
        classes: its matches.

    Returns:
        The ends in percent; None with less than two images with an object, or more than
        ``MOST_IMAGES`` images.
    """
    images = len(evaluation.params.imgIds)
    with_objects = np.count_nonzero(sum(one.objects for one in classes))
    if images > MOST_IMAGES or with_objects < 2:
        return None
    recalls, classes = evaluation.params.recThrs, [one for one in classes if one.objects.any()]
    of_all = [one.ap(np.ones(images, int), recalls) for one in classes]
    random = np.random.default_rng(0)
    values = []
    while len(values) < _REPLICATES:
        counts = np.bincount(random.integers(images, size=images), minlength=images)
        drawn = [one.ap(counts, recalls) for one in classes]
        if any(ap is not None for ap in drawn):
            kept = zip(drawn, of_all, strict=True)
            values.append(100 * np.mean([whole if ap is None else ap for ap, whole in kept]))
    low, high = np.percentile(values, _TAILS)
    return float(low), float(high)


def evaluation_of(
    ground_truth: COCO, results: Sequence[Mapping[str, Any]], iou_type: str
) -> COCOeval:
    """COCO's evaluation of predictions, which is not computed yet.

    Args:
        ground_truth: with ``iscrowd`` and ``area`` in every annotation.
        results: entries of a results file in COCO's format, with the key that ``iou_type`` needs.
        iou_type: "bbox" or "segm".
    """
    # loadRes changes its input, and fails without any. It uses the areas of boxes where there are
    # boxes, so entries for masks must have none, as in Detectron2's evaluation.
    left_out = "bbox" if iou_type == "segm" else ""
    entries = [{key: value for key, value in entry.items() if key != left_out} for entry in results]
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        predictions = ground_truth.loadRes(entries) if entries else COCO()
    return COCOeval(ground_truth, predictions, iou_type)


def objects_found(evaluation: COCOeval, *, across_classes: bool = False) -> list[int]:
    """What each prediction finds at an IoU of 0.5, however many of an image there are.

    The predictions of an image choose in the order of their scores, so those below a threshold
    change nothing for the others.

    Args:
        evaluation: of :func:`evaluation_of`, computed or not.
        across_classes: a prediction may find an object of another class.

    Returns:
        For each prediction, in the order of the results, the id of an object, FALSE or IGNORED.
    """
    predictions = evaluation.cocoDt.anns.values()
    most = max(Counter(entry["image_id"] for entry in predictions).values(), default=0)
    options = {"useCats": int(not across_classes), "maxDets": [most]}
    again = _evaluated_again(evaluation, iouThrs=evaluation.params.iouThrs[:1], **options)
    found = [FALSE] * len(predictions)
    for match in filter(None, again.evalImgs):
        rows = match["dtIds"], match["dtMatches"][IOU_50], match["dtIgnore"][IOU_50]
        for prediction, matched, is_ignored in zip(*rows, strict=True):
            # loadRes numbers the predictions from 1 on
            found[prediction - 1] = IGNORED if is_ignored else int(matched)
    return found


def matches_of(evaluation: COCOeval) -> list[ClassMatches]:
    """The matches of objects of all sizes, by class.

    Detectron2's own C++ keeps none; they are computed again, of up to ``_MOST_AGAIN`` images.

    Args:
        evaluation: with ground truth and predictions, evaluated or not.

    Returns:
        The classes that have objects or detections; [] where the matches are not known.
    """
    count, sizes = len(evaluation.params.imgIds), len(evaluation.params.areaRng)
    if not evaluation.evalImgs:
        if count > _MOST_AGAIN:
            return []
        evaluation = _evaluated_again(evaluation, maxDets=evaluation.params.maxDets[-1:])
        sizes = 1
    classes = []
    for index, category in enumerate(evaluation.params.catIds):
        first = index * sizes * count  # "all" is the first of the sizes
        matches = evaluation.evalImgs[first : first + count]
        there = [(number, match) for number, match in enumerate(matches) if match is not None]
        objects = np.zeros(count, int)
        for number, match in there:
            objects[number] = np.count_nonzero(np.asarray(match["gtIgnore"]) == 0)
        if not there:
            continue
        scores = np.concatenate([match["dtScores"] for _, match in there])
        order = np.argsort(-scores, kind="stable")
        ignored = np.concatenate([match["dtIgnore"] for _, match in there], axis=1)[:, order] > 0
        matched = np.concatenate([match["dtMatches"] for _, match in there], axis=1)[:, order] > 0
        image = np.repeat(
            [number for number, _ in there], [len(match["dtScores"]) for _, match in there]
        )[order]
        right, wrong = matched & ~ignored, ~matched & ~ignored
        classes.append(ClassMatches(category, scores[order], image, right, wrong, objects))
    return classes


def _evaluated_again(evaluation: COCOeval, **options: Any) -> COCOeval:
    """The same evaluation of objects of all sizes alone, computed with other parameters."""
    again = COCOeval(evaluation.cocoGt, evaluation.cocoDt, evaluation.params.iouType)
    vars(again.params).update(vars(evaluation.params) | options)
    again.params.areaRng = again.params.areaRng[:1]
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        again.evaluate()
    return again
