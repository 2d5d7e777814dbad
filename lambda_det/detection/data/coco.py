"""Ground truth in COCO's format. Everything about it is decided once, by :func:`read_coco`.

The loader, the evaluators, ``lambda-det check``, the recipe and the page of a run use its records
and its report; :mod:`.ground_truth` keeps both for them, and label readers of other formats make
its input. What is decided about one annotation stands in :mod:`.truth`. This file has the decisions
for which the whole file is needed: ids, boxes in another form, objects that are marked as crowds,
images that are listed twice, names of images.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from detectron2.structures import BoxMode
from detectron2.utils.file_io import PathManager
from PIL import Image
from pycocotools.coco import COCO

from lambda_det.detection.data import report as kinds
from lambda_det.detection.data.box_form import SIDES, Form, form_of_boxes, is_box
from lambda_det.detection.data.coco_format import (
    COCO_DETECTIONS,
    made_by_reader,
    read_keypoint_names,
    read_lists,
    whole,
)
from lambda_det.detection.data.image_folder import ImageFolder, normal
from lambda_det.detection.data.records import upright_size
from lambda_det.detection.data.report import SIZES, Finding, Kind, Report
from lambda_det.detection.data.truth import (
    FAR,
    MAX_PIXELS,
    Decided,
    are_keypoints,
    around,
    corners,
    decide,
    is_area,
    mask_of,
    turned_rectangle,
    without_holes,
)
from lambda_det.errors import DataError, listed

__all__ = ["GroundTruth", "coco_api", "coco_content", "read_coco"]

_MOST_CROWDS = 0.2  # share of all annotations; COCO has one in a hundred
_MANY_CROWDS = 0.1
# how far the area of a mask may exceed the area of its box, which is rounded otherwise: a factor,
# and square pixels
_MOST_AREA, _ROUNDED_AREA = 1.5, 16


class GroundTruth(NamedTuple):
    """What :func:`read_coco` gives: Detectron2's dataset dicts, and the report on them."""

    records: list[dict[str, Any]]
    report: Report


def read_coco(
    json_file: str | os.PathLike,
    image_root: str | os.PathLike = "",
    *,
    keypoints: int | None = None,
) -> GroundTruth:
    """Read an annotation file in COCO's format, and decide which of it is used.

    Args:
        json_file: the annotations.
        image_root: the folder of the images, which are found below it by the ends of their names;
            "" or a missing folder: names are not looked up.
        keypoints: how many an object has; None: as many as the first category names.

    Returns:
        The records, in the order of the image ids: Detectron2's dataset dicts, whose annotations
        have an "id" (from 1) and an "area" besides. And the report with all findings, also those
        for which :meth:`Report.refusal` gives a reason: records must not be used then.

    Raises:
        DataError: the file is missing, is not JSON or not in COCO's format.
    """
    file = _File(os.fspath(json_file), os.fspath(image_root), keypoints)
    # what its lists say
    _take_categories(file)
    _take_images(file)
    _check_ids(file)
    # What only all of them together show. The form of boxes follows from the numbers as they are
    # written, so it comes first. The share of crowds would count merged annotations twice
    _take_boxes(file)
    _merge_images(file)
    _crowds_as_objects(file)
    _check_names(file)
    # one annotation after the other, as that says how to read it
    _make_records(file)
    _count(file)
    return GroundTruth(file.records, file.report)


class _File:
    """An annotation file, of which :func:`read_coco` makes records step by step.

    Attributes:
        name: its path.
        lists: of the file.
        report: on the file; every step adds what it finds.
        annotations: the entries; each step drops or repairs some.
        written: how the labels from which the file was made write boxes, of ``BOX_FORMS``;
            None for a file of COCO's own.
        keypoints: how many an object has; None where no category names any.
        images: the entries by id, each with its "path" and its size.
        form: of all boxes.
        records: Detectron2's dataset dicts.
    """

    def __init__(self, json_file: str, image_root: str, keypoints: int | None) -> None:
        self.name = json_file
        self.lists = lists = read_lists(json_file)
        for name in ("images", "categories"):
            if not lists[name]:
                raise DataError(f"{json_file}: the list {name!r} is empty; add at least one entry.")
        self.annotations: list[dict[str, Any]] = lists["annotations"]
        made = made_by_reader(lists)
        self.written: str | None = made["boxes"] if made else None
        source = made["labels"] if made else json_file
        self.report = Report(source, image_root, annotations=len(self.annotations))
        if made:
            self.report.findings |= _of_the_reader(made["findings"])
        else:
            for annotation in self.annotations:
                annotation.pop("source", None)  # which means something else there
        self.keypoints = keypoints
        self.images: dict[int, dict[str, Any]] = {}
        self.form = SIDES
        self.records: list[dict[str, Any]] = []

    def add(self, kind: Kind, annotation: Mapping[str, Any], words: str, count: int = 1) -> None:
        """Report on an annotation, or on several of which this one is the first."""
        self.report.add(kind, f"{self.where(annotation)}: {words}", count)

    def where(self, annotation: Mapping[str, Any]) -> str:
        """The place of an annotation in words; for converted labels the place in those."""
        if annotation.get("source"):
            return str(annotation["source"])
        image = self.images.get(annotation["image_id"])
        where = f"annotation {annotation.get('id')} of image {annotation['image_id']}"
        return f"{where} ({_named(image)})" if image else where


def _of_the_reader(findings: Iterable[Mapping[str, Any]]) -> dict[Kind, Finding]:
    """The findings of the reader of labels in another format, which wrote the file."""
    result = {}
    for finding in findings:
        kind = Kind(finding["severity"], finding["text"])
        result[kind] = Finding(finding["count"], finding["first"])
    return result


def _named(image: Mapping[str, Any]) -> str:
    return f"{image['file_name']}, {image['width']}x{image['height']}"


# ------------------------------------------------------------------------------ the lists of a file
def _take_categories(file: _File) -> None:
    """Take the names of categories and keypoints, and count the annotations of each category."""
    report, entries = file.report, file.lists["categories"]
    for entry in sorted(entries, key=lambda entry: entry["id"]):
        number, name = entry["id"], entry["name"]
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise DataError(
                f"{file.name}: the name {name!r:.80} of a category has half of a character, which "
                "no other file can hold; correct it."
            )
        names = read_keypoint_names(file.name, entry)
        report.keypoints = report.keypoints or list(names)
        first = report.categories.setdefault(number, name)
        if first != name:
            report.add(kinds.ID, f"category id {number} is of {first!r} and of {name!r}")
    if file.keypoints is None:
        file.keypoints = len(report.keypoints) or None
    counts = Counter(annotation["category_id"] for annotation in file.annotations)
    root = _unused_root(entries, counts)
    if root is not None and len(report.categories) > 1:
        name = report.categories.pop(root)
        report.add(kinds.ROOT, f"{name} (category {root})")
    report.counts = {number: counts[number] for number in report.categories}


def _unused_root(entries: Sequence[Mapping[str, Any]], counts: Counter) -> int | None:
    """The id of a category without objects that all others name as their parent.

    Roboflow writes the project's name in this way, as category 0.
    """
    for entry in entries:
        others = [other for other in entries if other["id"] != entry["id"]]
        above = entry.get("supercategory")
        if (
            not counts[entry["id"]]
            and (above in (None, "", "none", "None", entry["name"]))
            and others
            and all(other.get("supercategory") == entry["name"] for other in others)
        ):
            return entry["id"]
    return None


def _take_images(file: _File) -> None:
    """Find the images, and take the size of an image itself where the file has none."""
    report, entries = file.report, file.lists["images"]
    paths = _paths_of([entry["file_name"] for entry in entries], report)
    for entry in entries:
        number, name = entry["id"], entry["file_name"]
        image = {**entry, "path": paths[name]}
        earlier = file.images.get(number)
        if earlier is None:
            file.images[number] = image
            _take_size(image, report)
        elif earlier["path"] != image["path"]:
            words = f"image id {number} is of {earlier['file_name']!r} and of {name!r}"
            report.add(kinds.ID, words)


def _take_size(image: dict[str, Any], report: Report) -> None:
    width, height = (whole(image.get(key)) for key in ("width", "height"))
    if not (width and height and min(width, height) > 0):
        name = image["file_name"]
        try:
            with PathManager.open(image["path"], "rb") as file:
                width, height = upright_size(Image.open(file))
        except Exception:  # Pillow may raise anything; or there is no file
            said = f"{image.get('width')}x{image.get('height')}"
            report.add(kinds.IMAGE, f"{name}, {said}: no size, and no image that has one")
            width, height = 1, 1
        else:
            report.add(kinds.MEANT, f"{name} has no size in the file: its own is taken")
            image["own_size"] = True
    image.update(width=width, height=height)
    if width * height > MAX_PIXELS:
        report.add(kinds.IMAGE, f"{_named(image)}: more pixels than can be read")


def _check_ids(file: _File) -> None:
    """Report annotations of images or categories that are not listed."""
    for annotation in file.annotations:
        for key, ids in (("image_id", file.images), ("category_id", file.report.categories)):
            if annotation[key] not in ids:
                file.add(kinds.ID, annotation, f"{key} {annotation[key]}")


def _paths_of(names: Iterable[str], report: Report) -> dict[str, str]:
    """The paths of images by their names in the file.

    The folder is searched for names that do not exist as they are written. An image that one name
    fits exactly is not found for another name. An image that is not found keeps the path of its
    name; loading or check will report it.
    """
    root = report.image_root
    paths = {name: os.path.join(root, name) for name in names}
    if not os.path.isdir(root):
        return paths
    here = set(os.listdir(root))
    missing = [name for name in paths if not (name in here or _is_file(paths[name]))]
    if not missing:
        return paths
    folder = ImageFolder(root)
    claims = {os.path.normpath(paths[name]): name for name in paths.keys() - set(missing)}
    matches = {name: folder.named(name) for name in missing}

    def claims_late(name: str) -> bool:
        """In the folder cam2, cam1/0.png must not claim the image of cam2/0.png."""
        return not any(_is_in_folder(name, str(path)) for path in matches[name][1])

    for name in sorted(missing, key=claims_late):
        end, images = matches[name]
        if len(images) > 1:
            places = listed(sorted(map(str, images)))
            report.add(kinds.IMAGE, f"{name}: {end} is in several folders, {places}")
        elif images:
            path = str(images.pop())
            other = claims.setdefault(os.path.normpath(path), name)
            if normal(other) == normal(name) or _is_in_folder(name, path):
                paths[name] = path
            else:
                report.add(kinds.IMAGE, f"{name} is not there, and {path} is {other}")
    return paths


def _is_in_folder(name: str, path: str) -> bool:
    """Whether a name leads to an image from the parent of its folder, as images/0.png does."""
    parents = os.path.abspath(path).split(os.sep)
    names = [folder for folder in name.replace("\\", "/").split("/") if folder != "."]
    return len(names) > 1 and [*map(normal, names)] == [*map(normal, parents[-len(names) :])]


def _is_file(path: str) -> bool:
    try:
        return os.path.isfile(path)
    except ValueError:  # a name that no file can have
        return False


# ------------------------------------------------------------------- what only the whole file shows
def _take_boxes(file: _File) -> None:
    """Find the form of all boxes, and turn boxes of CVAT that have an angle.

    CVAT writes a turned box as it was before it was turned, and its angle as an attribute. An
    attribute of that name in a file of another program may mean anything.
    """
    file.form, fault = form_of_boxes(file.annotations, file.images, file.written)
    if fault is not None:
        kind, words, case = fault
        file.add(kind, case, words, len(file.annotations))
        return
    for place, annotation in enumerate(file.annotations):
        box, degrees = annotation.get("bbox"), _degrees(annotation)
        if not degrees or annotation.get("segmentation") or not is_box(box):
            continue
        x, y, width, height = box
        outline = turned_rectangle((x, y, x + width, y + height), degrees)
        x0, y0, x1, y1 = around([outline])
        file.annotations[place] = {
            **annotation,
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "segmentation": [outline],
        }
        words = f"bbox {box} is turned by its rotation of {degrees:g} degrees"
        file.add(kinds.MEANT, annotation, words)


def _degrees(annotation: Mapping[str, Any]) -> float:
    """The angle that CVAT wrote beside a box; 0 where it is none."""
    degrees = annotation["attributes"].get("rotation") if _by_cvat(annotation) else None
    is_number = isinstance(degrees, (int, float)) and not isinstance(degrees, bool)
    return degrees if is_number and abs(degrees) < FAR else 0


def _merge_images(file: _File) -> None:
    """Merge one image under several ids, because each copy lacks the objects of the others."""
    report = file.report
    first: dict[str, int] = {}
    other: dict[int, int] = {}
    for number, image in file.images.items():
        path = normal(os.path.normpath(image["path"]))
        if first.setdefault(path, number) != number:
            other[number] = first[path]
            kept = file.images[first[path]]
            words = f"{image['file_name']} has the ids {first[path]} and {number}: they are merged"
            report.add(kinds.MEANT, words)
            if (kept["width"], kept["height"]) != (image["width"], image["height"]):
                words = f"{_named(kept)}, and {image['width']}x{image['height']} as id {number}"
                report.add(kinds.IMAGE, words)
    if not other:
        return
    merged = set(other.values())
    seen: set[str] = set()
    annotations = []
    for annotation in file.annotations:
        number = annotation["image_id"]
        annotation = {**annotation, "image_id": other.get(number, number)}
        if annotation["image_id"] in merged:
            keys = ("image_id", "category_id", "bbox", "segmentation", "iscrowd")
            what = repr([annotation.get(key) for key in keys])
            if what in seen:
                continue
            seen.add(what)
        annotations.append(annotation)
    for number in other:
        del file.images[number]
    file.annotations = annotations
    counts = Counter(annotation["category_id"] for annotation in annotations)
    report.annotations = len(annotations)
    report.counts = {number: counts[number] for number in report.categories}


def _crowds_as_objects(file: _File) -> None:
    """Turn crowds into objects where a tool marks every run-length mask as a crowd.

    CVAT does so, and also writes "attributes"; other tools are recognised by the number of crowds.
    """
    crowds = [a for a in file.annotations if a.get("iscrowd") == 1]
    if not crowds:
        return
    runs = [a for a in file.annotations if isinstance(a.get("segmentation"), dict)]
    all_are = len(runs) == len(crowds) and all(a.get("iscrowd") == 1 for a in runs)
    many = len(crowds) > _MOST_CROWDS * len(file.annotations)
    objects = [
        a
        for a in crowds
        if isinstance(a.get("segmentation"), dict)
        and ((all_are and many) or _by_cvat(a))
        and not _said_to_be_crowd(a)
    ]
    for annotation in objects:
        annotation["iscrowd"] = 0
        file.add(kinds.MEANT, annotation, "a run-length mask with iscrowd 1 is an object")
    left = len(crowds) - len(objects)
    if left > max(2, _MANY_CROWDS * len(file.annotations)):
        case = next(a for a in crowds if a.get("iscrowd") == 1)
        words = f"{left} of {len(file.annotations)}, the first: {file.where(case)}"
        file.report.add(kinds.CROWD, words, left)


def _by_cvat(annotation: Mapping[str, Any]) -> bool:
    attributes = annotation.get("attributes")
    return isinstance(attributes, dict) and "occluded" in attributes


def _said_to_be_crowd(annotation: Mapping[str, Any]) -> bool:
    attributes = annotation.get("attributes")
    return isinstance(attributes, dict) and bool(attributes.get("is_crowd"))


def _check_names(file: _File) -> None:
    """Report classes that are the same, or that differ only in spelling."""
    categories = file.report.categories
    groups: dict[str, list[int]] = defaultdict(list)
    for number, name in categories.items():
        groups[_without_spelling(name)].append(number)
    for numbers in groups.values():
        if len(numbers) > 1:
            names = [f"{number}: {categories[number]!r}" for number in numbers]
            file.report.add(kinds.CLASS, f"categories {listed(names, 5)}")


def _without_spelling(name: str) -> str:
    """A name without capital letters, blanks, hyphens, and invisible characters."""
    name = unicodedata.normalize("NFKC", name)
    seen = "".join(letter for letter in name if unicodedata.category(letter) != "Cf")
    # between digits they separate numbers: 1-0 is not 10
    return re.sub(r"(?<!\d)[\s_-]+|[\s_-]+(?!\d)", "", seen).casefold()


# ------------------------------------------------------------------------------ the objects of each
def _make_records(file: _File) -> None:
    """Make the records, with the annotations as they are used, in the order of the image ids."""
    categories = file.report.categories
    of_image: dict[int, list[dict[str, Any]]] = {number: [] for number in file.images}
    for annotation in file.annotations:
        if annotation["image_id"] in of_image and annotation["category_id"] in categories:
            of_image[annotation["image_id"]].append(annotation)
    places = {number: place for place, number in enumerate(categories)}
    ids = itertools.count(1)  # also of annotations that are left out
    for number in sorted(file.images):
        image = file.images[number]
        decided = (_decided(entry, next(ids), image, places, file) for entry in of_image[number])
        record = {"file_name": image["path"], "image_id": number}
        record |= {"height": image["height"], "width": image["width"]}
        record["annotations"] = Decided(one for one in decided if one is not None)
        file.records.append(record)


def _decided(
    entry: dict[str, Any],
    number: int,
    image: Mapping[str, Any],
    places: Mapping[int, int],
    file: _File,
) -> dict[str, Any] | None:
    """An annotation in Detectron2's format, as it is used; None where it is left out.

    Args:
        entry: of the file.
        number: the id that it gets.
        image: the entry of its image.
        places: the numbers of the classes, from 0, by the ids of the categories.
        file: whose report gets what is found.
    """
    given = _in_detectron2s_format(entry, places, image, file.form)
    if entry.get("ignore", 0) != 0:
        # like a crowd, an ignored object is neither learnt nor counted
        is_flag = entry["ignore"] in (1, True)
        given["iscrowd"] = 1 if is_flag else given.get("iscrowd", 0)
        file.add(kinds.MEANT if is_flag else kinds.VALUE, entry, f"ignore {entry['ignore']!r:.80}")
    annotation, faults = decide(given, image["height"], image["width"], file.keypoints)
    for kind, words in faults:
        # where all boxes have another form, their other faults follow from that
        follows = kind in (kinds.BORDER, kinds.BOX, kinds.OUTSIDE)
        if not (follows and kinds.FORM in file.report.findings):
            file.add(kind, entry, words)
    if annotation is None:
        return None
    annotation = {**annotation, "id": number, **_measured(annotation, entry, given, image, file)}
    return {**annotation, "source": entry["source"]} if "source" in entry else annotation


def _measured(
    annotation: Mapping[str, Any],
    entry: Mapping[str, Any],
    given: Mapping[str, Any],
    image: Mapping[str, Any],
    file: _File,
) -> dict[str, Any]:
    """The "area" of an annotation; and its "segmentation", where the area shows that it has holes.

    Args:
        annotation: after :func:`decide`.
        entry, given: before it, as in the file and in Detectron2's format.
        image, file: its own.
    """
    x0, y0, x1, y1 = corners(annotation)
    if min(x1 - x0, y1 - y0) < 1:
        file.add(kinds.TINY, entry, f"{x1 - x0:.3g} x {y1 - y0:.3g} pixels")
    area, box_area = entry.get("area"), (x1 - x0) * (y1 - y0)
    if not is_area(area) or file.form is not SIDES:
        return {"area": box_area}
    # the box as it was written, before it was cut at the border
    written = given["bbox"][2] * given["bbox"][3] if is_box(given["bbox"]) else box_area
    if not 0 < area <= _MOST_AREA * written + _ROUNDED_AREA:
        # COCO's results by size would count it among objects of another size
        words = f"area {area:g} of a box of {box_area:g} square pixels, whose area is taken"
        file.add(kinds.MEANT, entry, words)
        return {"area": box_area}
    mask = annotation.get("segmentation")
    if runs := without_holes(mask, area, image["height"], image["width"]):
        words = f"area {area:g} is without the polygons that lie in others, which are holes"
        file.add(kinds.MEANT, entry, words)
        return {"area": area, "segmentation": runs}
    return {"area": area}


def _in_detectron2s_format(
    entry: Mapping[str, Any], places: Mapping[int, int], image: Mapping[str, Any], form: Form
) -> dict[str, Any]:
    result = {"bbox": entry.get("bbox"), "bbox_mode": BoxMode.XYWH_ABS}
    result["category_id"] = places[entry["category_id"]]
    result["iscrowd"] = entry.get("iscrowd", 0)
    if form is not SIDES and is_box(result["bbox"]):
        sizes = np.array([[image["width"], image["height"]]])
        result["bbox"] = form.sides(np.array([result["bbox"]], float), sizes)[0].tolist()
    if entry.get("segmentation"):
        result["segmentation"] = entry["segmentation"]
    if points := entry.get("keypoints"):
        result["keypoints"] = points
        if are_keypoints(points, None):
            # COCO counts from the middle of a pixel, Detectron2 from its corner
            result["keypoints"] = [v if n % 3 == 2 else v + 0.5 for n, v in enumerate(points)]
    return result


def _count(file: _File) -> None:
    """Report what is left, by numbers."""
    report, records = file.report, file.records
    report.images = len(records)
    seen: Counter[int] = Counter()
    for record in records:
        image = file.images[record["image_id"]]
        report.files.append(
            {
                "file_name": image["path"],
                "name": image["file_name"],
                "width": image["width"],
                "height": image["height"],
                "own_size": image.get("own_size") is True,
            }
        )
        objects = [a for a in record["annotations"] if not a["iscrowd"]]
        report.crowds += len(record["annotations"]) - len(objects)
        report.usable += len(objects)
        report.most = max(report.most, len(objects))
        report.masks += sum("segmentation" in a for a in record["annotations"])
        seen.update(a["category_id"] for a in objects)
        for annotation in record["annotations"]:
            area = annotation["area"]
            report.sizes[next(name for name, limit in SIZES.items() if area < limit)] += 1
        if len(objects) > COCO_DETECTIONS:
            report.add(kinds.DENSE, f"{_named(image)}: {len(objects)}")
        for annotation in _repeated(objects):
            where = annotation.get("source") or f"{_named(image)}: bbox {annotation['bbox']}"
            report.add(kinds.TWICE, str(where))
        if not objects:
            report.empty += 1
            report.add(kinds.EMPTY, _named(image))
    for place, (number, name) in enumerate(report.categories.items()):
        if not seen[place]:
            report.add(kinds.UNSEEN, f"{name} (category {number})")
    if report.masks:
        for record in records:
            image = file.images[record["image_id"]]
            lacking = [a for a in record["annotations"] if "segmentation" not in a]
            if lacking:
                report.add(kinds.NO_MASK, f"{_named(image)}: {len(lacking)}", len(lacking))


def _repeated(objects: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Objects with the class, box and mask of an earlier object."""
    first: dict[tuple, dict[str, Any]] = {}
    for one in objects:
        earlier = first.setdefault((one["category_id"], *one["bbox"]), one)
        if one is not earlier and one.get("segmentation") == earlier.get("segmentation"):
            yield one


# --------------------------------------------------------------- in COCO's format again, for others
def coco_content(truth: GroundTruth) -> dict[str, Any]:
    """The content of an annotation file with everything decided, and names below the image
    folder.

    The images have the names by which they were found, and objects keep their "source".
    """
    report = truth.report
    content = _content(truth.records, report.categories)
    for image, file in zip(content["images"], report.files, strict=True):
        path = os.path.relpath(file["file_name"], report.image_root or ".")
        image["file_name"] = file["name"] if path.startswith("..") else Path(path).as_posix()
    return content


def coco_api(
    records: Sequence[Mapping[str, Any]],
    categories: Mapping[int, str],
    keypoints: Sequence[str] | None = None,
) -> COCO:
    """The ground truth of records for pycocotools.

    Args:
        records: with sizes, checked and repaired.
        categories: names by the ids that results will have, in the order of the classes.
        keypoints: names of an object's keypoints; None for no keypoints.
    """
    result = COCO()
    result.dataset = {"info": {}, **_content(records, categories)}
    sizes = {image["id"]: (image["height"], image["width"]) for image in result.dataset["images"]}
    for entry in result.dataset["annotations"]:
        box = {"bbox": entry["bbox"], "bbox_mode": BoxMode.XYWH_ABS}
        entry["segmentation"] = entry.get("segmentation") or mask_of(box, *sizes[entry["image_id"]])
        if keypoints is not None:
            entry.update(_counted_keypoints(entry, 3 * len(keypoints)))
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        result.createIndex()
    return result


def _content(
    records: Sequence[Mapping[str, Any]], categories: Mapping[int, str]
) -> dict[str, list[dict[str, Any]]]:
    ids = list(categories)
    images, annotations = [], []
    for record in records:
        size = {"height": record["height"], "width": record["width"]}
        images.append({"id": record["image_id"], "file_name": record["file_name"], **size})
        for annotation in record.get("annotations", ()):
            box = BoxMode.convert(
                list(map(float, annotation["bbox"])), annotation["bbox_mode"], BoxMode.XYWH_ABS
            )
            entry = {
                "id": len(annotations) + 1,  # pycocotools mistakes a match with id 0 for no match
                "image_id": record["image_id"],
                "category_id": ids[annotation["category_id"]],
                "bbox": box,
                "area": annotation.get("area", box[2] * box[3]),
                "iscrowd": annotation.get("iscrowd", 0),
            }
            for key in ("segmentation", "source"):
                if annotation.get(key):
                    entry[key] = annotation[key]
            if points := annotation.get("keypoints"):
                entry["keypoints"] = [v if n % 3 == 2 else v - 0.5 for n, v in enumerate(points)]
            annotations.append(entry)
    names = [{"id": number, "name": name} for number, name in categories.items()]
    return {"images": images, "annotations": annotations, "categories": names}


def _counted_keypoints(entry: Mapping[str, Any], values: int) -> dict[str, Any]:
    """pycocotools needs the keypoints of every object; of visibility 0 they do not count."""
    points = entry.get("keypoints")
    if points is None or len(points) != values:
        return {"keypoints": [0] * values, "num_keypoints": 0}
    return {"num_keypoints": sum(v > 0 for v in points[2::3])}
