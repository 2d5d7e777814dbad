"""Polygons and run-length masks as annotation files hold them, told from what only looks so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import shapely
from PIL import Image

__all__ = ["FAR", "MAX_PIXELS", "is_polygon", "usable_polygons", "usable_runs", "without_crossings"]

FAR = 1e6  # pixels; no image is so large, and farther out pycocotools runs out of memory
MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 2**30)  # of an image; Pillow reads none with more


def is_polygon(points: Any) -> bool:
    """Whether ``points`` is [x0, y0, x1, y1, ...] with at least three points, none of them FAR."""
    try:
        # The sum is finite only if all numbers are, and is taken far faster than a look at each.
        return (
            len(points) >= 6
            and len(points) % 2 == 0
            and bool(np.isfinite(float(sum(points))))
            and min(points) > -FAR
            and max(points) < FAR
        )
    except (TypeError, ValueError, OverflowError):
        return False


def usable_polygons(segmentation: list[Any], height: int, width: int) -> list[np.ndarray]:
    """The polygons of a list that are any, float64 [2 points] each.

    One that reaches out of its image by more than the image's size is cut at the border, as
    pycocotools keeps every pixel of an outline in memory.
    """
    polygons = [np.asarray(p, dtype=np.float64) for p in segmentation if is_polygon(p)]
    size = max(height, width)
    return [
        part
        for polygon in polygons
        for part in (
            [polygon]
            if polygon.min() >= -size and polygon.max() <= 2 * size
            else _inside(polygon.reshape(-1, 2), height, width)
        )
    ]


def usable_runs(segmentation: dict[str, Any], height: int, width: int) -> dict[str, Any] | None:
    """COCO's run-length mask in compressed form, or None where it is not a mask of that size."""
    try:
        if list(segmentation["size"]) != [height, width] or height * width > MAX_PIXELS:
            return None
        counts = segmentation["counts"]
        if isinstance(counts, list):
            whole = all(type(count) is int and count >= 0 for count in counts)
            if not whole or sum(counts) != height * width:
                return None
            segmentation = mask_util.frPyObjects(segmentation, height, width)
        mask_util.decode(segmentation)
    except Exception:  # pycocotools has no error class of its own
        return None
    return segmentation


def without_crossings(points: np.ndarray) -> list[np.ndarray]:
    """A polygon [points, 2] that crosses or touches itself as several that do not.

    fvcore's crop would keep only one lobe of such a polygon: drawn around panoptic masks, one in
    five is of this kind, and one in fifty would lose more than a tenth of its area.
    """
    outline = shapely.Polygon(points)
    if outline.is_valid:
        return [points]
    return _outlines(shapely.make_valid(outline))


def _inside(points: np.ndarray, height: int, width: int) -> list[np.ndarray]:
    """What is inside the image of a polygon [points, 2], as polygons [2 points]."""
    whole = shapely.make_valid(shapely.Polygon(points))
    parts = _outlines(shapely.intersection(whole, shapely.box(0, 0, width, height)))
    return [part.reshape(-1) for part in parts]


def _outlines(shape: shapely.Geometry) -> list[np.ndarray]:
    parts = shapely.get_parts(shapely.get_parts(shape))
    return [
        shapely.get_coordinates(part.exterior)[:-1]
        for part in parts
        if isinstance(part, shapely.Polygon) and not part.is_empty
    ]
