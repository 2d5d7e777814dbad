"""What is wrong with the boxes, masks, ids and sizes of a COCO-format file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from lambda_det.detection.data.checks.coco_format import (
    read_entries,
    read_json,
    read_keypoint_names,
    read_numbers,
)
from lambda_det.detection.data.checks.report import KINDS, Report
from lambda_det.detection.data.masks import FAR, MAX_PIXELS, is_polygon, usable_runs
from lambda_det.errors import DataError

# Boxes of COCO train2017 itself stick out of their image by a rounding error.
OUTSIDE_TOLERANCE = 1.0  # pixels

_SMALL, _MEDIUM = 32**2, 96**2  # COCO's limits of area, in pixels


def inspect_annotations(json_file: str) -> Report:
    """Look over the annotations alone, not the images.

    Raises:
        DataError: the file cannot be read, is not JSON, or not COCO's format at all.
    """
    content = read_json(json_file)
    images = read_entries(json_file, content, "images", ("id", "file_name", "width", "height"))
    annotations = read_entries(json_file, content, "annotations", ("id", "image_id", "category_id"))
    categories = read_entries(json_file, content, "categories", ("id", "name"))
    for name, entries in (("images", images), ("categories", categories)):
        if not entries:
            raise DataError(f"{json_file}: the list {name!r} is empty; add at least one entry.")
    for entry in images:
        if not isinstance(entry["file_name"], str):
            raise DataError(
                f"{json_file}: the file_name of image {entry['id']!r:.80} is "
                f"{entry['file_name']!r:.80}; it must be a text."
            )
    for entry in categories:
        if not _is_text(entry["name"]):
            raise DataError(
                f"{json_file}: the name of category {entry['id']!r:.80} is {entry['name']!r:.80}; "
                "it must be a text."
            )
        read_keypoint_names(json_file, entry)
    image_ids = read_numbers(json_file, images, "images", "id")
    category_ids = read_numbers(json_file, categories, "categories", "id")
    ids = read_numbers(json_file, annotations, "annotations", "id")
    image_of = read_numbers(json_file, annotations, "annotations", "image_id")
    category_of = read_numbers(json_file, annotations, "annotations", "category_id")
    widths = read_numbers(json_file, images, "images", "width")
    heights = read_numbers(json_file, images, "images", "height")

    names = {c["id"]: c["name"] for c in sorted(categories, key=lambda c: c["id"])}
    by_id = Counter(category_of.tolist())
    report = Report(
        json_file=json_file,
        image_root="",
        images=len(images),
        annotations=len(annotations),
        crowds=sum(1 for a in annotations if a.get("iscrowd", 0) == 1),
        usable=0,
        categories=names,
        per_category={name: by_id[i] for i, name in names.items()},
        sizes={},
        problems={},
        files=[{k: i[k] for k in ("file_name", "width", "height")} for i in images],
    )

    def record(kind: str, wrong: np.ndarray, describe: Callable[[int], str]) -> None:
        where = np.flatnonzero(wrong)
        report.add(kind, (describe(int(i)) for i in where), len(where))

    def annotation(index: int) -> str:
        entry = annotations[index]
        return f"annotation {entry['id']} of image {entry['image_id']}"

    for kind, values in (
        ("image id used twice", image_ids),
        ("annotation id used twice", ids),
        ("category id used twice", category_ids),
    ):
        unique, counts = np.unique(values, return_counts=True)
        record(kind, counts > 1, lambda i, unique=unique: f"id {unique[i]}")
    record(
        "image whose width or height is not above 0",
        (widths <= 0) | (heights <= 0),
        lambda i: f"{images[i]['file_name']}, {widths[i]}x{heights[i]}",
    )
    record(
        "image of more pixels than can be read",
        np.maximum(widths, 1.0) * np.maximum(heights, 1.0) > MAX_PIXELS,
        lambda i: f"{images[i]['file_name']}, {widths[i]}x{heights[i]}",
    )
    record(
        "keypoints that are not a list of finite numbers",
        np.array([not _are_numbers(a.get("keypoints", [])) for a in annotations], dtype=bool),
        annotation,
    )
    known_image = np.isin(image_of, image_ids)
    record("annotation of an image that is not listed", ~known_image, annotation)
    record(
        "annotation of a category that is not listed",
        ~np.isin(category_of, category_ids),
        lambda i: f"{annotation(i)}, category {category_of[i]}",
    )
    record(
        "iscrowd that is neither 0 nor 1",
        np.array([a.get("iscrowd", 0) not in (0, 1) for a in annotations], dtype=bool),
        lambda i: f"{annotation(i)}, iscrowd {annotations[i]['iscrowd']!r}",
    )
    record(
        "ignore flag, which Detectron2 does not know",
        np.array([a.get("ignore", 0) != 0 for a in annotations], dtype=bool),
        annotation,
    )
    for key in ("area", "iscrowd"):
        missing = np.array([a.get(key) is None for a in annotations], dtype=bool)
        record(f"annotation without {key}", missing, annotation)
    record(
        "area that is negative or not a finite number",
        np.array(
            [a.get("area") is not None and not is_area(a["area"]) for a in annotations], dtype=bool
        ),
        lambda i: f"{annotation(i)}, area {annotations[i]['area']!r}",
    )
    record(
        "image without annotations",
        ~np.isin(image_ids, image_of),
        lambda i: images[i]["file_name"],
    )

    boxes, formed = _boxes(annotations)
    record(
        "bbox that is not a list of four numbers",
        ~formed,
        lambda i: f"{annotation(i)}, bbox {annotations[i].get('bbox')!r}",
    )
    # Row of each annotation's image; any row where the image is not listed, as that is refused.
    order = np.argsort(image_ids)
    row = order[np.searchsorted(image_ids, image_of, sorter=order).clip(max=len(order) - 1)]
    x, y, w, h = boxes.T
    finite = np.isfinite(boxes).all(axis=1)
    flat = finite & ((w <= 0) | (h <= 0))
    with np.errstate(invalid="ignore", over="ignore"):
        outside = (np.minimum(x, y) < -OUTSIDE_TOLERANCE) | (
            np.maximum(x + w - widths[row], y + h - heights[row]) > OUTSIDE_TOLERANCE
        )
    for kind, wrong in (
        ("box with NaN or infinite numbers", formed & ~finite),
        ("box of zero or negative size", flat),
        ("box outside its image", finite & ~flat & known_image & outside),
    ):
        record(
            kind,
            wrong,
            lambda i: (
                f"{annotation(i)} ({widths[row[i]]}x{heights[row[i]]}), bbox {boxes[i].tolist()}"
            ),
        )
    _inspect_masks(report, annotations, annotation, widths[row], heights[row])

    crowd = np.array([a.get("iscrowd", 0) == 1 for a in annotations], dtype=bool)
    report.usable = int((formed & finite & ~flat & ~crowd).sum())
    areas = np.array([_area(a, box) for a, box in zip(annotations, boxes, strict=True)])
    report.sizes = {
        "small": int((areas < _SMALL).sum()),
        "medium": int(((areas >= _SMALL) & (areas < _MEDIUM)).sum()),
        "large": int((areas >= _MEDIUM).sum()),
    }
    report.problems = {k: report.problems[k] for k in KINDS if k in report.problems}
    return report


def _boxes(annotations: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """The boxes, float64 [annotations, 4], and which of them are well formed, bool [annotations].

    A box that is not well formed is NaN.
    """
    boxes = [a.get("bbox") for a in annotations]
    formed = np.array(
        [
            isinstance(box, list)
            and len(box) == 4
            and all(isinstance(v, (int, float)) for v in box)
            for box in boxes
        ],
        dtype=bool,
    )
    filled = [_floats(box) if ok else [np.nan] * 4 for box, ok in zip(boxes, formed, strict=True)]
    return np.array(filled, dtype=np.float64).reshape(-1, 4), formed


def _floats(numbers: list[int | float]) -> list[float]:
    try:
        return [float(number) for number in numbers]
    except OverflowError:  # JSON has whole numbers of any length
        return [math.inf] * len(numbers)


def _are_numbers(values: Any) -> bool:
    """Whether it is a list of numbers as an image may have them."""
    return isinstance(values, list) and all(
        isinstance(v, (int, float)) and -FAR < v < FAR for v in values
    )


def _is_text(value: Any) -> bool:
    """Whether it is a text that can be written: JSON can hold halves of letters (surrogates)."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def is_area(value: Any) -> bool:
    """Whether it can be the area of an object, in pixels."""
    return isinstance(value, (int, float)) and 0 <= value < FAR**2


def _inspect_masks(
    report: Report,
    annotations: list[dict[str, Any]],
    describe: Callable[[int], str],
    widths: np.ndarray,
    heights: np.ndarray,
) -> None:
    for index, entry in enumerate(annotations):
        segmentation = entry.get("segmentation")
        if not segmentation:
            kind = "annotation without segmentation"
        elif isinstance(segmentation, dict):
            if usable_runs(segmentation, int(heights[index]), int(widths[index])) is not None:
                continue
            kind = "run-length mask that does not fit its image"
        elif not isinstance(segmentation, list) or not all(
            isinstance(polygon, list) for polygon in segmentation
        ):
            kind = "segmentation that is neither a list of polygons nor a run-length mask"
        elif not all(map(is_polygon, segmentation)):
            kind = "polygon of fewer than three points, an odd count or no numbers"
        else:
            continue
        report.add(kind, [describe(index)], 1)


def _area(entry: dict[str, Any], box: np.ndarray) -> float:
    area = entry.get("area")
    return area if is_area(area) else box[2] * box[3]
