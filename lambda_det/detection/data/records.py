"""What can be used of a dataset dict: its image, its semantic mask, polygons and run lengths."""

from __future__ import annotations

import os
import stat
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import shapely
from detectron2.data import detection_utils
from PIL import Image

from lambda_det.errors import printable, reason


def image_fault(record: dict[str, Any], image_format: str = "BGR") -> str | None:
    """Read the image of a dataset dict and say in one sentence what is wrong with it.

    Args:
        record: with "file_name" and, where the size is to be checked, "width" and "height".
        image_format: as in ``INPUT.FORMAT``.
    """
    path = record["file_name"]
    if fault := no_file(path):
        return fault
    try:
        image = detection_utils.read_image(path, format=image_format)
    except FileNotFoundError:
        return (
            f"The image {printable(path)} does not exist; put it there or take it out of the "
            "annotations."
        )
    except Exception as error:
        return (
            f"The image {printable(path)} cannot be read ({reason(error)}); fetch it again or take "
            "it out of the annotations."
        )
    height, width = image.shape[:2]
    said = (record.get("width", width), record.get("height", height))
    if said != (width, height):
        return (
            f"The image {printable(path)} is {width}x{height} (width x height, turned as its EXIF "
            f"data say), but the annotations say {said[0]}x{said[1]}; correct one of them."
        )
    return None


def no_file(path: str | None) -> str | None:
    """What is wrong with a path where something lies that is no file; None where nothing lies."""
    try:
        if path is None or stat.S_ISREG(os.stat(path).st_mode):
            return None
    except (OSError, ValueError):  # absent, on another machine, or no path: for the reader to say
        return None
    return (
        f"The image {printable(path)} is not a file but a folder, pipe or device; put the image "
        "there or take it out of the annotations."
    )


def mask_fault(record: dict[str, Any]) -> str | None:
    """What is wrong with the semantic mask of a dataset dict whose image is sound."""
    path = record.get("sem_seg_file_name")
    if path is None:
        return None
    mask_record = {"file_name": path}
    if "width" in record:
        mask_record |= {"width": record["width"], "height": record["height"]}
    fault = image_fault(mask_record, "L")
    return fault and fault.replace("The image", "The semantic mask", 1)


def label_fault(path: str, labels: np.ndarray, classes: int, ignored: int) -> str | None:
    """What is wrong with the labels of a semantic mask: the loss and the mean IoU would fail.

    Args:
        path: the file of the mask.
        labels: whole numbers of any shape.
        classes: of the model; their labels start at 0.
        ignored: the label of pixels that do not count.
    """
    foreign = labels[(labels >= classes) & (labels != ignored)]
    if not foreign.size:
        return None
    return (
        f"The semantic mask {printable(path)} holds the label {foreign[0]}, but there are "
        f"{classes} classes, from 0, and {ignored} for what does not count; correct the mask or "
        "MODEL.SEM_SEG_HEAD.NUM_CLASSES."
    )


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
