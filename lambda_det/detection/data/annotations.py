"""Checks of a COCO-format annotation file and its images."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import numpy as np
from detectron2.utils.file_io import PathManager
from tqdm import tqdm

from lambda_det.detection.data.coco_format import read_keypoint_names, read_lists
from lambda_det.detection.data.records import image_fault
from lambda_det.detection.data.report import BAD_BOX, NOTED, REFUSED, SIZES, Problem, Report
from lambda_det.detection.data.truth import FAR, MAX_PIXELS, is_area, is_polygon, usable_runs
from lambda_det.errors import DataError

# Boxes of COCO train2017 itself reach out of their image by a rounding error.
OUTSIDE_TOLERANCE = 1.0  # pixels

_SAMPLED_FILES = 32
_FEW_FILES = 1000  # opened within some seconds


def check_coco(
    json_file: str | os.PathLike,
    image_root: str | os.PathLike,
    *,
    files: Literal["all", "few", "sample", "none"] = "all",
    progress: bool = False,
) -> Report:
    """Check an annotation file in COCO's format and its images.

    Args:
        json_file: the annotations.
        image_root: the folder of the images.
        files: "all" opens every image and compares its size; "sample" checks that the first, the
            last and some images between them exist; "few" is "all" for up to 1,000 images and
            "sample" for more; "none" looks at no image.
        progress: show how many images have been opened.

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
    report = deepcopy(inspect_annotations(json_file, (status.st_mtime_ns, status.st_size)))
    report.image_root = image_root
    if files == "all" or (files == "few" and report.images <= _FEW_FILES):
        _check_images(report, progress)
    elif files != "none":
        _check_existence(report)
    return report


# ------------------------------------------------------------------------------------- the rules


class Rule(NamedTuple):
    """What may be wrong with an entry of a list of the file.

    Attributes:
        kind: the finding, in words. Of those with one key only the first is reported.
        severity: of ``report.py``.
        key: of the entry that it is about.
        finds: whether it is so, of an annotation, its image (None if it is not listed) and the
            categories; of an image or a file alone.
    """

    kind: str
    severity: str
    key: str
    finds: Callable[..., Any]


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, (int, float)) for v in values)


def _beyond(box: list[float], image: dict[str, Any] | None) -> float:
    """By how many pixels a box reaches out of its image."""
    if image is None:
        return 0
    x, y, width, height = map(float, box)
    return max(x + width - image["width"], y + height - image["height"], -x, -y)


def _does_not_fit(mask: Any, image: dict[str, Any] | None) -> bool:
    if image is None or not isinstance(mask, dict):
        return False
    return usable_runs(mask, image["height"], image["width"]) is None


# fmt: off
IMAGE_RULES = (
    Rule("image whose width or height is not above 0", REFUSED, "",
         lambda i: min(i["width"], i["height"]) <= 0),
    Rule("image of more pixels than can be read", REFUSED, "",
         lambda i: max(i["width"], 1) * max(i["height"], 1) > MAX_PIXELS),
)
ANNOTATION_RULES = (
    Rule("annotation of an image that is not listed", REFUSED, "image_id",
         lambda a, i, c: i is None),
    Rule("annotation of a category that is not listed", REFUSED, "category_id",
         lambda a, i, c: a["category_id"] not in c),
    Rule("bbox that is not a list of four numbers", REFUSED, "bbox",
         lambda a, i, c: not _numbers(a.get("bbox")) or len(a["bbox"]) != 4),
    # JSON has integers of any length, which are no floats
    Rule("box with NaN or infinite numbers", BAD_BOX, "bbox",
         lambda a, i, c: not all(abs(v) <= sys.float_info.max for v in a["bbox"])),
    Rule("box of zero or negative size", BAD_BOX, "bbox",
         lambda a, i, c: min(a["bbox"][2:]) <= 0),
    Rule("box outside its image", BAD_BOX, "bbox",
         lambda a, i, c: _beyond(a["bbox"], i) > OUTSIDE_TOLERANCE),
    Rule("annotation without segmentation", NOTED, "segmentation",
         lambda a, i, c: not a.get("segmentation")),
    Rule("run-length mask that does not fit its image", REFUSED, "segmentation",
         lambda a, i, c: _does_not_fit(a["segmentation"], i)),
    Rule("segmentation that is neither a list of polygons nor a run-length mask", REFUSED,
         "segmentation", lambda a, i, c: not isinstance(a["segmentation"], dict) and not (
             isinstance(a["segmentation"], list)
             and all(isinstance(p, list) for p in a["segmentation"]))),
    Rule("polygon of fewer than three points, an odd count or no numbers", BAD_BOX, "segmentation",
         lambda a, i, c: isinstance(a["segmentation"], list)
         and not all(map(is_polygon, a["segmentation"]))),
    Rule("keypoints that are not a list of finite numbers", REFUSED, "keypoints",
         lambda a, i, c: not _numbers(a.get("keypoints", []))
         or not all(-FAR < v < FAR for v in a.get("keypoints", []))),
    Rule("iscrowd that is neither 0 nor 1", REFUSED, "iscrowd",
         lambda a, i, c: a.get("iscrowd", 0) not in (0, 1)),
    Rule("annotation without iscrowd", NOTED, "iscrowd", lambda a, i, c: "iscrowd" not in a),
    Rule("ignore flag, which Detectron2 does not know", REFUSED, "ignore",
         lambda a, i, c: a.get("ignore", 0) != 0),
    Rule("annotation without area", NOTED, "area", lambda a, i, c: a.get("area") is None),
    Rule("area that is negative or not a finite number", NOTED, "area",
         lambda a, i, c: not is_area(a["area"])),
)
# fmt: on
_SHOWN = {"category_id", "bbox", "iscrowd", "area"}  # keys whose values are short
OF_MASKS = {rule.kind for rule in ANNOTATION_RULES if rule.key == "segmentation"}
_UNUSABLE_BOX = {rule.kind for rule in ANNOTATION_RULES if rule.key == "bbox"} - {
    "box outside its image"
}


@functools.lru_cache(maxsize=4)
def inspect_annotations(json_file: str, version: Any = None) -> Report:
    """Check the annotations without the images.

    Args:
        json_file: the annotations.
        version: of the file, such as its time and size; the last few reports are kept.

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
    if isinstance(about, dict):
        for finding in about.get("findings", []):  # of the reader of labels of another format
            problem = Problem(finding["severity"], finding["count"], finding["first"])
            report.problems[finding["text"]] = problem
    lists = {"image": images, "annotation": annotations, "category": categories}
    for name, entries in lists.items():
        for number, count in Counter(entry["id"] for entry in entries).items():
            if count > 1:
                report.add(f"{name} id used twice", REFUSED, f"id {number}")
    by_id = {image["id"]: image for image in images}
    with_objects = {
        _inspect_annotation(report, annotation, by_id.get(annotation["image_id"]))
        for annotation in annotations
    }
    annotated = {annotation["image_id"] for annotation in annotations}
    for image in images:
        report.empty += image["id"] not in with_objects
        where = f"{image['file_name']}, {_size(image)}"
        for rule in IMAGE_RULES:
            if rule.finds(image):
                report.add(rule.kind, rule.severity, where)
        if image["id"] not in annotated:
            report.add("image without annotations", NOTED, where)
    return report


def _inspect_annotation(
    report: Report, annotation: dict[str, Any], image: dict[str, Any] | None
) -> int | None:
    """Count an annotation and add what is wrong with it; returns the image of an object."""
    faults: dict[str, str] = {}  # kinds by key
    for rule in ANNOTATION_RULES:
        if rule.key not in faults and rule.finds(annotation, image, report.categories):
            faults[rule.key] = rule.kind
            where = f"annotation {annotation['id']} of image {annotation['image_id']}"
            where = annotation.get("source") or where
            size = f" ({_size(image)})" if image else ""
            value = f", {rule.key} {annotation.get(rule.key)!r}" if rule.key in _SHOWN else ""
            report.add(rule.kind, rule.severity, f"{where}{size}{value}")
    has_box = faults.get("bbox") not in _UNUSABLE_BOX
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


def _size(image: dict[str, Any]) -> str:
    return f"{image['width']}x{image['height']}"


# ------------------------------------------------------------------------------------ the images


def _check_existence(report: Report) -> None:
    places = np.linspace(0, report.images - 1, _SAMPLED_FILES).round().astype(int)
    for index in np.unique(places):
        path = os.path.join(report.image_root, report.files[index]["file_name"])
        if not PathManager.isfile(path):
            report.add("image file missing", REFUSED, path)


def _check_images(report: Report, progress: bool) -> None:
    def find(file: dict[str, Any]) -> tuple[str, str] | None:
        path = os.path.join(report.image_root, file["file_name"])
        if not PathManager.isfile(path):
            return "image file missing", path
        fault = image_fault({**file, "file_name": path})
        return ("image file unreadable or of another size", fault) if fault else None

    # Pillow decodes without Python's lock, so threads are enough.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found_in = pool.map(find, report.files)
        for found in tqdm(found_in, "images opened", report.images, disable=not progress):
            if found:
                report.add(found[0], REFUSED, found[1])
