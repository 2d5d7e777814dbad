"""Checks of a COCO-format annotation file and its images."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import numpy as np
from detectron2.utils.file_io import PathManager

from lambda_det.detection.data.coco_format import (
    read_entries,
    read_json,
    read_keypoint_names,
    read_numbers,
)
from lambda_det.detection.data.records import FAR, MAX_PIXELS, image_fault, is_polygon, usable_runs
from lambda_det.detection.data.report import BAD_BOX, NOTED, REFUSED, Report
from lambda_det.errors import DataError

# Boxes of COCO train2017 itself reach out of their image by a rounding error.
OUTSIDE_TOLERANCE = 1.0  # pixels

_SMALL, _MEDIUM = 32**2, 96**2  # COCO's limits of area, in pixels
_SAMPLED_FILES = 32


def check_coco(
    json_file: str | os.PathLike,
    image_root: str | os.PathLike,
    *,
    files: Literal["all", "sample", "none"] = "all",
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check an annotation file in COCO's format and its images.

    Args:
        json_file: the annotations.
        image_root: the folder of the images.
        files: "all" opens every image and compares its size; "sample" checks that the first, the
            last and some images between them exist; "none" looks at no image.
        progress: called with (images done, images) while they are opened.

    Returns:
        Counts and findings. The report on the annotations is kept in memory until the file changes.

    Raises:
        DataError: the file or folder is missing, or the file is not JSON or not in COCO format.
    """
    json_file, image_root = os.fspath(json_file), os.fspath(image_root)
    if not PathManager.isfile(json_file):
        raise DataError(f"The annotation file {json_file} does not exist; correct the path.")
    if files != "none" and not PathManager.isdir(image_root):
        raise DataError(f"The image folder {image_root} does not exist; correct the path.")
    status = os.stat(PathManager.get_local_path(json_file))
    report = deepcopy(_kept_report(json_file, status.st_mtime_ns, status.st_size))
    report.image_root = image_root
    if files == "sample":
        _check_existence(report)
    elif files == "all":
        _check_images(report, progress)
    return report


@functools.lru_cache(maxsize=4)
def _kept_report(json_file: str, mtime_ns: int, size: int) -> Report:
    """The report on the annotations. Time and size tell versions of the file apart."""
    return inspect_annotations(json_file)


# ------------------------------------------------------------------------------------- the rules


class Rule(NamedTuple):
    """One kind of finding among the entries of an annotation file.

    Attributes:
        kind: the name of the finding in reports.
        severity: ``REFUSED``, ``BAD_BOX`` or ``NOTED``.
        wrong: which entries break the rule, bool [entries].
        describe: the entry at an index, for the report.
    """

    kind: str
    severity: str
    wrong: Callable[[_Content], Sequence[bool] | np.ndarray]
    describe: Callable[[_Content, int], str]


class _Content:
    """The lists of an annotation file, and their numbers as arrays.

    Raises:
        DataError: the file cannot be read, is not JSON, or is not in COCO format.
    """

    def __init__(self, json_file: str) -> None:
        content = read_json(json_file)
        read = functools.partial(read_entries, json_file, content)
        self.images = read("images", ("id", "file_name", "width", "height"))
        self.annotations = read("annotations", ("id", "image_id", "category_id"))
        self.categories = read("categories", ("id", "name"))
        self._check_texts(json_file)

        numbers = functools.partial(read_numbers, json_file)
        self.image_ids = numbers(self.images, "images", "id")
        self.widths = numbers(self.images, "images", "width")
        self.heights = numbers(self.images, "images", "height")
        self.annotation_ids = numbers(self.annotations, "annotations", "id")
        self.image_of = numbers(self.annotations, "annotations", "image_id")
        self.category_of = numbers(self.annotations, "annotations", "category_id")
        self.category_ids = numbers(self.categories, "categories", "id")

        self.has_image = np.isin(self.image_of, self.image_ids)
        # The place of each annotation's image in the list. An annotation without an image gets any
        # place: it is refused by a rule of its own.
        order = np.argsort(self.image_ids)
        places = np.searchsorted(self.image_ids, self.image_of, sorter=order)
        self.place = order[places.clip(max=len(order) - 1)]
        self.boxes, self.has_box = _boxes(self.annotations)
        self.is_finite = np.isfinite(self.boxes).all(axis=1)
        self.is_flat = self.is_finite & (self.boxes[:, 2:] <= 0).any(axis=1)
        self.mask_faults = [
            _mask_fault(annotation, int(self.heights[place]), int(self.widths[place]))
            for annotation, place in zip(self.annotations, self.place, strict=True)
        ]

    def _check_texts(self, json_file: str) -> None:
        for name, entries in (("images", self.images), ("categories", self.categories)):
            if not entries:
                raise DataError(f"{json_file}: the list {name!r} is empty; add at least one entry.")
        for entry in self.images:
            if not isinstance(entry["file_name"], str):
                raise DataError(
                    f"{json_file}: the file_name of image {entry['id']!r:.80} is "
                    f"{entry['file_name']!r:.80}; it must be a text."
                )
        for entry in self.categories:
            if not _is_text(entry["name"]):
                raise DataError(
                    f"{json_file}: the name of category {entry['id']!r:.80} is "
                    f"{entry['name']!r:.80}; it must be a text."
                )
            read_keypoint_names(json_file, entry)

    def is_outside(self) -> np.ndarray:
        """The boxes that reach out of their image, bool [annotations]."""
        x, y, width, height = self.boxes.T
        with np.errstate(invalid="ignore", over="ignore"):
            beyond = np.maximum(
                x + width - self.widths[self.place], y + height - self.heights[self.place]
            )
            outside = (np.minimum(x, y) < -OUTSIDE_TOLERANCE) | (beyond > OUTSIDE_TOLERANCE)
        return self.is_finite & ~self.is_flat & self.has_image & outside


def _repeated(ids: np.ndarray) -> np.ndarray:
    """The first of several equal ids, bool [ids]."""
    _, first, counts = np.unique(ids, return_index=True, return_counts=True)
    result = np.zeros(len(ids), dtype=bool)
    result[first[counts > 1]] = True
    return result


def _of_annotations(condition: Callable[[dict[str, Any]], bool]) -> Callable[[_Content], list]:
    return lambda content: [condition(annotation) for annotation in content.annotations]


def _mask_rule(kind: str, severity: str) -> Rule:
    """The rule of a kind that :func:`_mask_fault` finds."""
    return Rule(
        kind, severity, lambda c: [fault == kind for fault in c.mask_faults], _name_annotation
    )


def _name_image(content: _Content, index: int) -> str:
    size = f"{content.widths[index]}x{content.heights[index]}"
    return f"{content.images[index]['file_name']}, {size}"


def _name_annotation(content: _Content, index: int) -> str:
    annotation = content.annotations[index]
    return f"annotation {annotation['id']} of image {annotation['image_id']}"


def _name_value(key: str) -> Callable[[_Content, int], str]:
    return lambda c, i: f"{_name_annotation(c, i)}, {key} {c.annotations[i].get(key)!r}"


def _name_box(content: _Content, index: int) -> str:
    place = content.place[index]
    size = f"{content.widths[place]}x{content.heights[place]}"
    return f"{_name_annotation(content, index)} ({size}), bbox {content.boxes[index].tolist()}"


_NO_MASK = "annotation without segmentation"
_BROKEN_RUNS = "run-length mask that does not fit its image"
_NOT_A_MASK = "segmentation that is neither a list of polygons nor a run-length mask"
_BROKEN_POLYGON = "polygon of fewer than three points, an odd count or no numbers"

# In the order of the report
RULES = (
    Rule(
        "image id used twice",
        REFUSED,
        lambda c: _repeated(c.image_ids),
        lambda c, i: f"id {c.image_ids[i]}",
    ),
    Rule(
        "annotation id used twice",
        REFUSED,
        lambda c: _repeated(c.annotation_ids),
        lambda c, i: f"id {c.annotation_ids[i]}",
    ),
    Rule(
        "category id used twice",
        REFUSED,
        lambda c: _repeated(c.category_ids),
        lambda c, i: f"id {c.category_ids[i]}",
    ),
    Rule(
        "image whose width or height is not above 0",
        REFUSED,
        lambda c: (c.widths <= 0) | (c.heights <= 0),
        _name_image,
    ),
    Rule(
        "image of more pixels than can be read",
        REFUSED,
        # As floats: the product of two integers of 64 bits may not be one.
        lambda c: np.maximum(c.widths, 1.0) * np.maximum(c.heights, 1.0) > MAX_PIXELS,
        _name_image,
    ),
    Rule(
        "annotation of an image that is not listed",
        REFUSED,
        lambda c: ~c.has_image,
        _name_annotation,
    ),
    Rule(
        "annotation of a category that is not listed",
        REFUSED,
        lambda c: ~np.isin(c.category_of, c.category_ids),
        _name_value("category_id"),
    ),
    Rule(
        "bbox that is not a list of four numbers",
        REFUSED,
        lambda c: ~c.has_box,
        _name_value("bbox"),
    ),
    _mask_rule(_NOT_A_MASK, REFUSED),
    _mask_rule(_BROKEN_RUNS, REFUSED),
    Rule(
        "keypoints that are not a list of finite numbers",
        REFUSED,
        _of_annotations(lambda a: not _are_coordinates(a.get("keypoints", []))),
        _name_annotation,
    ),
    Rule(
        "iscrowd that is neither 0 nor 1",
        REFUSED,
        _of_annotations(lambda a: a.get("iscrowd", 0) not in (0, 1)),
        _name_value("iscrowd"),
    ),
    Rule(
        "ignore flag, which Detectron2 does not know",
        REFUSED,
        _of_annotations(lambda a: a.get("ignore", 0) != 0),
        _name_annotation,
    ),
    Rule(
        "box with NaN or infinite numbers",
        BAD_BOX,
        lambda c: c.has_box & ~c.is_finite,
        _name_box,
    ),
    Rule("box of zero or negative size", BAD_BOX, lambda c: c.is_flat, _name_box),
    Rule("box outside its image", BAD_BOX, _Content.is_outside, _name_box),
    _mask_rule(_BROKEN_POLYGON, BAD_BOX),
    _mask_rule(_NO_MASK, NOTED),
    Rule(
        "annotation without area",
        NOTED,
        _of_annotations(lambda a: a.get("area") is None),
        _name_annotation,
    ),
    Rule(
        "area that is negative or not a finite number",
        NOTED,
        _of_annotations(lambda a: a.get("area") is not None and not is_area(a["area"])),
        _name_value("area"),
    ),
    Rule(
        "annotation without iscrowd",
        NOTED,
        _of_annotations(lambda a: a.get("iscrowd") is None),
        _name_annotation,
    ),
    Rule(
        "image without annotations",
        NOTED,
        lambda c: ~np.isin(c.image_ids, c.image_of),
        lambda c, i: c.images[i]["file_name"],
    ),
)


def inspect_annotations(json_file: str) -> Report:
    """Check the annotations without the images.

    Raises:
        DataError: the file cannot be read, is not JSON, or is not in COCO format.
    """
    content = _Content(json_file)
    is_crowd = np.array([a.get("iscrowd", 0) == 1 for a in content.annotations], dtype=bool)
    areas = np.array([_area(a, b) for a, b in zip(content.annotations, content.boxes, strict=True)])
    names = {c["id"]: c["name"] for c in sorted(content.categories, key=lambda c: c["id"])}
    counts = Counter(content.category_of.tolist())
    report = Report(
        json_file=json_file,
        image_root="",
        images=len(content.images),
        annotations=len(content.annotations),
        crowds=int(is_crowd.sum()),
        empty=int((~np.isin(content.image_ids, content.image_of[~is_crowd])).sum()),
        usable=int((content.is_finite & ~content.is_flat & ~is_crowd).sum()),
        categories=names,
        per_category={name: counts[number] for number, name in names.items()},
        sizes={
            "small": int((areas < _SMALL).sum()),
            "medium": int(((areas >= _SMALL) & (areas < _MEDIUM)).sum()),
            "large": int((areas >= _MEDIUM).sum()),
        },
        problems={},
        files=[{k: i[k] for k in ("file_name", "width", "height")} for i in content.images],
    )
    for rule in RULES:
        where = np.flatnonzero(rule.wrong(content))
        offenders = (rule.describe(content, int(index)) for index in where)
        report.add(rule.kind, rule.severity, offenders, len(where))
    return report


def is_area(value: Any) -> bool:
    """Whether a value can be the area of an object, in pixels."""
    return isinstance(value, (int, float)) and 0 <= value < FAR**2


def _area(annotation: dict[str, Any], box: np.ndarray) -> float:
    area = annotation.get("area")
    return area if is_area(area) else box[2] * box[3]


def _boxes(annotations: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """The boxes, float64 [annotations, 4], and which of them are four numbers, bool [annotations].

    A box that is not four numbers is NaN.
    """
    boxes = [annotation.get("bbox") for annotation in annotations]
    formed = [
        isinstance(box, list) and len(box) == 4 and all(isinstance(v, (int, float)) for v in box)
        for box in boxes
    ]
    filled = [_floats(box) if ok else [np.nan] * 4 for box, ok in zip(boxes, formed, strict=True)]
    return np.array(filled, dtype=np.float64).reshape(-1, 4), np.array(formed, dtype=bool)


def _floats(numbers: list[int | float]) -> list[float]:
    try:
        return [float(number) for number in numbers]
    except OverflowError:  # JSON has integers of any length
        return [math.inf] * len(numbers)


def _are_coordinates(values: Any) -> bool:
    """Whether a value is a list of numbers that can be coordinates in an image."""
    return isinstance(values, list) and all(
        isinstance(v, (int, float)) and -FAR < v < FAR for v in values
    )


def _is_text(value: Any) -> bool:
    """Whether a value is a string that can be encoded: JSON can hold single surrogates."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _mask_fault(annotation: dict[str, Any], height: int, width: int) -> str | None:
    """The kind of finding about the mask of an annotation, or None."""
    segmentation = annotation.get("segmentation")
    if not segmentation:
        return _NO_MASK
    if isinstance(segmentation, dict):
        return _BROKEN_RUNS if usable_runs(segmentation, height, width) is None else None
    if not isinstance(segmentation, list) or not all(isinstance(p, list) for p in segmentation):
        return _NOT_A_MASK
    return None if all(map(is_polygon, segmentation)) else _BROKEN_POLYGON


# ------------------------------------------------------------------------------------ the images

_MISSING_FILE = "image file missing"
_BROKEN_FILE = "image file unreadable or of another size"

# Every kind of finding, with its severity
KINDS = {
    **{rule.kind: rule.severity for rule in RULES},
    _MISSING_FILE: REFUSED,
    _BROKEN_FILE: REFUSED,
}


def _check_existence(report: Report) -> None:
    places = np.linspace(0, report.images - 1, _SAMPLED_FILES).round().astype(int)
    for index in np.unique(places):
        path = os.path.join(report.image_root, report.files[index]["file_name"])
        if not PathManager.isfile(path):
            report.add(_MISSING_FILE, REFUSED, [path], 1)


def _check_images(report: Report, progress: Callable[[int, int], None] | None) -> None:
    def find(file: dict[str, Any]) -> tuple[str, str] | None:
        path = os.path.join(report.image_root, file["file_name"])
        if not PathManager.isfile(path):
            return _MISSING_FILE, path
        fault = image_fault({**file, "file_name": path})
        return (_BROKEN_FILE, fault) if fault else None

    # Pillow decodes without Python's lock, so threads are enough.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, found in enumerate(pool.map(find, report.files), start=1):
            if found:
                report.add(found[0], REFUSED, [found[1]], 1)
            if progress:
                progress(done, report.images)
