"""Ground truth in COCO's format. Everything about it is decided once, by :func:`read_coco`.

The loader, the evaluators, ``lambda-det check``, the recipe and the page of a run use its records
and its report; :mod:`.ground_truth` keeps both for them, and label readers of other formats make
its input. What is decided about one annotation stands in :mod:`.truth`. This file has the decisions
for which more of the file is needed: ids, names of images, images that are listed twice, and what
the exports of CVAT and Roboflow mean.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from detectron2.structures import BoxMode
from detectron2.utils.file_io import PathManager
from PIL import Image
from pycocotools.coco import COCO

from lambda_det.detection.data import report as kinds
from lambda_det.detection.data.box_form import SIDES, is_box, other_form
from lambda_det.detection.data.coco_format import name_labels, read_lists, whole
from lambda_det.detection.data.image_folder import ImageFolder, normal
from lambda_det.detection.data.records import upright_size
from lambda_det.detection.data.report import Finding, Kind, Report
from lambda_det.detection.data.truth import (
    FAR,
    MAX_PIXELS,
    Decided,
    area_of,
    around,
    corners,
    decide,
    mask_of,
    turned_rectangle,
)
from lambda_det.errors import DataError, listed

# how far the area of a mask may exceed the area of its box, which is rounded otherwise: a factor,
# and square pixels
_MOST_AREA, _ROUNDED_AREA = 1.5, 16
# how far apart the sides of two boxes of one object are: pixels, a share of the longer side, and at
# most a share of the shorter one, because tiny objects lie beside each other
_NEAR, _NEAR_SHARE, _NEAR_TINY = 1.5, 0.02, 0.2
_FILLED = 0.9  # of the largest polygon of an object: a smaller area is that without a hole
# a class that is a slip in the name of another one: its most objects for each object of that one,
# and the least likeness of both names, as difflib measures it; cat and car have 0.67. Both are
# guesses, with no false alarm in 17 sets of strangers; a fifth would take LVIS's crow for a crown
_SLIPS, _ALIKE = 0.1, 0.86
# digits and letters that stand alone tell classes apart: class 1 is not class 10, nor type A type B
_TELLING = re.compile(r"\d|(?<![^\W_])[^\W_](?![^\W_])")


class GroundTruth(NamedTuple):
    """What :func:`read_coco` gives: Detectron2's dataset dicts, and the report on them."""

    records: list[dict[str, Any]]
    report: Report


def read_coco(
    json_file: str | os.PathLike,
    image_root: str | os.PathLike = "",
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
    file = _File(os.fspath(json_file), os.fspath(image_root))
    _take_categories(file)
    _take_images(file)
    _find_slips(file)
    if fault := other_form(file.annotations, file.images, file.written or SIDES):
        file.add(kinds.FORM, fault[1], fault[0], len(file.annotations))
    records = _records(file, keypoints or len(file.report.keypoints) or None)
    _count(file, records)
    return GroundTruth(records, file.report)


class _File:
    """An annotation file, of which :func:`read_coco` makes records step by step."""

    def __init__(self, json_file: str, image_root: str) -> None:
        self.name, self.lists = json_file, read_lists(json_file)
        self.annotations: list[dict[str, Any]] = self.lists["annotations"]
        for one in self.annotations:  # Roboflow writes widths and heights as text
            box = one.get("bbox")
            if isinstance(box, list) and str in map(type, box):
                with contextlib.suppress(OverflowError, TypeError, ValueError):
                    one["bbox"] = list(map(float, box))
        for name in ("images", "categories"):
            if not self.lists[name]:
                raise DataError(f"{json_file}: the list {name!r} is empty; add at least one entry.")
        made = name_labels(self.lists, json_file)
        # how the labels that it was made of write boxes, of ``BOX_FORMS``; None: it is COCO's own
        self.written: str | None = made["boxes"]
        self.report = Report(made["labels"], image_root, annotations=len(self.annotations))
        for finding in made["findings"]:
            kind = Kind(finding["severity"], finding["text"])
            self.report.findings[kind] = Finding(finding["count"], finding["first"])
        self.images: dict[int, dict[str, Any]] = {}  # by id, as in ``Report.files``

    def add(self, kind: Kind, annotation: Mapping[str, Any], words: str, count: int = 1) -> None:
        """Report on an annotation, or several, by the place of the first in the labels."""
        where = annotation.get("source") if self.written else None
        if not where:
            where = f"annotation {annotation.get('id')} of image {annotation['image_id']}"
            if image := self.images.get(annotation["image_id"]):
                where += f" ({_named(image)})"
        self.report.add(kind, f"{where}: {words}", count)


def _named(image: Mapping[str, Any]) -> str:
    return f"{image['name']}, {image['width']}x{image['height']}"


# ------------------------------------------------------------------------------ the lists of a file
def _take_categories(file: _File) -> None:
    """Take the names of categories and keypoints, and count the annotations of each category."""
    report, entries = file.report, file.lists["categories"]
    counts = Counter(annotation["category_id"] for annotation in file.annotations)
    for entry in sorted(entries, key=itemgetter("id")):
        number, name = entry["id"], entry["name"]
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise DataError(
                f"{file.name}: the name {name!r:.80} of a category has half of a character, which "
                "no other file can hold; correct it."
            )
        keypoints = report.keypoints or entry.get("keypoints") or []
        if not isinstance(keypoints, list) or not all(isinstance(one, str) for one in keypoints):
            raise DataError(
                f"{file.name}: the keypoints of category {name!r:.80} are not a list of names; "
                "correct or remove them."
            )
        report.keypoints = keypoints
        others = [one.get("supercategory") for one in entries if one["id"] != number]
        # Roboflow writes the project's name so; a class that has a parent itself is none
        is_root = entry.get("supercategory") in (None, "", "none", "None", name)
        if not counts[number] and is_root and others and all(above == name for above in others):
            report.add(kinds.ROOT, f"{name} (category {number})")
        elif report.categories.setdefault(number, name) != name:
            first = report.categories[number]
            report.add(kinds.ID, f"category id {number} is of {first!r} and of {name!r}")
    report.counts = {number: counts[number] for number in report.categories}
    spellings: dict[str, list[str]] = defaultdict(list)
    for number, name in report.categories.items():
        spellings[_without_spelling(name)].append(f"{number}: {name!r}")
    for names in spellings.values():
        if len(names) > 1:
            report.add(kinds.CLASS, f"categories {listed(names, 5)}")


def _without_spelling(name: str) -> str:
    """A name without capital letters, blanks, hyphens, and invisible characters."""
    name = unicodedata.normalize("NFKC", name)
    seen = "".join(letter for letter in name if unicodedata.category(letter) != "Cf")
    # between digits they separate numbers: 1-0 is not 10
    return re.sub(r"(?<!\d)[\s_-]+|[\s_-]+(?!\d)", "", seen).casefold()


def _find_slips(file: _File) -> None:
    """Report classes of few objects whose name is, but for a letter, that of one of many."""
    # for more than a letter, as healthy and unhealthy have, there is a reason
    names, counts = file.report.categories, file.report.counts
    alike: dict[str, set[int]] = defaultdict(set)
    for number, name in names.items():
        for spelling in _spellings(name):
            alike[spelling].add(number)
    first = {one["category_id"]: one for one in reversed(file.annotations)}
    for number in filter(counts.get, names):
        name = names[number]
        others = {
            names[many]
            for spelling in _spellings(name)
            for many in alike[spelling]
            if counts[number] <= _SLIPS * counts[many]
            and _TELLING.findall(name) == _TELLING.findall(names[many])
        }
        if near := difflib.get_close_matches(name, others, 1, _ALIKE):
            words = f"{name!r}, beside many of {near[0]!r}"
            file.add(kinds.SLIP, first[number], words, counts[number])


def _spellings(name: str) -> set[str]:
    """A name, also without any one of its letters: names that differ by a letter share one."""
    return {name, *(name[:at] + name[at + 1 :] for at in range(len(name)))}


def _take_images(file: _File) -> None:
    """Find the images; each of two entries for one lacks the objects of the other."""
    report, entries = file.report, file.lists["images"]
    paths = paths_of([entry["file_name"] for entry in entries], report)
    first: dict[str, dict[str, Any]] = {}  # the entry by the path
    for entry in entries:
        number, name = entry["id"], entry["file_name"]
        earlier, path = file.images.get(number), paths[name]
        if earlier is not None:
            if earlier["file_name"] != path:
                both = f"{earlier['name']!r} and of {name!r}"
                report.add(kinds.ID, f"image id {number} is of {both}")
            continue
        image = file.images[number] = {
            "file_name": path,
            "name": name,
            "width": entry.get("width"),
            "height": entry.get("height"),
            # as our readers say of labels without a size
            "own_size": entry.get("own_size") is True,
        }
        _take_size(image, report)
        other = first.setdefault(normal(os.path.normpath(path)), entry)
        if other["id"] != number:
            words = f"{other['file_name']} (id {other['id']}) and {name} (id {number})"
            report.add(kinds.ID, f"{words} are one image, {path}")


def _take_size(image: dict[str, Any], report: Report) -> None:
    """Take the size of an image itself where the file has none."""
    width, height = (whole(image[key], 0) for key in ("width", "height"))
    if min(width, height) <= 0:
        try:
            if not PathManager.isfile(image["file_name"]):
                raise FileNotFoundError  # opening a named pipe would wait for its writer
            with PathManager.open(image["file_name"], "rb") as file:
                width, height = upright_size(Image.open(file))
        except Exception:  # Pillow may raise anything; or there is no file
            report.add(kinds.IMAGE, f"{_named(image)}: no size, and no image that has one")
            width, height = 1, 1
        else:
            report.add(kinds.MEANT, f"{image['name']} has no size in the file: its own is taken")
            image["own_size"] = True
    image.update(width=width, height=height)
    if width * height > MAX_PIXELS:
        report.add(kinds.IMAGE, f"{_named(image)}: more pixels than can be read")


def paths_of(names: Iterable[str], report: Report) -> dict[str, str]:
    """The paths of images by their names in the file, which need not exist: check reports that."""
    root = report.image_root
    paths = {name: os.path.join(root, name) for name in names}
    if not os.path.isdir(root):
        return paths
    here = set(os.listdir(root))
    missing = [
        name for name, path in paths.items() if name not in here and not PathManager.isfile(path)
    ]
    if not missing:
        return paths
    folder = ImageFolder(root)
    for name in missing:
        end, images = folder.named(name)
        if len(images) > 1:
            places = listed(sorted(map(str, images)))
            report.add(kinds.IMAGE, f"{name}: {end} is in several folders, {places}")
        elif images:
            paths[name] = str(images.pop())
    return paths


# ------------------------------------------------------------------------------ the objects of each
def _records(file: _File, keypoints: int | None) -> list[dict[str, Any]]:
    """The records, with the annotations as they are used, in the order of the image ids."""
    records = {
        number: {
            "file_name": image["file_name"],
            "image_id": number,
            "height": image["height"],
            "width": image["width"],
            "annotations": Decided(),
        }
        for number, image in sorted(file.images.items())
    }
    places = file.report.places
    entries = sorted(file.annotations, key=itemgetter("image_id"))
    for number, entry in enumerate(entries, 1):
        image, place = file.images.get(entry["image_id"]), places.get(entry["category_id"])
        if image is None or place is None:
            key = "image_id" if image is None else "category_id"
            file.add(kinds.ID, entry, f"{key} {entry[key]}")
            continue
        if annotation := _decided(_as_meant(entry, file), place, image, keypoints, file):
            annotation["id"] = number
            records[entry["image_id"]]["annotations"].append(annotation)
    for record in records.values():
        for one in _twice(record["annotations"]):
            file.add(kinds.TWICE, entries[one["id"] - 1], f"bbox {one['bbox']}")
    return list(records.values())


def _twice(annotations: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The objects whose box is that of another object of their class, but for a pixel or two."""
    objects = [one for one in annotations if not one["iscrowd"]]
    earlier: list[tuple[tuple[float, ...], dict[str, Any]]] = []  # with their corners
    for one in sorted(objects, key=itemgetter("bbox")):
        x, y, width, height = one["bbox"]
        near = min(max(_NEAR, _NEAR_SHARE * max(width, height)), _NEAR_TINY * min(width, height))
        here = x, y, x + width, y + height
        for there, other in reversed(earlier):
            if x - there[0] > near:
                break
            is_same_class = one["category_id"] == other["category_id"]
            if is_same_class and all(abs(a - b) <= near for a, b in zip(here, there, strict=True)):
                yield one
                break
        earlier.append((here, one))


def _as_meant(entry: dict[str, Any], file: _File) -> dict[str, Any]:
    """An entry as CVAT means it: masks are no crowds, and an attribute has the turn of a box."""
    said, box = entry.get("attributes"), entry.get("bbox")
    if not isinstance(said, dict) or "occluded" not in said:  # which it writes with each
        return entry
    mask, degrees = entry.get("segmentation"), said.get("rotation")
    if entry.get("iscrowd") == 1 and isinstance(mask, dict) and not said.get("is_crowd"):
        file.add(kinds.MEANT, entry, "a run-length mask with iscrowd 1 is an object")
        return {**entry, "iscrowd": 0}
    if mask or not is_box(box) or type(degrees) not in (int, float) or not 0 < abs(degrees) < FAR:
        return entry
    file.add(kinds.MEANT, entry, f"bbox {box} is turned by its rotation of {degrees:g} degrees")
    x, y, width, height = box
    outline = turned_rectangle((x, y, x + width, y + height), degrees)
    x0, y0, x1, y1 = around([outline])
    return {**entry, "bbox": [x0, y0, x1 - x0, y1 - y0], "segmentation": [outline]}


def _decided(
    entry: dict[str, Any], place: int, image: Mapping[str, Any], keypoints: int | None, file: _File
) -> dict[str, Any] | None:
    """An annotation in Detectron2's format, as it is used; None where it is left out."""
    given = {
        "bbox": entry.get("bbox"),
        "bbox_mode": BoxMode.XYWH_ABS,
        "category_id": place,
        "iscrowd": entry.get("iscrowd", 0),
    }
    given |= {key: entry[key] for key in ("segmentation", "keypoints") if entry.get(key)}
    ignore = entry.get("ignore", 0)
    if ignore == 1:  # like a crowd, such an object is neither learnt nor counted
        given["iscrowd"] = 1
    if ignore != 0:
        file.add(kinds.MEANT if ignore == 1 else kinds.VALUE, entry, f"ignore {ignore!r:.80}")
    annotation, faults = decide(given, image["height"], image["width"], keypoints)
    for kind, words in faults:
        # where all boxes have another form, their other faults follow from that
        follows = kind in (kinds.BORDER, kinds.BOX, kinds.OUTSIDE)
        if not (follows and kinds.FORM in file.report.findings):
            file.add(kind, entry, words)
    file.report.faulty += any(kind.severity == kinds.UNUSABLE for kind, _ in faults)
    if annotation is None:
        return None
    if points := annotation.get("keypoints"):
        # COCO counts from the middle of a pixel, Detectron2 from its corner
        annotation["keypoints"] = _moved(points, 0.5)
    x0, y0, x1, y1 = corners(annotation)
    area, box_area = entry.get("area"), (x1 - x0) * (y1 - y0)
    # the box as it was written, before it was cut at the border
    written = given["bbox"][2] * given["bbox"][3] if is_box(given["bbox"]) else box_area
    outlines = annotation.get("segmentation")
    are_several = isinstance(outlines, list) and len(outlines) > 1
    if not isinstance(area, (int, float)) or not 0 <= area < FAR**2:
        area = box_area
    elif not 0 < area <= _MOST_AREA * written + _ROUNDED_AREA:
        # COCO's results by size would count it among objects of another size
        words = f"area {area:g} of a box of {box_area:g} square pixels, whose area is taken"
        file.add(kinds.MEANT, entry, words)
        area = box_area
    elif are_several and area < _FILLED * max(map(area_of, outlines)):
        file.add(kinds.FILLED, entry, f"area {area:g} of {len(outlines)} polygons")
    return {**annotation, "area": area}


def _moved(points: Sequence[float], by: float) -> list[float]:
    """Keypoints x, y, visibility, ... in other coordinates."""
    return [v if n % 3 == 2 else v + by for n, v in enumerate(points)]


def _count(file: _File, records: Sequence[Mapping[str, Any]]) -> None:
    """Report what is left, by numbers."""
    report = file.report
    report.images = len(records)
    report.files = [file.images[record["image_id"]] for record in records]
    for image, record in zip(report.files, records, strict=True):
        annotations = record["annotations"]
        objects = [a for a in annotations if not a["iscrowd"]]
        report.crowds += len(annotations) - len(objects)
        report.usable += len(objects)
        report.most = max(report.most, len(objects))
        report.masks += sum("segmentation" in a for a in annotations)
        if not objects:
            report.empty += 1
            report.add(kinds.EMPTY, _named(image))
    if report.masks:
        for image, record in zip(report.files, records, strict=True):
            if lacking := sum("segmentation" not in a for a in record["annotations"]):
                report.add(kinds.NO_MASK, f"{_named(image)}: {lacking}", lacking)


# --------------------------------------------------------------- in COCO's format again, for others
def coco_content(truth: GroundTruth) -> dict[str, Any]:
    """The content of an annotation file with everything decided, and names below the image
    folder.

    The images have the names by which they were found.
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
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        result.createIndex()
    for entry in result.dataset["annotations"]:
        image, given = result.imgs[entry["image_id"]], {**entry, "bbox_mode": BoxMode.XYWH_ABS}
        entry["segmentation"] = mask_of(given, image["height"], image["width"])
        if keypoints is not None:
            # pycocotools needs those of every object; of visibility 0 they do not count
            points = entry.get("keypoints", ())
            if len(points) != 3 * len(keypoints):
                points = [0] * 3 * len(keypoints)
            entry |= {"keypoints": points, "num_keypoints": sum(v > 0 for v in points[2::3])}
    return result


def _content(
    records: Sequence[Mapping[str, Any]], categories: Mapping[int, str]
) -> dict[str, list[dict[str, Any]]]:
    ids = list(categories)
    images, annotations = [], []
    for record in records:
        images.append(
            {
                "id": record["image_id"],
                "file_name": record["file_name"],
                "height": record["height"],
                "width": record["width"],
            }
        )
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
            if mask := annotation.get("segmentation"):
                entry["segmentation"] = mask
            if points := annotation.get("keypoints"):
                entry["keypoints"] = _moved(points, -0.5)
            annotations.append(entry)
    names = [{"id": number, "name": name} for number, name in categories.items()]
    return {"images": images, "annotations": annotations, "categories": names}
