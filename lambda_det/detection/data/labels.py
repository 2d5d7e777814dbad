"""Labels as annotation tools write them, read into COCO's format.

YOLO (boxes, polygons and rotated boxes), Pascal VOC, LabelMe and CVAT's XML for images. A format is
recognised by what lies in the folder. The readers are ours: labelformat 0.1.17 has none for
LabelMe, needs the class names of Pascal VOC beforehand, and reads only the boxes of CVAT.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pycocotools.mask
import yaml
from PIL import Image

from lambda_det.errors import DataError, listed, printable, reason

__all__ = ["read_labels"]

logger = logging.getLogger(__name__)

_PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
_CIRCLE = 32  # corners of the polygon that takes a circle's place


@dataclass(frozen=True)
class Thing:
    """An object: its class, its box (x0, y0, x1, y1) in pixels, and polygons or run-lengths."""

    label: str
    box: tuple[float, float, float, float]
    mask: list[list[float]] | dict[str, Any] | None = None


@dataclass(frozen=True)
class Labelled:
    """A picture with its objects.

    Attributes:
        source: the file of labels.
        picture: the name that the file gives.
        things: its objects.
    """

    source: Path
    picture: str
    things: list[Thing] = field(default_factory=list)


class _Pictures:
    """The pictures below a folder, found by path, by name, or by name without ending."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise DataError(f"There is no image folder {folder}; name it with --images.")
        self.paths = sorted(
            Path(root, name)
            for root, _, names in os.walk(folder)
            for name in names
            if name.lower().endswith(_PICTURES)
        )
        self._places: dict[str, set[Path]] = {}
        for path in self.paths:
            for key in {path.relative_to(folder).as_posix(), path.name, path.stem}:
                self._places.setdefault(key, set()).add(path)

    def find(self, labelled: Labelled) -> Path:
        """The picture of a file of labels.

        Raises:
            DataError: there is none of its name, or there are several.
        """
        name = labelled.picture.replace("\\", "/")
        for key in (name, name.rpartition("/")[2], labelled.source.stem):
            if found := self._places.get(key):
                if len(found) > 1:
                    raise DataError(
                        f"{labelled.source}: {len(found)} pictures below {self.folder} are named "
                        f"{printable(key)}; name the folder of these labels' pictures."
                    )
                return next(iter(found))
        raise DataError(
            f"{labelled.source}: its picture {printable(name)!r} is not below {self.folder}; name "
            "the folder of the pictures with --images."
        )


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({reason(error)}); write it again.") from error


def _size(picture: Path) -> tuple[int, int]:
    """Width and height of a picture."""
    try:
        with Image.open(picture) as image:
            return image.size
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{picture} is no picture ({reason(error)}); remove or mend it.") from error


def _around(points: np.ndarray) -> tuple[float, float, float, float]:
    return (*points.min(0).tolist(), *points.max(0).tolist())


def _polygon(label: str, points: Iterable[Iterable[float]]) -> Thing:
    corners = np.array(list(points), float).reshape(-1, 2)
    return Thing(label, _around(corners), [corners.ravel().tolist()])


def _of_mask(label: str, mask: np.ndarray) -> Thing | None:
    """The object of a mask [H, W]; None if it is empty."""
    rows, columns = np.nonzero(mask)
    if not len(rows):
        return None
    runs = pycocotools.mask.encode(np.asfortranarray(mask, np.uint8))
    box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    return Thing(label, tuple(map(float, box)), {**runs, "counts": runs["counts"].decode()})


# --------------------------------------------------------------------------------------- Pascal VOC
def _xml(file: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(file).getroot()
    except (ElementTree.ParseError, OSError, ValueError) as error:
        raise DataError(f"{file} is not XML ({error}); write it again.") from error


def _read_voc(file: Path, _: _Pictures) -> Iterator[Labelled]:
    """Corners count as they are written: today's tools do not add the one of the VOC devkit."""
    root, things = _xml(file), []
    for number, node in enumerate(root.iter("object"), 1):
        try:
            corners = tuple(
                float(node.find(f"bndbox/{side}").text) for side in ("xmin", "ymin", "xmax", "ymax")
            )
            things.append(Thing(node.find("name").text.strip(), corners))
        except (AttributeError, TypeError, ValueError):
            raise DataError(
                f"{file}: object {number} has no name, or no bndbox of four numbers; correct it."
            ) from None
    yield Labelled(file, root.findtext("filename") or file.stem, things)


# --------------------------------------------------------------------------------------------- CVAT
def _read_cvat(file: Path, _: _Pictures) -> Iterator[Labelled]:
    nodes = list(_xml(file).iter("image"))
    if not nodes:
        raise DataError(f"{file} has no image; export it as CVAT for images 1.1, not for video.")
    for node in nodes:
        things = []
        for shape in node:
            try:
                things.append(_cvat_shape(shape, node))
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"{file}: a {shape.tag} of image {node.get('name')} cannot be read ({error}); "
                    "export it again as CVAT for images 1.1."
                ) from error
        yield Labelled(file, node.get("name", ""), [thing for thing in things if thing])


def _cvat_shape(shape: ElementTree.Element, picture: ElementTree.Element) -> Thing | None:
    value = shape.attrib
    if shape.tag == "box":
        left, top, right, bottom = (float(value[key]) for key in ("xtl", "ytl", "xbr", "ybr"))
        angle = math.radians(float(value.get("rotation", 0)))
        if not angle:
            return Thing(value["label"], (left, top, right, bottom))
        turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        centre = np.array([left + right, top + bottom]) / 2
        corners = np.array([[left, top], [right, top], [right, bottom], [left, bottom]])
        return _polygon(value["label"], (corners - centre) @ turn + centre)
    if shape.tag == "polygon":
        return _polygon(value["label"], (p.split(",") for p in value["points"].split(";")))
    if shape.tag == "mask":  # runs of a part of the image, row by row, from zeros on
        left, top, width, height = (int(value[key]) for key in ("left", "top", "width", "height"))
        runs = [int(run) for run in value["rle"].split(",")]
        part = np.repeat(np.arange(len(runs)) % 2, runs).reshape(height, width)
        mask = np.zeros((int(picture.get("height")), int(picture.get("width"))), np.uint8)
        mask[top : top + height, left : left + width] = part
        return _of_mask(value["label"], mask)
    logger.warning(f"A {shape.tag} of image {picture.get('name')} is left out")
    return None


# ------------------------------------------------------------------------------------------ LabelMe
def _read_labelme(file: Path, _: _Pictures) -> Iterator[Labelled]:
    content = _json(file)
    groups: dict[Any, list[Thing]] = {}
    for number, shape in enumerate(content.get("shapes") or ()):
        try:
            points = np.array(shape["points"], float).reshape(-1, 2)
            kind, label = shape.get("shape_type", "polygon"), str(shape["label"])
            if kind == "rectangle":
                thing = Thing(label, _around(points))
            elif kind == "circle":
                turn = np.linspace(0, 2 * np.pi, _CIRCLE, endpoint=False)
                radius = np.hypot(*(points[1] - points[0]))
                thing = _polygon(label, points[0] + radius * np.c_[np.cos(turn), np.sin(turn)])
            elif kind == "polygon":
                thing = _polygon(label, points)
            else:
                logger.warning(f"{file}: shape {number} is a {kind}, which is left out")
                continue
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise DataError(f"{file}: shape {number} cannot be read ({error}).") from error
        group = shape.get("group_id")  # parts of one object
        groups.setdefault(number if group is None else (label, str(group)), []).append(thing)
    things = [_joined(parts) for parts in groups.values()]
    yield Labelled(file, str(content.get("imagePath") or file.stem), things)


def _joined(parts: list[Thing]) -> Thing:
    corners = np.array([part.box for part in parts]).reshape(-1, 2)
    masks = [part.mask for part in parts]
    return Thing(
        parts[0].label,
        _around(corners),
        [part for mask in masks for part in mask] if all(masks) else None,
    )


# --------------------------------------------------------------------------------------------- YOLO
def _read_yolo(file: Path, pictures: _Pictures) -> Iterator[Labelled]:
    names = _yolo_names(file)
    for picture in pictures.paths:
        labels = _yolo_file(picture)
        lines = _text(labels).splitlines() if labels.is_file() else []
        size = np.array(_size(picture))
        things = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                things.append(_yolo_line(line.split(), size, names, f"{labels}, line {number}"))
        yield Labelled(labels, picture.relative_to(pictures.folder).as_posix(), things)


def _yolo_names(file: Path) -> dict[int, str]:
    try:
        content = yaml.safe_load(_text(file))
    except yaml.YAMLError as error:
        raise DataError(f"{file} is not YAML ({reason(error)}); write it again.") from error
    names = content.get("names") if isinstance(content, dict) else None
    if not names or not isinstance(names, (list, dict)):
        raise DataError(f"{file} has no list of names, as YOLO's data.yaml has; add it.")
    return dict(enumerate(names) if isinstance(names, list) else names.items())


def _yolo_file(picture: Path) -> Path:
    """The labels of a picture: in labels/ where its path has images/, or beside it."""
    parts = list(picture.absolute().parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    apart = Path(*parts).with_suffix(".txt")
    return apart if apart.is_file() else picture.with_suffix(".txt")


def _yolo_line(words: list[str], size: np.ndarray, names: dict[int, str], where: str) -> Thing:
    try:
        label, numbers = int(words[0]), np.array(words[1:], float)
        if not np.isfinite(numbers).all():
            raise ValueError
    except ValueError:
        raise DataError(f"{where}: {' '.join(words)[:60]!r} are not numbers.") from None
    if label not in names:
        raise DataError(f"{where}: class {label} is not among the {len(names)} names.")
    name = str(names[label])
    if len(numbers) == 4:
        centre, sides = numbers[:2] * size, numbers[2:] * size
        return Thing(name, (*(centre - sides / 2).tolist(), *(centre + sides / 2).tolist()))
    if len(numbers) < 6 or len(numbers) % 2:
        raise DataError(
            f"{where}: a class and {len(numbers)} numbers; a box has 4, and a polygon two for each "
            "of its corners, which are 3 at least."
        )
    return _polygon(name, numbers.reshape(-1, 2) * size)


# ------------------------------------------------------------------------------------------ formats
def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(file))
    except ValueError as error:
        raise DataError(f"{file} is not JSON ({error}); write it again.") from error
    return content if isinstance(content, dict) else {}


class Format(NamedTuple):
    """A row of the table of formats.

    Attributes:
        pattern: of the files of labels in a folder.
        is_one: whether a file is of this format.
        read: the pictures with their objects.
    """

    pattern: str
    is_one: Callable[[Path], bool]
    read: Callable[[Path, _Pictures], Iterator[Labelled]]


FORMATS = {
    "YOLO": Format("*.yaml", lambda file: True, _read_yolo),
    "CVAT": Format("*.xml", lambda file: _xml(file).tag == "annotations", _read_cvat),
    "Pascal VOC": Format("*.xml", lambda file: _xml(file).tag == "annotation", _read_voc),
    "LabelMe": Format("*.json", lambda file: "shapes" in _json(file), _read_labelme),
}


def recognise(place: Path) -> tuple[str, list[Path]]:
    """The format of a file or folder, and its files of labels.

    Raises:
        DataError: nothing there is of a known format.
    """
    if not place.exists():
        raise DataError(f"There is no file or folder of labels {place}.")
    for name, row in FORMATS.items():
        files = sorted(place.rglob(row.pattern)) if place.is_dir() else [place]
        if files and files[0].match(row.pattern) and row.is_one(files[0]):
            return name, files
    raise DataError(
        f"{place} holds no labels of a known format: {', '.join(FORMATS)}; a file of COCO's format "
        "needs no conversion."
    )


def read_labels(place: str | Path, images: str | Path | None = None) -> dict[str, Any]:
    """The labels of a file or folder in COCO's format.

    Args:
        place: a folder of Pascal VOC, LabelMe or CVAT files, such a file, or YOLO's data.yaml.
        images: the folder of the pictures; by default that of the labels. Names are relative to it.

    Returns:
        ``images`` with the sizes of the pictures themselves, ``annotations`` and ``categories``:
        those of data.yaml in its order, others by name. Objects with polygons or masks have a
        ``segmentation``.

    Raises:
        DataError: a file cannot be read, or its picture is missing.
    """
    place = Path(place)
    kind, files = recognise(place)
    if kind == "YOLO" and len(files) > 1:
        raise DataError(f"{place} holds {listed(map(str, files))}; name one of them.")
    pictures = _Pictures(Path(images or (place if place.is_dir() else place.parent)))
    rows = [row for file in files for row in FORMATS[kind].read(file, pictures)]
    names = sorted({thing.label for row in rows for thing in row.things})
    if kind == "YOLO":
        names = list(map(str, _yolo_names(files[0]).values()))
    ids = {name: number for number, name in enumerate(names, 1)}
    content: dict[str, Any] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": number, "name": name} for name, number in ids.items()],
    }
    for number, row in enumerate(rows, 1):
        path = pictures.find(row)
        width, height = _size(path)
        name = path.relative_to(pictures.folder).as_posix()
        content["images"].append(
            {"id": number, "file_name": name, "width": width, "height": height}
        )
        for thing in row.things:
            x0, y0, x1, y1 = thing.box
            annotation = {
                "id": len(content["annotations"]) + 1,
                "image_id": number,
                "category_id": ids[thing.label],
                "bbox": [x0, y0, x1 - x0, y1 - y0],
                "area": (x1 - x0) * (y1 - y0),
                "iscrowd": 0,
            }
            if thing.mask is not None:
                annotation["segmentation"] = thing.mask
            content["annotations"].append(annotation)
    counts = Counter(thing.label for row in rows for thing in row.things)
    found = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    logger.info(f"{place}: {kind}, {len(rows)} pictures with {found or 'no object'}")
    return content
