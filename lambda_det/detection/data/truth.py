"""The decision about one annotation: its box, its mask and its keypoints.

:func:`decide` is the only place that repairs or drops an annotation. :mod:`.coco` asks it for files
in COCO's format, and :func:`decided` for the records that another function registers. Mapper,
evaluators, statistics and ``lambda-det check`` use the result.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import mul
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import shapely
from detectron2.structures import BoxMode
from detectron2.utils.logger import log_first_n
from PIL import Image

from lambda_det.detection.data.report import BORDER, BOX, MASK, MEANT, OUTSIDE, VALUE, Kind, Report

FAR = 1e6  # pixels: no image is as large, and pycocotools runs out of memory at larger coordinates
# pixels of an image: Pillow reads none with more
MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 2**30)
# Boxes of COCO train2017 itself reach over the border by a rounding error, and stay as they are
ROUNDING = 1.0  # pixels
# how far a person may draw over the border: pixels, and a share of a side
_FEW_PIXELS, _FEW_SHARE = 5.0, 0.02
_LONGEST = 80  # letters of a value in a message

Fault = tuple[Kind, str]


class Decided(list):
    """Annotations that :func:`decide` has checked and repaired."""


def decide(
    annotation: dict[str, Any], height: int | None, width: int | None, keypoints: int | None
) -> tuple[dict[str, Any] | None, list[Fault]]:
    """Decide about an annotation: return it as it is used, and its faults.

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
    result, faults = dict(annotation), []
    if result.get("iscrowd", 0) not in (0, 1):
        faults.append((VALUE, f"iscrowd {result['iscrowd']!r:.80}"))
        result["iscrowd"] = 0
    _take_mask(result, height, width, faults)
    if not _take_box(result, height, width, faults):
        # nothing replaces the mask of an object that is left out
        return None, [fault for fault in faults if fault[0] != MASK]
    points = result.get("keypoints")
    if points is not None and not are_keypoints(points, keypoints):
        if not isinstance(points, (list, tuple)) or points:
            faults.append((VALUE, f"keypoints {_beginning(points)}"))
        del result["keypoints"]
    return result, faults


def decided(record: dict[str, Any], keypoints: int | None = None) -> tuple[dict, list[Fault]]:
    """Decide about a record of Detectron2's dataset format: return the new record, and the faults.

    Args:
        record: it is not changed.
        keypoints: how many an object has; None: any number.
    """
    given = record.get("annotations")
    if not given or isinstance(given, Decided):
        return record, []
    size = [record.get(key) for key in ("height", "width")]
    if None in size:
        size = None, None
    kept, faults = Decided(), []
    for annotation in given:
        annotation, its_faults = decide(annotation, *size, keypoints)
        faults += its_faults
        if annotation is not None:
            kept.append(annotation)
    return {**record, "annotations": kept}, faults


def all_decided(
    records: Iterable[Mapping[str, Any]], name: str, keypoints: int | None
) -> list[dict[str, Any]]:
    """:func:`decided` of all records of a data set, with a warning for each kind of fault.

    Args:
        records: in Detectron2's dataset format; they are not changed.
        name: of the data set, for the warnings. A process gives each warning once.
        keypoints: how many an object has; None: any number.
    """
    result, report = [], Report(name)
    for record in records:
        record, faults = decided(record, keypoints)
        result.append(record)
        for kind, words in faults:
            report.add(kind, f"{record.get('file_name', '')}: {words}")
    for kind, finding in report.findings.items():
        text = f"{name}: {finding.count} x {kind.text}; the first in {finding.first[0]}."
        log_first_n(logging.WARNING, text, key="message", name=__name__)
    return result


def _beginning(value: Any) -> str:
    """A value for a message, up to a blank where it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rsplit(' ', 1)[0]} ..."


# ---------------------------------------------------------------------------------------- the boxes
def _take_box(
    annotation: dict[str, Any], height: int | None, width: int | None, faults: list[Fault]
) -> bool:
    """Cut the box at the border, or take that of the mask; whether there is a usable one."""
    box, mask = annotation.get("bbox"), annotation.get("segmentation")

    def fault(kind: Kind, words: str = "") -> None:
        faults.append((kind, f"bbox {box!r:.120}{words}"))

    if not has_box(annotation):
        # a box that contradicts itself is not replaced
        if mask and not (isinstance(box, (list, tuple)) and box):
            annotation.update(_sides(*around(mask)))
            if has_box(annotation):
                fault(MEANT, ": the box of its mask is taken")
                return True
        fault(BOX)
        return False
    if height is None or annotation["bbox_mode"] not in (BoxMode.XYWH_ABS, BoxMode.XYXY_ABS):
        return True
    x0, y0, x1, y1 = corners(annotation)
    if max(x0, y0, x1 - x0, y1 - y0) <= 1 and max(height, width) > 2:
        fault(BOX, " is within one pixel, as a share of 1 would be")
        return False
    if mask and not _holds((x0, y0, x1, y1), mask):
        outline = ", ".join(f"{v:g}" for v in around(mask))
        fault(BOX, f" is not where its mask is, within the corners {outline}")
        return False
    beyond = max(x1 - width, y1 - height, -x0, -y0)
    if beyond <= ROUNDING:
        return True
    annotation.update(_sides(max(x0, 0), max(y0, 0), min(x1, width), min(y1, height)))
    if not has_box(annotation):
        fault(BOX, " is outside of the image")
        return False
    is_near = beyond <= max(_FEW_PIXELS, _FEW_SHARE * max(height, width))
    fault(BORDER if is_near else OUTSIDE, f" is {beyond:g} pixels over the border")
    return True


def _sides(x0: float, y0: float, x1: float, y1: float) -> dict[str, Any]:
    """A box of these corners in Detectron2's dataset format."""
    return {"bbox": [float(v) for v in (x0, y0, x1 - x0, y1 - y0)], "bbox_mode": BoxMode.XYWH_ABS}


def _holds(box: Sequence[float], mask: list[list[float]] | dict[str, Any]) -> bool:
    """Whether half of a mask is in its box: pixels of runs, areas of the boxes around polygons."""
    if isinstance(mask, dict):
        x0, y0, x1, y1 = around(mask)
        if min(x0 - box[0], y0 - box[1], box[2] - x1, box[3] - y1) >= 0:
            return True
        pixels = mask_util.decode(mask)
        inside = pixels[pixels_of(np.clip(box, 0, pixels.shape[::-1] * 2))]
        return bool(2 * np.count_nonzero(inside) >= np.count_nonzero(pixels))
    inside, total = 0.0, 0.0
    for polygon in mask:
        x0, y0, x1, y1 = around([polygon])
        total += (x1 - x0) * (y1 - y0)
        width, height = min(box[2], x1) - max(box[0], x0), min(box[3], y1) - max(box[1], y0)
        inside += max(width, 0) * max(height, 0)
    return 2 * inside >= total


def pixels_of(box: Sequence[float]) -> tuple[slice, slice]:
    """The rows and columns of all pixels that a box x0, y0, x1, y1 touches."""
    x0, y0 = np.floor(box[:2]).astype(int)
    x1, y1 = np.ceil(box[2:]).astype(int)
    return slice(y0, y1), slice(x0, x1)


def around(mask: list[list[float]] | dict[str, Any]) -> tuple[float, float, float, float]:
    """The corners x0, y0, x1, y1 around a usable mask of COCO's format."""
    if isinstance(mask, dict):
        x, y, width, height = mask_util.toBbox(mask).tolist()
        return x, y, x + width, y + height
    xs, ys = [polygon[0::2] for polygon in mask], [polygon[1::2] for polygon in mask]
    return min(map(min, xs)), min(map(min, ys)), max(map(max, xs)), max(map(max, ys))


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
    except Exception:  # a value of any other kind
        return False


def rectangle(x0: float, y0: float, x1: float, y1: float) -> list[float]:
    """A box as a polygon."""
    return [x0, y0, x1, y0, x1, y1, x0, y1]


def turned_rectangle(box: Sequence[float], degrees: float) -> list[float]:
    """A box x0, y0, x1, y1 as a polygon that is turned clockwise about the middle of the box."""
    angle = math.radians(degrees)
    turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    corners = np.reshape(rectangle(*box), (-1, 2))  # some may be no numbers, which shapely refuses
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


def _take_mask(
    annotation: dict[str, Any], height: int | None, width: int | None, faults: list[Fault]
) -> None:
    """Keep the usable part of the mask, if there is any."""
    given = annotation.get("segmentation")
    if given is None or (height is None and not isinstance(given, dict)):
        return
    mask = _as_polygons(given)
    if mask is not given:
        faults.append(
            (MEANT, f"segmentation {_beginning(given)}: a list of lists of numbers is meant")
        )
    usable = usable_mask(mask, height, width)
    if usable is None:
        del annotation["segmentation"]
    else:
        annotation["segmentation"] = usable
    is_empty = isinstance(mask, (list, dict)) and not any(mask)
    is_sound = usable is not None and (isinstance(mask, dict) or all(map(is_polygon, mask)))
    if not (is_empty or is_sound):
        faults.append((MASK, f"segmentation {_beginning(mask)}"))


def _as_polygons(mask: Any) -> Any:
    """Polygons in COCO's form, of one polygon as a list of numbers, as VIA has it, or of points."""
    if not isinstance(mask, list) or not mask:
        return mask
    if isinstance(mask[0], (int, float)) or _is_point(mask[0]):
        mask = [mask]
    if all(isinstance(one, list) and one and all(map(_is_point, one)) for one in mask):
        return [list(itertools.chain(*points)) for points in mask]
    return mask


def _is_point(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(type(one) in (int, float) for one in value)


def usable_mask(
    segmentation: Any, height: int | None, width: int | None
) -> list[list[float]] | dict[str, Any] | None:
    """The usable part of a mask in COCO's format, or None.

    Broken polygons are left out. A polygon that reaches beyond its image by more than the image's
    size is cut at the border, because pycocotools keeps every pixel of an outline in memory. A
    polygon whose signed area is 0 is split where it crosses itself, or left out.

    Args:
        segmentation: polygons [[x0, y0, x1, y1, ...], ...], or a run-length mask.
        height, width: of the image; None for runs of any size.
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
            pieces = _outlines(shapely.intersection(whole, shapely.box(0, 0, width, height)))
        # less is 0 but for the rounding of the corners
        elif area_of(points) > 5e-7 * max(max(points[::2]) - min(points[::2]), 1) ** 2:
            usable.append(points)
            continue
        else:
            pieces = without_crossings(np.reshape(points, (-1, 2)))
        usable += [polygon.reshape(-1).tolist() for polygon in pieces]
    return usable or None


def usable_runs(
    segmentation: dict[str, Any], height: int | None, width: int | None
) -> dict[str, Any] | None:
    """A run-length mask in COCO's compressed form; None if it is empty or not of that size.

    No pixel is decoded, since an image may have many millions of them.
    """
    try:
        counts = runs = segmentation["counts"]
        size = list(segmentation["size"])
        if height is None:
            height, width = map(int, size)
        if size != [height, width] or height * width > MAX_PIXELS:
            return None
        if not isinstance(counts, list):
            runs = runs_of(counts)
        # Too few runs make pycocotools' comparison of masks fail
        is_sound = all(type(run) is int and run >= 0 for run in runs) and any(runs[1::2])
        if not is_sound or sum(runs) != height * width:
            return None
    except Exception:  # a size or counts of any other kind
        return None
    if runs is not counts and 0 not in runs[1:]:
        return segmentation
    joined = [0]  # without runs of length 0 except the first
    for number, run in enumerate(runs):
        if run and number % 2 != (len(joined) - 1) % 2:
            joined.append(0)
        joined[-1] += run
    return mask_util.frPyObjects({"size": [height, width], "counts": joined}, height, width)


def runs_of(counts: str | bytes) -> list[int]:
    """COCO's compressed runs: five bits a character, from the third run on as the difference from
    the run before the last.

    Raises:
        Exception: of any kind, if a run does not end where the text does, or it is no such text.
    """
    # A character is 48 plus six bits, and the highest bit says that another one follows.
    # pycocotools trusts it, reads past the end, and writes beyond its memory
    text = counts.encode() if isinstance(counts, str) else counts
    digits = np.frombuffer(text, np.uint8) - np.uint8(48)  # characters below 48 wrap to above 63
    if (digits >= 64).any() or (digits[-1:] & 32).any():
        raise ValueError(f"no compressed runs: {counts!r:.80}")
    runs: list[int] = []
    value, shift = 0, 0
    for digit in digits.tolist():
        value |= (digit & 31) << shift
        shift += 5
        if not digit & 32:
            if digit & 16:
                value -= 1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value, shift = 0, 0
    return runs


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
    if values.dtype.kind not in "iuf" or values.ndim != 1 or not values.size or values.size % 3:
        return False
    return number in (None, values.size // 3) and bool((np.abs(values) < FAR).all())
