"""The results of evaluations, in one table that every place reads which shows some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lambda_det.detection.matches import IOU_50, BestThreshold, ClassMatches, best_score

# Share of the AP50 of boxes that masks must have before they decide a score: those of thin objects
# are learned last. It is a guess: the masks of two of three classes were empty at 0.7, and finished
# runs had 0.9 to 1
MASKS_LEARNT = 0.8


@dataclass(frozen=True)
class ClassScores:
    """What COCO's evaluation says of one class.

    Attributes:
        precisions: [IoU thresholds, recalls, sizes], with the sizes all, small, medium and large;
            NaN where the class has no object.
        best: of its matches.
    """

    precisions: np.ndarray
    best: BestThreshold

    def ap(self, size: int = 0, iou: int | slice = slice(None)) -> float:
        """In percent; NaN where the class has no object of the size."""
        values = self.precisions[iou, ..., size]
        return float("nan") if np.isnan(values).all() else 100 * float(np.nanmean(values))


@dataclass(frozen=True)
class Metric:
    """A kind of result.

    Attributes:
        ending: of its names in metrics.json: "/AP" of "bbox_EMA/AP".
        in_log: whether the line of an evaluation has it.
        is_drawn: whether curves, the heads of pages, the card of a run, ``lambda-det evaluate``
            and :attr:`lambda_det.Run.evaluations` have it.
        best_of: the predictions of a detector for which it says which checkpoint is the best.
        of_classes: makes it of the matches of all classes, where Detectron2 does not; None where it
            is unknown.
        column: the head of its column in tables of classes; "" for none.
        of_class: makes the value in that column.
    """

    ending: str
    in_log: bool = False
    is_drawn: bool = False
    best_of: tuple[str, ...] = ()
    of_classes: Callable[[Sequence[ClassMatches]], float | None] | None = None
    column: str = ""
    of_class: Callable[[ClassScores], float] | None = None


_SHOWN = {"in_log": True, "is_drawn": True}
METRICS = (
    Metric(
        "/AP",
        **_SHOWN,
        # boxes first, because masks of thin objects are learned last: with an AP of 0 at all
        # evaluations, none would be better than the first
        best_of=("bbox", "segm", "keypoints"),
        column="AP",
        of_class=lambda one: one.ap(),
    ),
    Metric("/AP50", **_SHOWN, column="AP50", of_class=lambda one: one.ap(iou=IOU_50)),
    Metric("/APs", column="small", of_class=lambda one: one.ap(1)),
    Metric("/APm", column="medium", of_class=lambda one: one.ap(2)),
    Metric("/APl", column="large", of_class=lambda one: one.ap(3)),
    Metric(
        "/best_score",
        of_classes=best_score,
        column="best score",
        of_class=lambda one: one.best.score,
    ),
    Metric("/precision", column="precision", of_class=lambda one: one.best.precision),
    Metric("/recall", column="recall", of_class=lambda one: one.best.recall),
    Metric("/mIoU", **_SHOWN, best_of=("sem_seg",)),
    Metric("/IoU", **_SHOWN, best_of=("sem_seg",)),  # of Cityscapes
    Metric("/PQ", **_SHOWN, best_of=("panoptic_seg",)),
    Metric("_top1", **_SHOWN, best_of=("raw", "ema")),  # of classifiers
    Metric("/total_loss", in_log=True),  # of the validation images
)


DRAWN = tuple(metric.ending for metric in METRICS if metric.is_drawn)
IN_LOG = tuple(metric.ending for metric in METRICS if metric.in_log)


def columns() -> dict[str, Metric]:
    """The metrics of a table of classes, by the heads of their columns."""
    return {metric.column: metric for metric in METRICS if metric.column}
