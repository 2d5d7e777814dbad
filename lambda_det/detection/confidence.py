"""The uncertainty of an AP: an interval by a bootstrap over the images of the test set."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass

import numpy as np
from pycocotools.cocoeval import COCOeval

__all__ = ["MOST_IMAGES", "ap_interval"]

MOST_IMAGES = 500  # with more images the interval is narrow, and computing it takes seconds
_REPLICATES = 200
_TAILS = (2.5, 97.5)  # percent


@dataclass(frozen=True)
class _Class:
    """The detections of one class, the highest scores first.

    Attributes:
        image: [detections] number of the image.
        right, wrong: [IoU thresholds, detections] of bool. A detection that is neither right nor
            wrong lies in a crowd.
        objects: [images] number of objects, without crowds.
    """

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


def ap_interval(evaluation: COCOeval) -> tuple[float, float] | None:
    """The interval that holds AP in 95 of 100 test sets of the same kind and size.

    Test sets, always the same, are drawn from the images of this one with repetition, and their AP
    is computed as COCO does. The interval leaves out the lowest and the highest 2.5 % of these
    values. With few images it is a rough figure, and it ignores that images may be alike, such as
    the frames of one video.

    Args:
        evaluation: with ground truth and predictions, evaluated or not.

    Returns:
        The ends in percent; None with less than two images with an object, or more than
        ``MOST_IMAGES`` images.
    """
    images = len(evaluation.params.imgIds)
    if images > MOST_IMAGES:
        return None
    classes = _classes(evaluation)
    if np.count_nonzero(sum(one.objects for one in classes)) < 2:
        return None
    random = np.random.default_rng(0)
    values = []
    while len(values) < _REPLICATES:
        counts = np.bincount(random.integers(images, size=images), minlength=images)
        of_classes = [one.ap(counts, evaluation.params.recThrs) for one in classes]
        if with_objects := [ap for ap in of_classes if ap is not None]:
            values.append(100 * np.mean(with_objects))
    low, high = np.percentile(values, _TAILS)
    return float(low), float(high)


def _classes(evaluation: COCOeval) -> list[_Class]:
    """The matches of all sizes of objects, computed again: not every evaluation keeps them."""
    again = COCOeval(evaluation.cocoGt, evaluation.cocoDt, evaluation.params.iouType)
    again.params.__dict__.update(evaluation.params.__dict__)
    again.params.areaRng, again.params.areaRngLbl = again.params.areaRng[:1], ["all"]
    again.params.maxDets = again.params.maxDets[-1:]
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        again.evaluate()
    count, classes = len(again.params.imgIds), []
    for index in range(len(again.params.catIds)):
        matches = again.evalImgs[index * count : (index + 1) * count]
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
        classes.append(_Class(image, matched & ~ignored, ~matched & ~ignored, objects))
    return classes
