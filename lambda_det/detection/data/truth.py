"""Ground truth as training and evaluation use it: all repairs of what the rules let pass.

``annotations.py`` has the rules. Records are repaired once, where a registered data set gives them
(:func:`sanitise`); the mapper repairs those that come another way. A pass over a made-up
file of the size of COCO train2017 takes a third of the time in which Detectron2 reads it (12 and
32 s of one core).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from operator import mul
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import shapely
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.structures import BoxMode
from PIL import Image
from torch.utils.data import Dataset

from lambda_det.errors import printable

logger = logging.getLogger(__name__)

FAR = 1e6  # pixels: no image is so large, and pycocotools runs out of memory at larger coordinates
MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 2**30)  # of an image: Pillow reads none with more


class Sound(list):
    """Annotations in which nothing is left to repair."""


def sanitise(name: str, *, checked: bool) -> None:
    """Let a registered data set give :func:`sanitised` records from now on.

    Args:
        name: of the data set. A second call changes nothing.
        checked: whether ``check_coco`` and Detectron2 have unpacked its run-length masks.
    """
    load = DatasetCatalog[name]
    if getattr(load, "is_sanitised", False):
        return

    @functools.wraps(load)
    def load_sanitised() -> Any:
        records = load()
        if isinstance(records, Dataset) or not isinstance(records, Sequence):
            return records  # the mapper repairs them
        names = MetadataCatalog.get(name).get("keypoint_names")
        keypoints = None if names is None else len(names)
        return sanitised(records, name, keypoints=keypoints, checked=checked)

    load_sanitised.is_sanitised = True
    DatasetCatalog[name] = load_sanitised


def sanitised(
    records: Sequence[dict[str, Any]],
    name: str,
    *,
    keypoints: int | None = None,
    checked: bool = False,
) -> list[dict[str, Any]]:
    """Records in which nothing is left to repair, with a warning for each kind of repair.

    An annotation without a usable box is left out. An annotation loses a mask that cannot be used,
    and keypoints of another number. Crowds stay as they are, and masks of an image of unknown size.

    Args:
        records: in Detectron2's dataset format; they are not changed.
        name: of the data set, for the warnings, of which a process gives each once.
        keypoints: how many an object has; None: any number.
        checked: whether run-length masks are known to be sound.
    """
    faults: dict[str, list[str]] = {}
    result = []
    for record in records:
        given = record.get("annotations")
        if given and not isinstance(given, Sound):
            kept = Sound() if "height" in record and "width" in record else []
            for annotation in given:
                found, fault = annotation, None
                if not annotation.get("iscrowd", 0):
                    found, fault = _repaired(annotation, record, keypoints, checked)
                if found is not None:
                    kept.append(found)
                if fault:
                    faults.setdefault(fault, []).append(record.get("file_name", ""))
            record = {**record, "annotations": kept}
        result.append(record)
    for fault, files in faults.items():
        if (name, fault) not in _warned:
            _warned.add((name, fault))
            logger.warning(f"{name}: {len(files)} x {fault}; the first in {printable(files[0])}.")
    return result


_warned: set[tuple[str, str]] = set()
_NO_BOX = "annotation without a usable box, which is left out"
_NO_MASK = "annotation with a broken mask, whose box stands for it"
_NO_KEYPOINTS = (
    "annotation whose keypoints are left out, since their number is not that of the category"
)


def _repaired(
    annotation: dict[str, Any], record: dict[str, Any], keypoints: int | None, checked: bool
) -> tuple[dict[str, Any] | None, str | None]:
    """An annotation as it can be used, itself if it is sound, and what was wrong with it."""
    if not has_box(annotation):
        return None, _NO_BOX
    fault = None
    mask = annotation.get("segmentation")
    if mask is not None and "height" in record and "width" in record:
        usable = usable_mask(mask, record["height"], record["width"], checked=checked)
        is_empty = isinstance(mask, (list, dict)) and not mask
        if usable is not mask:
            fault = _NO_MASK if usable is None and not is_empty else None
            annotation = _with(annotation, "segmentation", usable)
    points = annotation.get("keypoints")
    if points is not None and keypoints is not None and np.size(points) != 3 * keypoints:
        fault = fault or (_NO_KEYPOINTS if np.size(points) else None)
        annotation = _with(annotation, "keypoints", None)
    return annotation, fault


def _with(annotation: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """An annotation with another value of a key, or without it."""
    return {k: v for k, v in {**annotation, key: value}.items() if k != key or value is not None}


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
    mask = usable_mask(annotation.get("segmentation"), height, width, checked=True)
    # An empty mask, where the box is outside of the image or of no size.
    annotation["segmentation"] = mask or usable_mask(
        [rectangle(box[0], box[1], box[0] + box[2], box[1] + box[3])], height, width
    ) or [[0.0] * 6]  # fmt: skip
    return mask is not None


def rectangle(x0: float, y0: float, x1: float, y1: float) -> list[float]:
    """A box as a polygon."""
    return [x0, y0, x1, y0, x1, y1, x0, y1]


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
            and math.isfinite(float(sum(points)))
            and min(points) > -FAR
            and max(points) < FAR
        )
    except (TypeError, ValueError, OverflowError):
        return False


def corners(annotation: dict[str, Any]) -> list[float]:
    """The box as x0, y0, x1, y1, computed in float32."""
    if annotation["bbox_mode"] != BoxMode.XYWH_ABS:
        return BoxMode.convert(
            list(map(float, annotation["bbox"])), annotation["bbox_mode"], BoxMode.XYXY_ABS
        )
    x, y, width, height = np.array(annotation["bbox"], dtype=np.float32)  # as BoxMode has it
    return [float(v) for v in (x, y, x + width, y + height)]


def has_box(annotation: dict[str, Any]) -> bool:
    """Whether there is a box of finite numbers with an area, in a mode of absolute pixels."""
    try:
        if annotation["bbox_mode"] == BoxMode.XYWH_ABS:
            x0, y0, width, height = annotation["bbox"]
            x1, y1 = x0 + width, y0 + height  # sound ones in a tenth of the time
        else:
            x0, y0, x1, y1 = corners(annotation)
        return bool(-FAR < x0 < x1 < FAR and -FAR < y0 < y1 < FAR)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        return False


def usable_mask(
    segmentation: Any, height: int, width: int, *, checked: bool = False
) -> list[list[float]] | dict[str, Any] | None:
    """A mask of COCO's format of which all is sound, itself if it is; None for no mask.

    Broken polygons are left out. One that reaches out of its image by more than the image's size is
    cut at the border, because pycocotools keeps every pixel of an outline in memory. One whose
    signed area is 0 is split where it crosses itself, or is none.

    Args:
        segmentation: polygons [[x0, y0, x1, y1, ...], ...], or a run-length mask.
        height, width: of the image.
        checked: whether a run-length mask is known to be sound.
    """
    if isinstance(segmentation, dict):
        return segmentation if checked else usable_runs(segmentation, height, width)
    if not isinstance(segmentation, list):
        return None
    size = max(height, width)
    parts: list[Any] = []
    for points in filter(is_polygon, segmentation):
        if -size > min(points) or max(points) > 2 * size:
            whole = shapely.make_valid(shapely.Polygon(np.reshape(points, (-1, 2))))
            inside = shapely.intersection(whole, shapely.box(0, 0, width, height))
            parts += [part.reshape(-1).tolist() for part in _outlines(inside)]
        elif _has_area(points):
            parts.append(points)
        else:
            pieces = without_crossings(np.reshape(points, (-1, 2)))
            parts += [part.reshape(-1).tolist() for part in pieces]
    if len(parts) == len(segmentation) and all(map(lambda a, b: a is b, parts, segmentation)):
        return segmentation or None
    return parts or None


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


def area_of(points: Any) -> float:
    """The area of a polygon [x0, y0, x1, y1, ...]; lobes of one that crosses itself may cancel."""
    x, y = list(points[::2]), list(points[1::2])
    return abs(sum(map(mul, x, y[1:] + y[:1])) - sum(map(mul, y, x[1:] + x[:1]))) / 2


def _has_area(points: Any) -> bool:
    return area_of(points) > 5e-7 * max(max(points[::2]) - min(points[::2]), 1) ** 2


def without_crossings(points: np.ndarray) -> list[np.ndarray]:
    """Split a polygon [points, 2] that crosses or touches itself into polygons that do not.

    fvcore's crop would keep only one lobe of it. One in five polygons around panoptic masks is of
    this kind, and one in fifty would lose more than a tenth of its area. It takes milliseconds.
    """
    outline = shapely.Polygon(points)
    if outline.is_valid:
        return [points]
    return _outlines(shapely.make_valid(outline))


def _outlines(shape: shapely.Geometry) -> list[np.ndarray]:
    parts = shapely.get_parts(shapely.get_parts(shape))
    return [
        shapely.get_coordinates(part.exterior)[:-1]
        for part in parts
        if isinstance(part, shapely.Polygon) and not part.is_empty
    ]
