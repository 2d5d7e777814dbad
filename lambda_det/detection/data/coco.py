"""Ground truth in COCO's format. Everything about it is decided once, by :func:`read_coco`.

The loader, the evaluators, ``lambda-det check``, the recipe and the page of a run use the records
and the report of :func:`read_coco`; label readers of other formats make its input. What is decided
about one annotation stands in :mod:`.truth`. This file has the decisions for which the whole file
is needed: ids, boxes in another form, objects that are marked as crowds, pictures that are listed
twice, names of pictures.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from detectron2.structures import BoxMode
from detectron2.utils.file_io import PathManager
from PIL import Image
from pycocotools.coco import COCO

from lambda_det.detection.data.box_form import SIDES, Form, form_of_boxes, is_box
from lambda_det.detection.data.coco_format import (
    COCO_DETECTIONS,
    made_by_reader,
    read_keypoint_names,
    read_lists,
    whole,
)
from lambda_det.detection.data.picture_folder import PictureFolder, normal
from lambda_det.detection.data.records import upright_size
from lambda_det.detection.data.report import (
    BORDER,
    BOX,
    CLASS,
    CROWD,
    DENSE,
    EMPTY,
    FORM,
    ID,
    MEANT,
    NO_MASK,
    OUTSIDE,
    PICTURE,
    ROOT,
    SIZES,
    TINY,
    TWICE,
    UNSEEN,
    VALUE,
    Finding,
    Kind,
    Report,
)
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

__all__ = ["GroundTruth", "coco_api", "coco_content", "file_report", "read_coco"]

_MOST_CROWDS = 0.2  # share of all annotations; COCO has one in a hundred
_MANY_CROWDS = 0.1
# how far the area of a mask may exceed that of its box, which is rounded otherwise: a factor, and
# square pixels
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
        image_root: the folder of the pictures, which are found below it by the ends of their names;
            "" or a missing folder: names are not looked up.
        keypoints: how many an object has; None: as many as the first category names.

    Returns:
        The records, in the order of the picture ids: Detectron2's dataset dicts, whose annotations
        have an "id" (from 1) and an "area" besides. And the report with all findings, also those
        for which :meth:`Report.refusal` gives a reason: records must not be used then.

    Raises:
        DataError: the file is missing, is not JSON or not in COCO's format.
    """
    json_file, image_root = os.fspath(json_file), os.fspath(image_root)
    content = _Content.of(json_file, image_root)
    report = content.report
    content.keypoints = content.keypoints if keypoints is None else keypoints
    form, fault = form_of_boxes(content.annotations, content.images, content.written)
    if fault is None:
        _turn_boxes(content)
    else:
        kind, words, case = fault
        report.add(kind, f"{content.where(case)}: {words}", len(content.annotations))
    _merge_pictures(content)
    _crowds_as_objects(content)
    _check_names(content)
    annotations: dict[Any, list[dict[str, Any]]] = {i: [] for i in content.images}
    for annotation in content.annotations:
        image = content.images.get(annotation["image_id"])
        if image is not None and annotation["category_id"] in report.categories:
            annotations[image["id"]].append(annotation)
    places = {number: place for place, number in enumerate(report.categories)}
    records, ids = [], iter(range(1, len(content.annotations) + 1))
    for number in sorted(content.images):
        image = content.images[number]
        record = {"file_name": image["path"], "image_id": number}
        record |= {"height": image["height"], "width": image["width"]}
        record["annotations"] = Decided(
            _decided(annotations[number], image, content, form, places, ids)
        )
        records.append(record)
    _count(records, content)
    return GroundTruth(records, report)


@functools.lru_cache(maxsize=4)
def _kept_report(json_file: str, image_root: str, version: object) -> Report:
    return read_coco(json_file, image_root).report


def file_report(json_file: str | os.PathLike, image_root: str | os.PathLike = "") -> Report:
    """The report of :func:`read_coco`, which is kept in memory until file or folder change."""
    json_file, image_root = os.fspath(json_file), os.fspath(image_root)
    if not PathManager.isfile(json_file):
        raise DataError(f"The annotation file {json_file} does not exist; correct the path.")
    status = os.stat(PathManager.get_local_path(json_file))
    version: tuple = (status.st_mtime_ns, status.st_size)
    if os.path.isdir(image_root):
        version += (os.stat(image_root).st_mtime_ns,)
    return deepcopy(_kept_report(json_file, image_root, version))


# ------------------------------------------------------------------------------ the lists of a file
class _Content:
    """The lists of a file, from which records are made.

    Attributes:
        report: on the file.
        images: the entries by id, each with its "path".
        annotations: the entries.
        keypoints: how many an object has; None where no category names any.
        written: how the labels from which the file was made write boxes, of ``BOX_FORMS``;
            None for a file of COCO's own.
    """

    def __init__(self, report: Report, written: str | None = None) -> None:
        self.report = report
        self.written = written
        self.images: dict[int, dict[str, Any]] = {}
        self.annotations: list[dict[str, Any]] = []
        self.keypoints: int | None = None

    @classmethod
    def of(cls, json_file: str, image_root: str) -> _Content:
        lists = read_lists(json_file)
        for name in ("images", "categories"):
            if not lists[name]:
                raise DataError(f"{json_file}: the list {name!r} is empty; add at least one entry.")
        made = made_by_reader(lists)
        name = made["labels"] if made else json_file
        report = Report(name, image_root, annotations=len(lists["annotations"]))
        if made:
            report.findings |= _of_the_reader(made["findings"])
        else:
            for annotation in lists["annotations"]:
                annotation.pop("source", None)  # which means something else there
        content = cls(report, made["boxes"] if made else None)
        content.annotations = lists["annotations"]
        content._take_categories(json_file, lists["categories"])
        content._take_images(lists["images"])
        content._check_ids()
        return content

    def _take_categories(self, json_file: str, entries: list[dict[str, Any]]) -> None:
        for entry in sorted(entries, key=lambda entry: entry["id"]):
            number, name = entry["id"], entry["name"]
            if any("\ud800" <= letter <= "\udfff" for letter in name):
                raise DataError(
                    f"{json_file}: the name {name!r:.80} of a category has half of a character, "
                    "which no other file can hold; correct it."
                )
            names = read_keypoint_names(json_file, entry)
            if names and self.keypoints is None:
                self.keypoints = len(names)
            first = self.report.categories.setdefault(number, name)
            if first != name:
                self.report.add(ID, f"category id {number} is of {first!r} and of {name!r}")
        counts = Counter(annotation["category_id"] for annotation in self.annotations)
        root = _unused_root(entries, counts)
        if root is not None and len(self.report.categories) > 1:
            name = self.report.categories.pop(root)
            self.report.add(ROOT, f"{name} (category {root})")
        self.report.counts = {number: counts[number] for number in self.report.categories}

    def _take_images(self, entries: list[dict[str, Any]]) -> None:
        paths = _paths_of([entry["file_name"] for entry in entries], self.report)
        for entry in entries:
            number, name = entry["id"], entry["file_name"]
            image = {**entry, "path": paths[name]}
            earlier = self.images.get(number)
            if earlier is not None and earlier["path"] != image["path"]:
                text = f"picture id {number} is of {earlier['file_name']!r} and of {name!r}"
                self.report.add(ID, text)
            elif earlier is None:
                self.images[number] = image
                self._check_size(image)

    def _check_size(self, image: dict[str, Any]) -> None:
        """Take the size of the picture itself where the file has none."""
        width, height = (whole(image.get(key)) for key in ("width", "height"))
        if not (width and height and min(width, height) > 0):
            name = image["file_name"]
            try:
                with PathManager.open(image["path"], "rb") as file:
                    width, height = upright_size(Image.open(file))
            except Exception:  # Pillow may raise anything; or there is no file
                said = f"{image.get('width')}x{image.get('height')}"
                self.report.add(PICTURE, f"{name}, {said}: no size, and no picture that has one")
                width, height = 1, 1
            else:
                self.report.add(MEANT, f"{name} has no size in the file: its own is taken")
                image["own_size"] = True
        image.update(width=width, height=height)
        if width * height > MAX_PIXELS:
            self.report.add(PICTURE, f"{_named(image)}: more pixels than can be read")

    def _check_ids(self) -> None:
        for annotation in self.annotations:
            for key, entries in (
                ("image_id", self.images),
                ("category_id", self.report.categories),
            ):
                if annotation[key] not in entries:
                    self.report.add(ID, f"{self.where(annotation)}: {key} {annotation[key]}")

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


def _paths_of(names: Iterable[str], report: Report) -> dict[str, str]:
    """The paths of pictures by their names in the file.

    The folder is searched for names that do not exist as they are written. A picture that one name
    fits exactly is not found for another name. A picture that is not found keeps the path of its
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
    folder = PictureFolder(root)
    claims = {os.path.normpath(paths[name]): name for name in paths.keys() - set(missing)}
    matches = {name: folder.named(name) for name in missing}

    def claims_late(name: str) -> bool:
        """In the folder cam2, cam1/0.png must not claim the picture of cam2/0.png."""
        return not any(_is_in_folder(name, str(path)) for path in matches[name][1])

    for name in sorted(missing, key=claims_late):
        end, pictures = matches[name]
        if len(pictures) > 1:
            places = listed(sorted(map(str, pictures)))
            report.add(PICTURE, f"{name}: {end} is in several folders, {places}")
        elif pictures:
            path = str(pictures.pop())
            other = claims.setdefault(os.path.normpath(path), name)
            if normal(other) == normal(name) or _is_in_folder(name, path):
                paths[name] = path
            else:
                report.add(PICTURE, f"{name} is not there, and {path} is {other}")
    return paths


def _is_in_folder(name: str, path: str) -> bool:
    """Whether a name is that of a picture below the parent of its folder, as images/0.png is."""
    parents = os.path.abspath(path).split(os.sep)
    names = [part for part in name.replace("\\", "/").split("/") if part != "."]
    return len(names) > 1 and [*map(normal, names)] == [*map(normal, parents[-len(names) :])]


def _is_file(path: str) -> bool:
    try:
        return os.path.isfile(path)
    except ValueError:  # a name that no file can have
        return False


# ------------------------------------------------------------------- what only the whole file shows
def _turn_boxes(content: _Content) -> None:
    """Turn the boxes of CVAT that have an angle as an attribute.

    CVAT writes a turned box as it was before it was turned, and the angle as an attribute. An
    attribute of that name in a file of another program may mean anything.
    """
    for place, annotation in enumerate(content.annotations):
        box, degrees = annotation.get("bbox"), _degrees(annotation)
        if not degrees or annotation.get("segmentation") or not is_box(box):
            continue
        x, y, width, height = box
        outline = turned_rectangle((x, y, x + width, y + height), degrees)
        x0, y0, x1, y1 = around([outline])
        content.annotations[place] = {
            **annotation,
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "segmentation": [outline],
        }
        words = f"bbox {box} is turned by its rotation of {degrees:g} degrees"
        content.report.add(MEANT, f"{content.where(annotation)}: {words}")


def _degrees(annotation: Mapping[str, Any]) -> float:
    """The angle that CVAT wrote beside a box; 0 where it is none."""
    degrees = annotation["attributes"].get("rotation") if _by_cvat(annotation) else None
    is_number = isinstance(degrees, (int, float)) and not isinstance(degrees, bool)
    return degrees if is_number and abs(degrees) < FAR else 0


def _merge_pictures(content: _Content) -> None:
    """Merge one picture under several ids, because each copy lacks the objects of the others."""
    first: dict[str, int] = {}
    other: dict[int, int] = {}
    for number, image in content.images.items():
        path = normal(os.path.normpath(image["path"]))
        if first.setdefault(path, number) != number:
            other[number] = first[path]
            kept = content.images[first[path]]
            words = f"{image['file_name']} has the ids {first[path]} and {number}: they are merged"
            content.report.add(MEANT, words)
            if (kept["width"], kept["height"]) != (image["width"], image["height"]):
                words = f"{_named(kept)}, and {image['width']}x{image['height']} as id {number}"
                content.report.add(PICTURE, words)
    if not other:
        return
    merged = set(other.values())
    seen: set[str] = set()
    annotations = []
    for annotation in content.annotations:
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
        del content.images[number]
    content.annotations = annotations
    counts = Counter(annotation["category_id"] for annotation in annotations)
    content.report.annotations = len(annotations)
    content.report.counts = {number: counts[number] for number in content.report.categories}


def _crowds_as_objects(content: _Content) -> None:
    """Turn crowds into objects where a tool marks every run-length mask as a crowd.

    CVAT does so, and also writes "attributes"; other tools are recognised by the number of crowds.
    """
    crowds = [a for a in content.annotations if a.get("iscrowd") == 1]
    if not crowds:
        return
    runs = [a for a in content.annotations if isinstance(a.get("segmentation"), dict)]
    all_are = len(runs) == len(crowds) and all(a.get("iscrowd") == 1 for a in runs)
    many = len(crowds) > _MOST_CROWDS * len(content.annotations)
    objects = [
        a
        for a in crowds
        if isinstance(a.get("segmentation"), dict)
        and ((all_are and many) or _by_cvat(a))
        and not _said_to_be_crowd(a)
    ]
    for annotation in objects:
        annotation["iscrowd"] = 0
        words = "a run-length mask with iscrowd 1 is an object"
        content.report.add(MEANT, f"{content.where(annotation)}: {words}")
    left = len(crowds) - len(objects)
    if left > max(2, _MANY_CROWDS * len(content.annotations)):
        case = next(a for a in crowds if a.get("iscrowd") == 1)
        words = f"{left} of {len(content.annotations)}, the first: {content.where(case)}"
        content.report.add(CROWD, words, left)


def _by_cvat(annotation: Mapping[str, Any]) -> bool:
    attributes = annotation.get("attributes")
    return isinstance(attributes, dict) and "occluded" in attributes


def _said_to_be_crowd(annotation: Mapping[str, Any]) -> bool:
    attributes = annotation.get("attributes")
    return isinstance(attributes, dict) and bool(attributes.get("is_crowd"))


def _check_names(content: _Content) -> None:
    """Report classes that are the same, or that differ only in spelling."""
    groups: dict[str, list[int]] = defaultdict(list)
    for number, name in content.report.categories.items():
        groups[_without_spelling(name)].append(number)
    for numbers in groups.values():
        if len(numbers) > 1:
            names = [f"{number}: {content.report.categories[number]!r}" for number in numbers]
            content.report.add(CLASS, f"categories {listed(names, 5)}")


def _without_spelling(name: str) -> str:
    """A name without capital letters, blanks, hyphens, and invisible characters."""
    name = unicodedata.normalize("NFKC", name)
    seen = "".join(letter for letter in name if unicodedata.category(letter) != "Cf")
    # between digits they separate numbers: 1-0 is not 10
    return re.sub(r"(?<!\d)[\s_-]+|[\s_-]+(?!\d)", "", seen).casefold()


# ------------------------------------------------------------------------------ the objects of each
def _decided(
    annotations: Sequence[dict[str, Any]],
    image: Mapping[str, Any],
    content: _Content,
    form: Form,
    places: Mapping[int, int],
    ids: Iterator[int],
) -> Iterator[dict[str, Any]]:
    """Yield the annotations of one picture in Detectron2's format, as they are used."""
    report, size = content.report, (image["height"], image["width"])
    for entry in annotations:
        number = next(ids)
        given = _in_detectron2s_format(entry, places, image, form)
        if entry.get("ignore", 0) != 0:
            # like a crowd, an ignored object is neither learnt nor counted
            is_flag = entry["ignore"] in (1, True)
            given["iscrowd"] = 1 if is_flag else given.get("iscrowd", 0)
            words = f"ignore {entry['ignore']!r:.80}"
            report.add(MEANT if is_flag else VALUE, f"{content.where(entry)}: {words}")
        annotation, faults = decide(given, *size, content.keypoints)
        for kind, words in faults:
            # where all boxes have another form, their other faults follow from that
            if not (FORM in report.findings and kind in (BORDER, BOX, OUTSIDE)):
                report.add(kind, f"{content.where(entry)}: {words}")
        if annotation is None:
            continue
        x0, y0, x1, y1 = corners(annotation)
        if min(x1 - x0, y1 - y0) < 1:
            report.add(TINY, f"{content.where(entry)}: {x1 - x0:.3g} x {y1 - y0:.3g} pixels")
        area, box_area = entry.get("area"), (x1 - x0) * (y1 - y0)
        if not is_area(area) or form is not SIDES:
            area = box_area
        elif not 0 < area <= _MOST_AREA * _area_of_box(given, box_area) + _ROUNDED_AREA:
            # a size in COCO's results would be that of another object
            words = f"area {area:g} of a box of {box_area:g} square pixels, whose area is taken"
            report.add(MEANT, f"{content.where(entry)}: {words}")
            area = box_area
        elif runs := without_holes(annotation.get("segmentation"), area, *size):
            annotation = {**annotation, "segmentation": runs}
            words = f"area {area:g} is without the polygons that lie in others, which are holes"
            report.add(MEANT, f"{content.where(entry)}: {words}")
        source = {"source": entry["source"]} if "source" in entry else {}
        yield {**annotation, "id": number, "area": area, **source}


def _area_of_box(given: Mapping[str, Any], otherwise: float) -> float:
    """The area of a box as it was written, before it was cut at the border."""
    return given["bbox"][2] * given["bbox"][3] if is_box(given["bbox"]) else otherwise


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


def _count(records: Sequence[dict[str, Any]], content: _Content) -> None:
    """Fill in the counts of the records."""
    report = content.report
    report.images = len(records)
    seen: Counter[int] = Counter()
    for record in records:
        image = content.images[record["image_id"]]
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
            report.add(DENSE, f"{_named(image)}: {len(objects)}")
        for annotation in _repeated(objects):
            where = annotation.get("source") or f"{_named(image)}: bbox {annotation['bbox']}"
            report.add(TWICE, str(where))
        if not objects:
            report.empty += 1
            report.add(EMPTY, _named(image))
    for place, (number, name) in enumerate(report.categories.items()):
        if not seen[place]:
            report.add(UNSEEN, f"{name} (category {number})")
    if report.masks:
        for record in records:
            image = content.images[record["image_id"]]
            lacking = [a for a in record["annotations"] if "segmentation" not in a]
            if lacking:
                report.add(NO_MASK, f"{_named(image)}: {len(lacking)}", len(lacking))


def _repeated(objects: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Objects with the class, box and mask of an earlier object."""
    first: dict[tuple, dict[str, Any]] = {}
    for one in objects:
        earlier = first.setdefault((one["category_id"], *one["bbox"]), one)
        if one is not earlier and one.get("segmentation") == earlier.get("segmentation"):
            yield one


# --------------------------------------------------------------- in COCO's format again, for others
def coco_content(truth: GroundTruth) -> dict[str, Any]:
    """The content of an annotation file with everything decided, and names below the picture
    folder.

    The pictures have the names by which they were found, and objects keep their "source".
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
        records: with sizes, about which everything is decided.
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
    """pycocotools needs the keypoints of every object; those of visibility 0 do not count."""
    points = entry.get("keypoints")
    if points is None or len(points) != values:
        return {"keypoints": [0] * values, "num_keypoints": 0}
    return {"num_keypoints": sum(v > 0 for v in points[2::3])}
