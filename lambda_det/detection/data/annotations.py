"""Checks of a COCO-format annotation file and its images."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any, Literal

import numpy as np
from detectron2.utils.file_io import PathManager

from lambda_det.detection.data.coco_format import read_keypoint_names, read_lists
from lambda_det.detection.data.records import image_fault
from lambda_det.detection.data.report import SIZES, Report
from lambda_det.detection.data.truth import FAR, MAX_PIXELS, is_area, is_polygon, usable_runs
from lambda_det.errors import DataError

# Boxes of COCO train2017 itself reach out of their image by a rounding error.
OUTSIDE_TOLERANCE = 1.0  # pixels

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


def _image_faults(image: dict[str, Any]) -> Iterator[str]:
    width, height = image["width"], image["height"]
    if min(width, height) <= 0:
        yield "image whose width or height is not above 0"
    if max(width, 1) * max(height, 1) > MAX_PIXELS:
        yield "image of more pixels than can be read"


def _annotation_faults(
    annotation: dict[str, Any], image: dict[str, Any] | None, categories: dict[int, str]
) -> Iterator[tuple[str, str]]:
    """The kinds of what is wrong with an annotation, and the key whose value shows each, or ""."""
    if image is None:
        yield "annotation of an image that is not listed", ""
    if annotation["category_id"] not in categories:
        yield "annotation of a category that is not listed", "category_id"
    if fault := _box_fault(annotation.get("bbox"), image):
        yield fault, "bbox"
    if image is not None and (fault := _mask_fault(annotation.get("segmentation"), image)):
        yield fault, ""
    if not _are_coordinates(annotation.get("keypoints", [])):
        yield "keypoints that are not a list of finite numbers", ""
    if annotation.get("iscrowd", 0) not in (0, 1):
        yield "iscrowd that is neither 0 nor 1", "iscrowd"
    if annotation.get("ignore", 0) != 0:
        yield "ignore flag, which Detectron2 does not know", ""
    if annotation.get("area") is None:
        yield "annotation without area", ""
    elif not is_area(annotation["area"]):
        yield "area that is negative or not a finite number", "area"
    if annotation.get("iscrowd") is None:
        yield "annotation without iscrowd", ""


def _box_fault(box: Any, image: dict[str, Any] | None) -> str | None:
    if not _is_box(box):
        return "bbox that is not a list of four numbers"
    # JSON has integers of any length, which are no floats
    if not all(abs(value) <= sys.float_info.max for value in box):
        return "box with NaN or infinite numbers"
    x, y, width, height = map(float, box)
    if min(width, height) <= 0:
        return "box of zero or negative size"
    if image is None:
        return None
    beyond = max(x + width - image["width"], y + height - image["height"], -x, -y)
    return "box outside its image" if beyond > OUTSIDE_TOLERANCE else None


def _is_box(box: Any) -> bool:
    return isinstance(box, list) and len(box) == 4 and all(isinstance(v, (int, float)) for v in box)


def _are_coordinates(values: Any) -> bool:
    """Whether a value is a list of numbers that can be coordinates in an image."""
    return isinstance(values, list) and all(
        isinstance(v, (int, float)) and -FAR < v < FAR for v in values
    )


def _mask_fault(segmentation: Any, image: dict[str, Any]) -> str | None:
    if not segmentation:
        return "annotation without segmentation"
    if isinstance(segmentation, dict):
        fits = usable_runs(segmentation, image["height"], image["width"]) is not None
        return None if fits else "run-length mask that does not fit its image"
    if not isinstance(segmentation, list) or not all(isinstance(p, list) for p in segmentation):
        return "segmentation that is neither a list of polygons nor a run-length mask"
    if all(map(is_polygon, segmentation)):
        return None
    return "polygon of fewer than three points, an odd count or no numbers"


def inspect_annotations(json_file: str) -> Report:
    """Check the annotations without the images.

    Raises:
        DataError: the file cannot be read, is not JSON, or is not in COCO format.
    """
    content = read_lists(json_file)
    for name in ("images", "categories"):
        if not content[name]:
            raise DataError(f"{json_file}: the list {name!r} is empty; add at least one entry.")
    for category in content["categories"]:
        if any("\ud800" <= letter <= "\udfff" for letter in category["name"]):
            raise DataError(
                f"{json_file}: the name {category['name']!r:.80} of a category has half of a "
                "character, which no other file can hold; correct it."
            )
        read_keypoint_names(json_file, category)
    images, annotations = content["images"], content["annotations"]
    categories = sorted(content["categories"], key=lambda category: category["id"])
    names = {category["id"]: category["name"] for category in categories}
    counts = Counter(annotation["category_id"] for annotation in annotations)
    about = content.get("info")
    labels = about.get("labels") if isinstance(about, dict) else None
    report = Report(
        json_file=str(labels or json_file),  # what the file was converted from
        images=len(images),
        annotations=len(annotations),
        categories=names,
        per_category={name: counts[number] for number, name in names.items()},
        files=[{k: i[k] for k in ("file_name", "width", "height")} for i in images],
    )
    lists = {"image": images, "annotation": annotations, "category": categories}
    for name, entries in lists.items():
        for number, count in Counter(entry["id"] for entry in entries).items():
            if count > 1:
                report.add(f"{name} id used twice", f"id {number}")
    by_id = {image["id"]: image for image in images}
    with_objects = {
        _inspect_annotation(report, annotation, by_id.get(annotation["image_id"]))
        for annotation in annotations
    }
    annotated = {annotation["image_id"] for annotation in annotations}
    for image in images:
        report.empty += image["id"] not in with_objects
        faults = list(_image_faults(image))
        if image["id"] not in annotated:
            faults.append("image without annotations")
        for kind in faults:
            report.add(kind, f"{image['file_name']}, {_size(image)}")
    return report


def _inspect_annotation(
    report: Report, annotation: dict[str, Any], image: dict[str, Any] | None
) -> int | None:
    """Count an annotation and add what is wrong with it; returns the image of an object."""
    faults = dict(_annotation_faults(annotation, image, report.categories))
    for kind, key in faults.items():
        where = f"annotation {annotation['id']} of image {annotation['image_id']}"
        where = annotation.get("source") or where
        size = f" ({_size(image)})" if image else ""
        value = f", {key} {annotation.get(key)!r}" if key else ""
        report.add(kind, f"{where}{size}{value}")
    has_box = _UNUSABLE_BOX.isdisjoint(faults)
    area = annotation.get("area")
    if not is_area(area):
        area = annotation["bbox"][2] * annotation["bbox"][3] if has_box else None
    if area is not None:
        report.sizes[next(size for size, limit in SIZES.items() if area < limit)] += 1
    if annotation.get("iscrowd", 0) == 1:
        report.crowds += 1
        return None
    report.usable += has_box
    return annotation["image_id"]


_UNUSABLE_BOX = {
    "bbox that is not a list of four numbers",
    "box with NaN or infinite numbers",
    "box of zero or negative size",
}


def _size(image: dict[str, Any]) -> str:
    return f"{image['width']}x{image['height']}"


# ------------------------------------------------------------------------------------ the images


def _check_existence(report: Report) -> None:
    places = np.linspace(0, report.images - 1, _SAMPLED_FILES).round().astype(int)
    for index in np.unique(places):
        path = os.path.join(report.image_root, report.files[index]["file_name"])
        if not PathManager.isfile(path):
            report.add("image file missing", path)


def _check_images(report: Report, progress: Callable[[int, int], None] | None) -> None:
    def find(file: dict[str, Any]) -> tuple[str, str] | None:
        path = os.path.join(report.image_root, file["file_name"])
        if not PathManager.isfile(path):
            return "image file missing", path
        fault = image_fault({**file, "file_name": path})
        return ("image file unreadable or of another size", fault) if fault else None

    # Pillow decodes without Python's lock, so threads are enough.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, found in enumerate(pool.map(find, report.files), start=1):
            if found:
                report.add(*found)
            if progress:
                progress(done, report.images)
