"""Assign predictions to the objects of an image, at an IoU of 0.5 as in COCO's evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pycocotools import mask as mask_util

__all__ = ["FALSE", "IGNORED", "LEAST_IOU", "assign", "overlaps"]

LEAST_IOU = 0.5  # IoU of a match
FALSE, IGNORED = -1, -2


def overlaps(found: Sequence[Any], objects: Sequence[Any], crowds: Sequence[bool]) -> np.ndarray:
    """[predictions, objects] IoUs; for a crowd, the share of the prediction that lies in it.

    Args:
        found, objects: boxes x, y, width, height in pixels, or run-length encoded masks.
        crowds: whether an object is a crowd.
    """
    if not (len(found) and len(objects)):
        return np.zeros((len(found), len(objects)))
    return np.asarray(mask_util.iou(list(found), list(objects), [int(c) for c in crowds]))


def assign(
    overlaps: np.ndarray, crowds: Sequence[bool], allowed: np.ndarray | None = None
) -> list[int]:
    """For each prediction the object that it finds, FALSE or IGNORED.

    A prediction takes the free object that it overlaps most. One without an object is ignored if
    half of it lies in a crowd.

    Args:
        overlaps: of :func:`overlaps`, predictions in the order in which they may choose.
        crowds: as there.
        allowed: [predictions, objects], whether a prediction may take an object, for example only
            of its class; None for all.
    """
    crowds = np.asarray(crowds, bool)
    overlaps = overlaps if allowed is None else np.where(allowed, overlaps, 0.0)
    free = set(np.flatnonzero(~crowds).tolist())
    chosen = []
    for row in overlaps:
        best = max(free, key=row.__getitem__, default=None)
        if best is not None and row[best] >= LEAST_IOU:
            free.remove(best)
            chosen.append(best)
        else:
            chosen.append(IGNORED if (row[crowds] >= LEAST_IOU).any() else FALSE)
    return chosen
