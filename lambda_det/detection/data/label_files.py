"""Content of COCO's format written as labels of other tools: YOLO and LabelMe."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import pycocotools.mask
import yaml

from lambda_det.detection.data.truth import rectangle
from lambda_det.detection.data.written_formats import WRITTEN
from lambda_det.errors import DataError, listed, refused
from lambda_det.files import relative_path, replace_text

logger = logging.getLogger(__name__)

_SPECK = 10  # the area in pixels below which a piece of a mask is left out for hands


class _Object(NamedTuple):
    """An object: its class, its corners x0, y0, x1, y1, and its polygons; () for a box."""

    index: int
    name: str
    box: tuple[float, ...]
    outline: list[list[float]]
    score: float | None


def write_labels(
    content: Mapping[str, Any],
    label_format: str,
    target: Path,
    images: str | os.PathLike,
    sources: Mapping[str, Path] | None = None,
) -> None:
    """Write a data set as a file of COCO's format, or as a folder with a file for each image.

    Args:
        content: of COCO's format, see :func:`lambda_det.own_data.labels.read_labels`.
        label_format: a key of ``WRITTEN``.
        target: the file, or the folder; existing files are replaced.
        images: the folder from which the names of the images start.
        sources: the files of images that are elsewhere, by their names.

    Raises:
        DataError: as :func:`place_labels` does, or a file cannot be written.
    """
    with refused(DataError, f"{target} cannot be written", "", OSError, ValueError):  # bad names
        if label_format not in _WRITERS:
            target.parent.mkdir(parents=True, exist_ok=True)
            # run lengths that pycocotools made are bytes
            replace_text(target, json.dumps(content, default=bytes.decode))
        else:
            _write_folder(content, label_format, target, Path(images), sources or {})


def place_labels(names: Iterable[str], label_format: str, target: Path) -> dict[str, Path]:
    """The file of labels of each image by its name.

    Args:
        names: of the images.
        label_format: a key of ``WRITTEN``, of a format with a file for each image.
        target: the folder of these files.

    Raises:
        DataError: two images have the same name apart from its ending; or the folder has labels
            of other images, whose numbers would get the classes of a new data.yaml.
    """
    row = WRITTEN[label_format]
    image_of: dict[Path, str] = {}
    for given in names:
        name = Path(given).with_suffix(row.ending)
        # A name may lead out of the folder of the images; the labels stay in theirs
        file = target.joinpath(*(one for one in name.parts if one not in ("..", name.anchor)))
        if file in image_of:
            raise DataError(
                f"{given} and {image_of[file]} would both have their labels in {file}; give the "
                "images other names."
            )
        image_of[file] = given
    if row.classes_file and (left := sorted({*target.rglob(f"*{row.ending}")} - {*image_of})):
        raise DataError(
            f"{target} has labels of other images, of an earlier call perhaps, to which the new "
            f"{row.classes_file} does not belong: {listed(left)}; remove them, or give another "
            "folder."
        )
    return {name: file for file, name in image_of.items()}


def _write_folder(
    content: Mapping[str, Any],
    label_format: str,
    target: Path,
    images: Path,
    sources: Mapping[str, Path],
) -> None:
    named = enumerate(content["categories"])
    classes = {category["id"]: (index, category["name"]) for index, category in named}
    objects: dict[int, list[_Object]] = {image["id"]: [] for image in content["images"]}
    things = [one for one in content["annotations"] if not one.get("iscrowd")]
    if crowds := len(content["annotations"]) - len(things):
        logger.warning(f"{crowds} crowds are left out of {label_format}")
    for one in things:
        (x, y, width, height), mask = one["bbox"], one.get("segmentation") or []
        outline = polygons(pycocotools.mask.decode(mask)) if isinstance(mask, dict) else mask
        box, score = (x, y, x + width, y + height), one.get("score")
        made = _Object(*classes[one["category_id"]], box, outline, score)
        objects[one["image_id"]].append(made)
    boxes = sum(not one.outline for own in objects.values() for one in own)
    if label_format == "yolo" and 0 < boxes < len(things):
        # Of a mix in a file it would read each box as an outline of two points, and of a mix in
        # the data set leave out all outlines
        logger.warning(
            f"{boxes} of {len(things)} objects have no outline and get the corners of their "
            "box as one, because Ultralytics reads no mix of boxes and outlines"
        )
        objects = {image: [_outlined(one) for one in own] for image, own in objects.items()}
    files = place_labels((image["file_name"] for image in content["images"]), label_format, target)
    row = WRITTEN[label_format]
    for image in content["images"]:
        name = image["file_name"]
        file = files[name]
        place = relative_path(sources.get(name, images / name), file.parent)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_WRITERS[label_format](image, objects[image["id"]], place), "utf-8")
    if row.classes_file:
        listing = yaml.safe_dump({"names": dict(classes.values())}, allow_unicode=True)
        (target / row.classes_file).write_text(listing, "utf-8")


def _outlined(one: _Object) -> _Object:
    """An object with an outline, of its box if it has none."""
    return one._replace(outline=one.outline or [rectangle(*one.box)])


def _yolo(image: Mapping[str, Any], objects: list[_Object], _: str) -> str:
    size, lines = np.array([image["width"], image["height"]]), []
    for one in objects:
        corners = np.clip(np.reshape(one.box, (2, 2)) / size, 0, 1)
        points = np.array([corners.mean(0), corners[1] - corners[0]])
        if one.outline:
            # one outline: from polygon to polygon by their first corners, and back the same way
            back = [polygon[:2] for polygon in one.outline[-2::-1]]
            there = [[*polygon, *polygon[:2]] if back else polygon for polygon in one.outline]
            points = (np.concatenate([*there, *back]).reshape(-1, 2) / size).clip(0, 1)
        numbers = " ".join(f"{value:.9g}" for value in points.ravel())
        lines.append(f"{one.index} {numbers}\n")
    return "".join(lines)


def _labelme(image: Mapping[str, Any], objects: list[_Object], place: str) -> str:
    shapes = [
        {
            "label": one.name,
            "points": np.reshape(points, (-1, 2)).tolist(),
            "group_id": number if len(one.outline) > 1 else None,
            "shape_type": "polygon" if one.outline else "rectangle",
            "flags": {},
            "score": one.score,
        }
        for number, one in enumerate(objects)
        for points in one.outline or [one.box]
    ]
    content = {
        "version": "5.5.0",
        "flags": {},
        "shapes": shapes,
        "imagePath": place,
        "imageData": None,
        "imageHeight": image["height"],
        "imageWidth": image["width"],
    }
    return json.dumps(content, ensure_ascii=False, indent=1)


# For each format with a file for each image, the text of that file: from the entry of the image in
# COCO's format, its objects, and its path as seen from the file
_WRITERS = {"yolo": _yolo, "labelme": _labelme}


def polygons(mask: np.ndarray, *, for_hands: bool = False) -> list[list[float]]:
    """The outlines of a mask [H, W] as polygons x0, y0, x1, y1, ... in COCO's coordinates.

    They run along the edges of the pixels, so they have the mask's area and box, and COCO's tools
    make the same mask from them. There is one for each piece of the mask. An outline with holes
    goes to each hole by a straight line, around it and back by the same line.

    Args:
        mask: bool.
        for_hands: leave out what is in the way of a person who corrects the outline: points, as
            long as it moves by no more than a pixel, and pieces and holes of less than ten pixels.
            The largest piece stays.
    """
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    if not len(rows):
        return []
    corner = np.array([columns[0], rows[0]])
    inner = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    contours, (tree,) = cv2.findContours(
        np.ascontiguousarray(inner.repeat(2, 0).repeat(2, 1), np.uint8),
        cv2.RETR_CCOMP,
        cv2.CHAIN_APPROX_SIMPLE,
    )
    outlines = {}
    for number, contour in enumerate(contours):
        # The middles of the outer quarters of pixels, and from there to the nearest corner
        points = corner + np.round((contour.reshape(-1, 2) + 0.5) / 2)
        outlines[number] = points[(points != np.roll(points, 1, 0)).any(1)]
    if for_hands:
        areas = {number: _area(points) for number, points in outlines.items()}
        largest = max(areas, key=areas.get)
        specks = {n for n, area in areas.items() if area < _SPECK and n != largest}
        outlines = {
            number: _simplified(points)
            for number, points in outlines.items()
            if not specks & {number, tree[number][3]}  # a hole goes with its outline
        }
    for number in list(outlines):
        if (parent := tree[number][3]) >= 0:
            outlines[parent] = _with_hole(outlines[parent], outlines.pop(number))
    return [points.ravel().tolist() for points in outlines.values()]


def _area(outline: np.ndarray) -> float:
    """The area inside an outline [N, 2]."""
    return cv2.contourArea(outline.astype(np.float32))


def _simplified(outline: np.ndarray) -> np.ndarray:
    """An outline [N, 2] with fewer points, which moves by a pixel, and by a tenth of its area."""
    simple = cv2.approxPolyDP(outline.astype(np.float32), 1.0, closed=True).reshape(-1, 2)
    area = _area(outline)
    # a thin object may lose more, and stays as it is
    return simple if abs(_area(simple) - area) <= 0.1 * area else outline


def _with_hole(outline: np.ndarray, hole: np.ndarray) -> np.ndarray:
    """An outline [N, 2] that goes to a hole [M, 2], around it and back."""
    start = np.square(outline - hole[0]).sum(1).argmin()
    turn = np.square(hole - outline[start]).sum(1).argmin()
    return np.concatenate([outline[: start + 1], hole[turn:], hole[: turn + 1], outline[start:]])
