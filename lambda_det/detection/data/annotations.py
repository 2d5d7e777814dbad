"""What is wrong with a COCO-format annotation file and its images."""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any, Literal

import numpy as np
from detectron2.utils.file_io import PathManager

from lambda_det.detection.data.records import FAR, MAX_PIXELS, image_fault, is_polygon, usable_runs
from lambda_det.detection.data.report import KINDS, Report
from lambda_det.errors import DataError


def check_coco(
    json_file: str | os.PathLike,
    image_root: str | os.PathLike,
    *,
    files: Literal["all", "sample", "none"] = "all",
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Look over an annotation file in COCO's format and its images.

    Args:
        json_file: the annotations.
        image_root: the folder of the images.
        files: "all" opens every image and compares its size; "sample" only sees whether the
            first, the last and some others between exist; "none" looks at no image.
        progress: called with (images done, images) while they are opened.

    Returns:
        Counts and findings. The annotations are read again only after the file has changed.

    Raises:
        DataError: the file or folder is missing, not JSON, or not COCO's format at all.
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
        check_existence(report)
    elif files == "all":
        check_images(report, progress)
    return report


@functools.lru_cache(maxsize=4)
def _kept_report(json_file: str, mtime_ns: int, size: int) -> Report:
    """The report on the annotations alone; the file's time and size only tell versions apart."""
    return inspect_annotations(json_file)


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


_SAMPLED_FILES = 32


def check_existence(report: Report) -> None:
    places = np.linspace(0, report.images - 1, _SAMPLED_FILES).round().astype(int)
    for index in np.unique(places):
        path = os.path.join(report.image_root, report.files[index]["file_name"])
        if not PathManager.isfile(path):
            report.add("image file missing", [path], 1)


def check_images(report: Report, progress: Callable[[int, int], None] | None) -> None:
    def fault(file: dict[str, Any]) -> tuple[str, str] | None:
        path = os.path.join(report.image_root, file["file_name"])
        if not PathManager.isfile(path):
            return "image file missing", path
        sentence = image_fault({**file, "file_name": path})
        return sentence and ("image file unreadable or of another size", sentence)

    # Pillow decodes outside Python's lock, so threads are enough.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, found in enumerate(pool.map(fault, report.files), start=1):
            if found:
                report.add(found[0], [found[1]], 1)
            if progress:
                progress(done, report.images)


def read_json(json_file: str) -> dict[str, Any]:
    try:
        with PathManager.open(json_file, "r", encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise DataError(
            f"The annotation file {json_file} cannot be read ({error.strerror})."
        ) from error
    except (ValueError, RecursionError) as error:  # ValueError also of text that is not UTF-8
        raise DataError(
            f"The annotation file {json_file} is not JSON ({error}); make or fetch it again."
        ) from error
    if not isinstance(content, dict):
        raise DataError(
            f"{json_file} is not in COCO format: it holds a {type(content).__name__} where an "
            "object with images, annotations and categories is expected."
        )
    return content


def read_entries(
    json_file: str, content: dict[str, Any], name: str, keys: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The list ``content[name]``, of which each entry has all ``keys``."""
    entries = content.get(name)
    if not isinstance(entries, list):
        found = f"is a {type(entries).__name__}" if name in content else "is missing"
        raise DataError(f"{json_file} is not in COCO format: the list {name!r} {found}.")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DataError(
                f"{json_file} is not in COCO format: entry {index} of {name!r} is a "
                f"{type(entry).__name__}, not an object."
            )
        for key in keys:
            if key not in entry:
                raise DataError(
                    f"{json_file} is not in COCO format: entry {index} of {name!r} has no {key!r}."
                )
    return entries


def read_numbers(json_file: str, entries: list[dict[str, Any]], name: str, key: str) -> np.ndarray:
    """The whole numbers under ``key``, int64 [entries]."""
    values = [entry[key] for entry in entries]
    for index, value in enumerate(values):
        if type(value) is not int or abs(value) >= 2**63:
            raise DataError(
                f"{json_file} is not in COCO format: the {key} of entry {index} of {name!r} is "
                f"{value!r:.80}, not a whole number."
            )
    return np.array(values, dtype=np.int64)


def read_keypoint_names(json_file: str, category: dict[str, Any]) -> list[str]:
    """The names of the keypoints of a category; none where it has none."""
    names = category.get("keypoints") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{json_file}: the keypoints of category {category['name']!r:.80} are not a list of "
            "names; correct or remove them."
        )
    return names
