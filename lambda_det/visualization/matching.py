"""Which predictions of an image are right, at one threshold of overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from detectron2.structures import Boxes, BoxMode, Instances, pairwise_ioa, pairwise_iou

__all__ = ["Match", "match"]

_OVERLAP = 0.5


@dataclass(frozen=True)
class Match:
    """Counts of one image."""

    found: int
    missed: int
    false: int

    @property
    def errors(self) -> int:
        """Missed and false ones."""
        return self.missed + self.false

    @property
    def quality(self) -> float:
        """Found among all objects and all false predictions; 1 where there is nothing of either."""
        everything = self.found + self.errors
        return self.found / everything if everything else 1.0


def match(instances: Instances, annotations: Sequence[dict[str, Any]]) -> Match:
    """Match boxes as COCO's evaluation does, at an intersection over union of 0.5.

    Predictions take objects of their class, the best scores first; each takes the free object that
    it overlaps most. One that finds none and lies by half in a crowd of its class counts neither
    as found nor as false.

    Args:
        instances: with ``pred_boxes``, ``pred_classes`` and ``scores``.
        annotations: of a Detectron2 dataset dict.
    """
    objects = [a for a in annotations if not a.get("iscrowd")]
    crowds = [a for a in annotations if a.get("iscrowd")]
    overlaps = pairwise_iou(instances.pred_boxes, _boxes(objects))  # [predictions, objects]
    # [predictions, crowds], as a part of the prediction
    covered = pairwise_ioa(_boxes(crowds), instances.pred_boxes).T
    free = set(range(len(objects)))
    found = false = 0
    for index in instances.scores.argsort(descending=True, stable=True).tolist():
        wanted = int(instances.pred_classes[index])
        best = max(
            (i for i in free if objects[i]["category_id"] == wanted),
            key=lambda i: float(overlaps[index, i]),
            default=None,
        )
        if best is not None and overlaps[index, best] >= _OVERLAP:
            free.remove(best)
            found += 1
        elif not any(
            crowd["category_id"] == wanted and covered[index, i] >= _OVERLAP
            for i, crowd in enumerate(crowds)
        ):
            false += 1
    return Match(found, len(free), false)


def _boxes(annotations: Sequence[dict[str, Any]]) -> Boxes:
    return Boxes(
        [BoxMode.convert(list(a["bbox"]), a["bbox_mode"], BoxMode.XYXY_ABS) for a in annotations]
        or [[0.0] * 4][:0]
    )
