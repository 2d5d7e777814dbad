"""The decision about one annotation: its box, its mask and its keypoints.

:func:`decide` is the only place that repairs or drops an annotation. :mod:`.coco` asks it for files
in COCO's format, and :func:`decided` for the records that another function registers. Mapper,
evaluators, statistics and ``lambda-det check`` use the result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import mul
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import shapely
from detectron2.structures import BoxMode
from PIL import Image

from lambda_det.detection.data.report import BORDER, BOX, MASK, MEANT, OUTSIDE, VALUE, Kind
from lambda_det.errors import printable

logger = logging.getLogger(__name__)

FAR = 1e6  # pixels: no image is as large, and pycocotools runs out of memory at larger coordinates
# pixels of an image: Pillow reads none with more
MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 2**30)
# Boxes of COCO train2017 itself reach over the border by a rounding error, and stay as they are
ROUNDING = 1.0  # pixels
# how far a person may draw over the border: pixels, and a share of a side
_FEW_PIXELS, _FEW_SHARE = 5.0, 0.02

Fault = tuple[Kind, str]


class Decided(list):
    """Annotations that :func:`decide` has checked and repaired."""


def decide(
    annotation: dict[str, Any], height: int | None, width: int | None, keypoints: int | None = None
) -> tuple[dict[str, Any] | None, list[Fault]]:
    """Decide about an annotation: return it as it is used, itself if it is sound, and its faults.

    An object without a usable box is left out. A box is cut at the border. A mask that cannot be
    used is taken away, and :func:`mask_of` then gives the box; keypoints of another number are
    taken away.

    Args:
        annotation: in Detectron2's dataset format; it is not changed.
        height, width: of the image; None if they are unknown, and then masks and border are not
            checked.
        keypoints: how many an object has; None: any number.

    Returns:
        The annotation, or None; and the kind and the words of each fault.
    """
    faults: list[Fault] = []
    is_crowd = annotation.get("iscrowd", 0)
    if is_crowd not in (0, 1):
        faults.append((VALUE, f"iscrowd {is_crowd!r:.80}"))
        annotation = _with(annotation, "iscrowd", 0)
    annotation, fault = _with_usable_mask(annotation, height, width)
    faults += fault
    annotation, fault = _with_usable_box(annotation, height, width)
    faults += fault
    if annotation is None:
        return None, faults
    points = annotation.get("keypoints")
    if points is not None and not are_keypoints(points, keypoints):
        if not (isinstance(points, (list, tuple)) and not points):
            faults.append((VALUE, f"keypoints {points!r:.80}"))
        annotation = _with(annotation, "keypoints", None)
    return annotation, faults


def decided(record: dict[str, Any], keypoints: int | None = None) -> tuple[dict, list[Fault]]:
    """Decide about a record of Detectron2's dataset format: return the new record, and the faults.

    Args:
        record: it is not changed.
        keypoints: how many an object has; None: any number.
    """
    given = record.get("annotations")
    if not given or isinstance(given, Decided):
        return record, []
    size = (
        (record["height"], record["width"]) if {"height", "width"} <= record.keys() else (None,) * 2
    )
    kept, faults = Decided(), []
    for annotation in given:
        annotation, its_faults = decide(annotation, *size, keypoints)
        faults += its_faults
        if annotation is not None:
            kept.append(annotation)
    return {**record, "annotations": kept}, faults


def all_decided(
    records: Iterable[Mapping[str, Any]], name: str, keypoints: int | None = None
) -> list[dict[str, Any]]:
    """:func:`decided` of all records of a data set, with a warning for each kind of fault.

    Args:
        records: in Detectron2's dataset format; they are not changed.
        name: of the data set, for the warnings. A process gives each warning once.
        keypoints: how many an object has; None: any number.
    """
    result, cases = [], {}
    for record in records:
        record, faults = decided(record, keypoints)
        result.append(record)
        for kind, words in faults:
            cases.setdefault(kind, []).append(f"{record.get('file_name', '')}: {words}")
    for kind, where in cases.items():
        if (name, kind) not in _warned:
            _warned.add((name, kind))
            logger.warning(
                f"{name}: {len(where)} x {kind.text}; the first in {printable(where[0])}."
            )
    return result


_warned: set[tuple[str, Kind]] = set()


def _with(annotation: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """An annotation with another value of a key, or without it."""
    return {k: v for k, v in {**annotation, key: value}.items() if k != key or value is not None}


# ---------------------------------------------------------------------------------------- the boxes
def _with_usable_box(
    annotation: dict[str, Any], height: int | None, width: int | None
) -> tuple[dict[str, Any] | None, list[Fault]]:
    mask = annotation.get("segmentation")
    if not has_box(annotation):
        box = annotation.get("bbox")
        if isinstance(box, (list, tuple)) and len(box):  # a box that contradicts itself
            return None, [(BOX, f"bbox {box!r:.80}")]
        if not mask:
            return None, [(BOX, f"bbox {box!r:.80}")]
        annotation = {**annotation, "bbox": around(mask), "bbox_mode": BoxMode.XYXY_ABS}
        annotation = _as_sides(annotation, annotation["bbox"])
        if not has_box(annotation):
            return None, [(BOX, f"bbox {box!r:.80}")]
        return annotation, [(MEANT, f"bbox {box!r:.80}: the box of its mask is taken")]
    if height is None or annotation["bbox_mode"] not in (BoxMode.XYWH_ABS, BoxMode.XYXY_ABS):
        return annotation, []
    x0, y0, x1, y1 = corners(annotation)
    words = f"bbox {list(annotation['bbox'])!r:.120}"
    if max(x0, y0, x1 - x0, y1 - y0) <= 1 and max(height, width) > 2:
        return None, [(BOX, f"{words} is within one pixel, as a share of 1 would be")]
    if mask and not _holds((x0, y0, x1, y1), mask, height, width):
        outline = ", ".join(f"{v:g}" for v in around(mask))
        return None, [(BOX, f"{words} is not where its mask is, within the corners {outline}")]
    beyond = max(x1 - width, y1 - height, -x0, -y0)
    if beyond <= ROUNDING:
        return annotation, []
    inside = [max(x0, 0), max(y0, 0), min(x1, width), min(y1, height)]
    if inside[2] - inside[0] <= 0 or inside[3] - inside[1] <= 0:
        return None, [(BOX, f"{words} is outside of the image")]
    is_near = beyond <= max(_FEW_PIXELS, _FEW_SHARE * max(height, width))
    kind = BORDER if is_near else OUTSIDE
    return _as_sides(annotation, inside), [(kind, f"{words} is {beyond:g} pixels over the border")]


def _as_sides(annotation: dict[str, Any], box: Sequence[float]) -> dict[str, Any]:
    """An annotation with a box of these corners, as [x, y, width, height]."""
    x0, y0, x1, y1 = map(float, box)
    return {
        **annotation,
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "bbox_mode": BoxMode.XYWH_ABS,
    }


def around(mask: list[list[float]] | dict[str, Any]) -> tuple[float, float, float, float]:
    """The corners x0, y0, x1, y1 around a usable mask of COCO's format."""
    if isinstance(mask, dict):
        x, y, width, height = mask_util.toBbox(mask).tolist()
        return x, y, x + width, y + height
    xs = [polygon[0::2] for polygon in mask]
    ys = [polygon[1::2] for polygon in mask]
    return (
        min(map(min, xs)),
        min(map(min, ys)),
        max(map(max, xs)),
        max(map(max, ys)),
    )


def _holds(
    box: Sequence[float], mask: list[list[float]] | dict[str, Any], height: int, width: int
) -> bool:
    """Whether at least half of a usable mask lies in its box; stray polygons may be far away."""
    if isinstance(mask, dict):
        outline = around(mask)
        if min(outline[0] - box[0], outline[1] - box[1]) >= 0 and (
            max(outline[2] - box[2], outline[3] - box[3]) <= 0
        ):
            return True
        pixels = mask_util.decode(mask)
        x0, y0 = np.floor(np.clip(box[:2], 0, [width, height])).astype(int)
        x1, y1 = np.ceil(np.clip(box[2:], 0, [width, height])).astype(int)
        return bool(2 * np.count_nonzero(pixels[y0:y1, x0:x1]) >= np.count_nonzero(pixels))
    inside, total = 0.0, 0.0
    for polygon in mask:
        x0, y0, x1, y1 = around([polygon])
        total += (x1 - x0) * (y1 - y0)
        shared = min(box[2], x1) - max(box[0], x0), min(box[3], y1) - max(box[1], y0)
        if min(shared) > 0:
            inside += shared[0] * shared[1]
    return 2 * inside >= total


def corners(annotation: Mapping[str, Any]) -> list[float]:
    """The box as x0, y0, x1, y1, computed in float32."""
    if annotation["bbox_mode"] != BoxMode.XYWH_ABS:
        return BoxMode.convert(
            list(map(float, annotation["bbox"])), annotation["bbox_mode"], BoxMode.XYXY_ABS
        )
    x, y, width, height = np.array(annotation["bbox"], dtype=np.float32)  # as BoxMode has it
    return [float(v) for v in (x, y, x + width, y + height)]


def has_box(annotation: Mapping[str, Any]) -> bool:
    """Whether there is a box of finite numbers with an area, in a mode of absolute pixels."""
    try:
        if annotation["bbox_mode"] == BoxMode.XYWH_ABS:
            x0, y0, width, height = annotation["bbox"]
            x1, y1 = x0 + width, y0 + height  # this recognises sound boxes in a tenth of the time
        else:
            x0, y0, x1, y1 = corners(annotation)
        return bool(-FAR < x0 < x1 < FAR and -FAR < y0 < y1 < FAR)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        return False


def rectangle(x0: float, y0: float, x1: float, y1: float) -> list[float]:
    """A box as a polygon."""
    return [x0, y0, x1, y0, x1, y1, x0, y1]


def turned_rectangle(box: Sequence[float], degrees: float) -> list[float]:
    """A box x0, y0, x1, y1 as a polygon that is turned clockwise about the middle of the box."""
    angle = math.radians(degrees)
    turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    corners = np.reshape(rectangle(*box), (-1, 2))
    return ((corners - corners.mean(0)) @ turn + corners.mean(0)).ravel().tolist()


# ---------------------------------------------------------------------------------------- the masks
def mask_of(
    annotation: Mapping[str, Any], height: int, width: int
) -> list[list[float]] | dict[str, Any]:
    """The mask of an annotation after :func:`decide`; its box where it has no mask.

    Args:
        annotation: in Detectron2's dataset format.
        height, width: of the image, at whose border the box is cut.

    Returns:
        Polygons [x0, y0, x1, y1, ...] in pixels, or run lengths of COCO's format.
    """
    mask = annotation.get("segmentation")
    if mask:
        return mask
    box = np.clip(corners(annotation), 0, [width, height, width, height])
    return [rectangle(*box.tolist())]


def without_holes(mask: Any, area: float, height: int, width: int) -> dict[str, Any] | None:
    """The mask of polygons of which some are outlines of holes; None where none is.

    In COCO's format the polygons of an object are added. Some tools write the outline of a hole as
    one more polygon. Then the area of the object counts the pixels within an odd number of
    polygons, and not all.

    Args:
        mask: of an annotation after :func:`decide`.
        area: that the file states.
        height, width: of the image.

    Returns:
        Run lengths, because a polygon cannot have a hole.
    """
    if not isinstance(mask, list) or len(mask) < 2 or area >= _ADDED * sum(map(area_of, mask)):
        return None
    # Only the box around the polygons is decoded, because an image may be large
    points = np.concatenate([np.reshape(polygon, (-1, 2)) for polygon in mask])
    x0, y0 = np.floor(points.min(0)).astype(int).clip(0)
    x1, y1 = np.minimum(np.ceil(points.max(0)).astype(int) + 1, (width, height))
    shifted = [(np.reshape(polygon, (-1, 2)) - (x0, y0)).ravel().tolist() for polygon in mask]
    runs = mask_util.frPyObjects(shifted, int(y1 - y0), int(x1 - x0))
    times = mask_util.decode(runs).sum(axis=2, dtype=np.int32)
    odd = times % 2 == 1
    added, left = np.count_nonzero(times), np.count_nonzero(odd)
    if not left or _FAR_FROM_AREA * abs(left - area) >= abs(added - area):
        return None
    whole = np.zeros((height, width), np.uint8, order="F")
    whole[y0:y1, x0:x1] = odd
    runs = mask_util.encode(whole)
    return {**runs, "counts": runs["counts"].decode()}


# of the sum of polygons: an area that is counted in pixels may be smaller than the sum by as much
_ADDED = 0.99
_FAR_FROM_AREA = 4  # times nearer to the stated area than the sum is


def _with_usable_mask(
    annotation: dict[str, Any], height: int | None, width: int | None
) -> tuple[dict[str, Any], list[Fault]]:
    mask = annotation.get("segmentation")
    if mask is None:
        return annotation, []
    if height is None:
        if not isinstance(mask, dict):
            return annotation, []
        height, width = _size_of_runs(mask)
    usable = usable_mask(mask, height, width)
    if usable is mask:
        return annotation, []
    faults: list[Fault] = []
    written, mask = mask, written_polygons(mask)
    if written is not mask:
        usable = usable_mask(mask, height, width)
        faults = [(MEANT, f"segmentation {written!r:.60}: a list of lists of numbers is meant")]
    annotation = _with(annotation, "segmentation", usable)
    is_empty = isinstance(mask, (list, dict)) and not mask
    is_empty = is_empty or (isinstance(mask, list) and not any(map(bool, mask)))
    all_sound = usable is not None and (isinstance(mask, dict) or all(map(is_polygon, mask)))
    if not (is_empty or all_sound):
        faults.append((MASK, f"segmentation {mask!r:.60}"))
    return annotation, faults


def _size_of_runs(mask: Mapping[str, Any]) -> tuple[int, int]:
    try:
        height, width = mask["size"]
        return int(height), int(width)
    except (LookupError, TypeError, ValueError, OverflowError):
        return 0, 0


def written_polygons(segmentation: Any) -> Any:
    """Polygons in COCO's form, from a list of numbers or of points in the place of polygons."""
    if not isinstance(segmentation, list):
        return segmentation
    if len(segmentation) >= 6 and all(map(_is_number, segmentation)):
        return [segmentation]
    if len(segmentation) >= 3 and all(map(_is_point, segmentation)):
        return [[value for point in segmentation for value in point]]
    if segmentation and all(
        isinstance(polygon, list) and len(polygon) >= 3 and all(map(_is_point, polygon))
        for polygon in segmentation
    ):
        return [[value for point in polygon for value in point] for polygon in segmentation]
    return segmentation


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_point(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def usable_mask(
    segmentation: Any, height: int, width: int
) -> list[list[float]] | dict[str, Any] | None:
    """The usable part of a mask in COCO's format; the mask itself if all is usable, None if nothing
    is.

    Broken polygons are left out. A polygon that reaches beyond its image by more than the image's
    size is cut at the border, because pycocotools keeps every pixel of an outline in memory. A
    polygon whose signed area is 0 is split where it crosses itself, or left out.

    Args:
        segmentation: polygons [[x0, y0, x1, y1, ...], ...], or a run-length mask.
        height, width: of the image.
    """
    if isinstance(segmentation, dict):
        return usable_runs(segmentation, height, width)
    if not isinstance(segmentation, list):
        return None
    size = max(height, width)
    usable: list[Any] = []
    for points in filter(is_polygon, segmentation):
        if -size > min(points) or max(points) > 2 * size:
            whole = shapely.make_valid(shapely.Polygon(np.reshape(points, (-1, 2))))
            inside = shapely.intersection(whole, shapely.box(0, 0, width, height))
            usable += [polygon.reshape(-1).tolist() for polygon in _outlines(inside)]
        elif _has_area(points):
            usable.append(points)
        else:
            pieces = without_crossings(np.reshape(points, (-1, 2)))
            usable += [polygon.reshape(-1).tolist() for polygon in pieces]
    if len(usable) == len(segmentation) and all(map(lambda a, b: a is b, usable, segmentation)):
        return segmentation or None
    return usable or None


def usable_runs(segmentation: dict[str, Any], height: int, width: int) -> dict[str, Any] | None:
    """A run-length mask in COCO's compressed form; None if it is empty or not of that size.

    No pixel is decoded, since an image may have many millions of them.
    """
    try:
        if list(segmentation["size"]) != [height, width] or height * width > MAX_PIXELS:
            return None
        counts = segmentation["counts"]
        if isinstance(counts, list):
            if not all(type(count) is int for count in counts):
                return None
            runs = counts
        elif _is_whole(counts):
            runs = runs_of(counts)
        else:
            return None
    except Exception:  # a size or counts of any other kind
        return None
    # Too few runs make pycocotools' comparison of masks fail
    if not runs or min(runs) < 0 or sum(runs) != height * width or not any(runs[1::2]):
        return None
    if runs is counts or 0 in runs[1:]:
        plain = {"size": [height, width], "counts": _joined(runs)}
        return mask_util.frPyObjects(plain, height, width)
    return segmentation


def _joined(runs: Sequence[int]) -> list[int]:
    """Runs of zeros and ones in turn, without runs of length 0 except the first."""
    joined = [0]
    for number, run in enumerate(runs):
        if run and number % 2 != (len(joined) - 1) % 2:
            joined.append(0)
        joined[-1] += run
    return joined


def runs_of(counts: str | bytes) -> list[int]:
    """COCO's compressed runs: five bits a character, from the third run on as the difference from
    the run before the last."""
    runs: list[int] = []
    value, shift = 0, 0
    for digit in counts.encode() if isinstance(counts, str) else counts:
        digit -= 48
        value |= (digit & 31) << shift
        shift += 5
        if not digit & 32:
            if digit & 16:
                value -= 1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value, shift = 0, 0
    return runs


def _is_whole(counts: str | bytes) -> bool:
    """Whether compressed runs end where their text does.

    A character is 48 plus six bits, and the highest bit says that another one follows. pycocotools
    trusts it, reads past the end, and writes beyond its memory.
    """
    text = counts.encode() if isinstance(counts, str) else counts
    digits = np.frombuffer(text, np.uint8) - np.uint8(48)  # characters below 48 wrap to above 63
    return bool((digits < 64).all()) and not (len(digits) and digits[-1] & 32)


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


def area_of(points: Any) -> float:
    """The area of a polygon [x0, y0, x1, y1, ...]; lobes may cancel where it crosses itself."""
    x, y = list(points[::2]), list(points[1::2])
    return abs(sum(map(mul, x, y[1:] + y[:1])) - sum(map(mul, y, x[1:] + x[:1]))) / 2


def _has_area(points: Any) -> bool:
    return area_of(points) > 5e-7 * max(max(points[::2]) - min(points[::2]), 1) ** 2


def without_crossings(points: np.ndarray) -> list[np.ndarray]:
    """Split a polygon [points, 2] that crosses or touches itself into polygons that do not.

    fvcore's crop would keep only one lobe of it. One in five polygons around panoptic masks crosses
    itself, and one in fifty would lose more than a tenth of its area. Splitting takes milliseconds.
    """
    outline = shapely.Polygon(points)
    if outline.is_valid:
        return [points]
    return _outlines(shapely.make_valid(outline))


def _outlines(shape: shapely.Geometry) -> list[np.ndarray]:
    shapes = shapely.get_parts(shapely.get_parts(shape))
    return [
        shapely.get_coordinates(one.exterior)[:-1]
        for one in shapes
        if isinstance(one, shapely.Polygon) and not one.is_empty
    ]


# ------------------------------------------------------------------------------------ the keypoints
def are_keypoints(points: Any, number: int | None) -> bool:
    """Whether points are [x, y, visibility, ...]: finite, and as many as ``number`` says."""
    try:
        values = np.asarray(points)
    except (TypeError, ValueError, OverflowError):
        return False
    if values.dtype.kind not in "iuf":
        return False
    if values.ndim != 1 or values.size % 3 or number not in (None, values.size // 3):
        return False
    return bool(values.size and (np.abs(values) < FAR).all())
