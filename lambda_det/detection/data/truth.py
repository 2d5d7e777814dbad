"""Ground truth as training and evaluation use it: all repairs of what the rules let pass.

``annotations.py`` has the rules. A record is repaired when it is read, which costs a start nothing:
a loader's workers repair those of COCO beside reading the images.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import shapely
from detectron2.structures import BoxMode
from PIL import Image

from lambda_det.errors import printable

logger = logging.getLogger(__name__)

FAR = 1e6  # pixels: no image is so large, and pycocotools runs out of memory at larger coordinates
MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 2**30)  # of an image: Pillow reads none with more


_warned: set[str] = set()


def usable_annotations(
    record: dict[str, Any], *, masks: bool, keypoints: int | None
) -> list[dict[str, Any]]:
    """The annotations that can be trained on, with their boxes as x0, y0, x1, y1.

    One without a mask gets its box as mask; otherwise the object, or the mask loss of the whole
    image, would be lost. One without keypoints gets some of visibility 0, which do not count:
    Detectron2 needs the same number for every object.

    Args:
        record: in Detectron2's dataset format; it is not changed.
        masks: whether masks are learnt; otherwise they are taken away.
        keypoints: how many of an object are learnt; 0 takes them away, None leaves them.
    """
    usable = []
    for annotation in record["annotations"]:
        if annotation.get("iscrowd", 0):
            continue
        box = usable_box(annotation)
        if box is None:
            _warn_once(record, "without a usable box is left out")
            continue
        found = {**annotation, "bbox": box, "bbox_mode": BoxMode.XYXY_ABS}
        segmentation = found.pop("segmentation", None)
        if masks and segmentation:
            found["segmentation"] = _usable_mask(segmentation, record["height"], record["width"])
            if found["segmentation"] is None:
                _warn_once(record, "with a broken mask is left out")
                continue
        elif masks:
            x0, y0, x1, y1 = np.clip(box, 0, 2 * (record["width"], record["height"])).tolist()
            found["segmentation"] = [np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]])]
            _warn_once(record, "without a mask gets its box as mask")
        if keypoints == 0:
            found.pop("keypoints", None)
        elif keypoints is not None:
            given = found.get("keypoints")
            if given is None or np.size(given) != 3 * keypoints:
                found["keypoints"] = [0.0] * 3 * keypoints
                if given:
                    _warn_once(record, "with another number of keypoints is used without them")
        usable.append(found)
    return usable


def _warn_once(record: dict[str, Any], what: str) -> None:
    if what not in _warned:
        _warned.add(what)
        logger.warning(
            "%s: an annotation %s (reported once; lambda-det check lists all of them).",
            printable(record["file_name"]),
            what,
        )


def _usable_mask(
    segmentation: Any, height: int, width: int
) -> list[np.ndarray] | dict[str, Any] | None:
    """The valid polygons [points, 2], or a compressed run-length mask of the image, or None."""
    if isinstance(segmentation, dict):
        return usable_runs(segmentation, height, width)
    if not isinstance(segmentation, list):
        return None
    polygons = [p.reshape(-1, 2) for p in usable_polygons(segmentation, height, width)]
    # One that crosses itself is the same mask, but one without area is none
    return [
        part
        for points in polygons
        for part in ([points] if _has_area(points) else without_crossings(points))
    ] or None


def complete(annotation: dict[str, Any], height: int, width: int) -> bool:
    """Give an annotation of COCO's format what pycocotools asks for, in place.

    An object stays an object: one without a usable mask has its box as mask, and a number of its
    box that is not finite is 0.

    Returns:
        Whether the annotation has a usable mask.
    """
    box = annotation["bbox"] = [v if -FAR < v < FAR else 0 for v in annotation["bbox"]]
    annotation.setdefault("iscrowd", 0)
    if not is_area(annotation.get("area")):
        annotation["area"] = box[2] * box[3]
    segmentation = annotation.get("segmentation")
    if isinstance(segmentation, list):
        # On polygons that are not whole and on NaN, pycocotools fails once all is predicted.
        segmentation = [p.tolist() for p in usable_polygons(segmentation, height, width)]
    has_mask = bool(segmentation)
    if not has_mask:
        x, y, w, h = box
        corners = [[x, y, x + w, y, x + w, y + h, x, y + h]]
        # An empty mask, where the box is outside of the image or of no size.
        parts = usable_polygons(corners, height, width)
        segmentation = [p.tolist() for p in parts] or [[0.0] * 6]
    annotation["segmentation"] = segmentation
    return has_mask


def is_area(value: Any) -> bool:
    """Whether a value can be the area of an object, in pixels."""
    return isinstance(value, (int, float)) and 0 <= value < FAR**2


def is_polygon(points: Any) -> bool:
    """Whether ``points`` is [x0, y0, x1, y1, ...] with at least three points, none of them FAR."""
    try:
        # The sum is finite only if all numbers are, and it is far faster than a check of each.
        return (
            len(points) >= 6
            and len(points) % 2 == 0
            and bool(np.isfinite(float(sum(points))))
            and min(points) > -FAR
            and max(points) < FAR
        )
    except (TypeError, ValueError, OverflowError):
        return False


def usable_box(annotation: dict[str, Any]) -> list[float] | None:
    """The box as x0, y0, x1, y1, or None if it is missing, not finite or without area."""
    try:
        values = [float(v) for v in annotation["bbox"]]
        if len(values) == 4 and annotation["bbox_mode"] == BoxMode.XYWH_ABS:
            # As BoxMode has it, in a tenth of the time
            with np.errstate(over="ignore", invalid="ignore"):
                box = np.array(values, dtype=np.float32)
                box[2:] += box[:2]
            box = box.tolist()
        else:
            box = BoxMode.convert(values, annotation["bbox_mode"], BoxMode.XYXY_ABS)
    except (KeyError, TypeError, ValueError, OverflowError, AssertionError):
        return None
    x0, y0, x1, y1 = box
    usable = np.isfinite(box).all() and x1 > x0 and y1 > y0
    return box if usable else None


def usable_polygons(segmentation: list[Any], height: int, width: int) -> list[np.ndarray]:
    """The valid polygons of a list, float64 [2 points] each.

    A polygon that reaches out of its image by more than the image's size is cut at the border,
    because pycocotools keeps every pixel of an outline in memory.
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
    """A run-length mask in COCO's compressed form, or None if it is not a mask of that size."""
    try:
        if list(segmentation["size"]) != [height, width] or height * width > MAX_PIXELS:
            return None
        counts = segmentation["counts"]
        if isinstance(counts, list):
            whole = all(type(count) is int and count >= 0 for count in counts)
            if not whole or sum(counts) != height * width:
                return None
            segmentation = mask_util.frPyObjects(segmentation, height, width)
        elif not _is_whole(counts):
            return None
        mask_util.decode(segmentation)
    except Exception:  # pycocotools has no error class of its own
        return None
    return segmentation


def _is_whole(counts: str | bytes) -> bool:
    """Whether compressed runs end where their text does.

    A character is 48 and six bits, the highest of which says that another one follows. pycocotools
    believes it, reads on past the end, and writes more runs than it has memory for.
    """
    text = counts.encode() if isinstance(counts, str) else counts
    digits = np.frombuffer(text, np.uint8) - np.uint8(48)  # characters below 48 wrap to above 63
    return bool((digits < 64).all()) and not (len(digits) and digits[-1] & 32)


def _has_area(points: np.ndarray) -> bool:
    """Whether the signed area of a polygon [points, 2] is not 0.

    A polygon that crosses itself may have lobes whose signed areas cancel out.
    """
    x, y = (points - points[0]).T
    return abs(np.dot(x[:-1], y[1:]) - np.dot(x[1:], y[:-1])) > 1e-6 * max(abs(x).max(), 1) ** 2


def without_crossings(points: np.ndarray) -> list[np.ndarray]:
    """Split a polygon [points, 2] that crosses or touches itself into polygons that do not.

    fvcore's crop would keep only one lobe of it. One in five polygons around panoptic masks is of
    this kind, and one in fifty would lose more than a tenth of its area. It takes milliseconds.
    """
    outline = shapely.Polygon(points)
    if outline.is_valid:
        return [points]
    return _outlines(shapely.make_valid(outline))


def _inside(points: np.ndarray, height: int, width: int) -> list[np.ndarray]:
    """The part of a polygon [points, 2] inside the image, as polygons [2 points]."""
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
