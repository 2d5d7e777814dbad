"""Content of COCO's format written as labels of other tools: YOLO, Pascal VOC and LabelMe."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import cv2
import numpy as np
import pycocotools.mask
import yaml

from lambda_det.errors import DataError
from lambda_det.files import replace_text

__all__ = ["WRITTEN", "polygons", "write_labels"]

logger = logging.getLogger(__name__)

WRITTEN = ("coco", "yolo", "voc", "labelme")


class _Object(NamedTuple):
    """An object: index and name of its class, its box x0, y0, x1, y1, and polygons or none."""

    index: int
    name: str
    box: Sequence[float]
    polygons: list[list[float]]
    score: float | None


def write_labels(
    content: Mapping[str, Any], kind: str, target: Path, images: str | os.PathLike
) -> None:
    """Write a data set as a file of COCO's format, or as a folder with a file for each picture.

    Args:
        content: of COCO's format, see :func:`lambda_det.detection.data.labels.read_labels`.
        kind: one of ``WRITTEN``.
        target: the file, or the folder; files that are there are replaced.
        images: the folder that the names of the pictures are relative to.

    Raises:
        DataError: two pictures have the same name but for its ending, or a file cannot be written.
    """
    try:
        if kind == "coco":
            target.parent.mkdir(parents=True, exist_ok=True)
            kept = [{k: v for k, v in a.items() if k != "source"} for a in content["annotations"]]
            lists = {key: value for key, value in content.items() if key != "info"}
            replace_text(target, json.dumps({**lists, "annotations": kept}))
        else:
            _write_folder(content, kind, target, Path(images))
    except OSError as error:
        raise DataError(
            f"{error.filename or target} cannot be written ({error.strerror})."
        ) from error


def _write_folder(content: Mapping[str, Any], kind: str, target: Path, images: Path) -> None:
    names = {category["id"]: category["name"] for category in content["categories"]}
    index = {number: place for place, number in enumerate(names)}
    suffix, write = _WRITERS[kind]
    objects: dict[int, list[_Object]] = {image["id"]: [] for image in content["images"]}
    crowds = 0
    for annotation in content["annotations"]:
        if annotation.get("iscrowd"):
            crowds += 1
            continue
        x, y, width, height = annotation["bbox"]
        number, mask = annotation["category_id"], annotation.get("segmentation") or []
        if isinstance(mask, dict):
            mask = polygons(pycocotools.mask.decode(mask))
        box, score = (x, y, x + width, y + height), annotation.get("score")
        found = _Object(index[number], names[number], box, mask, score)
        objects[annotation["image_id"]].append(found)
    if crowds:
        logger.warning(f"{crowds} crowds are left out, which {kind} has no word for")
    written: dict[Path, str] = {}
    for image in content["images"]:
        parts = Path(image["file_name"]).with_suffix(suffix)
        # A name may lead out of the folder of the pictures; the labels stay in theirs
        file = target.joinpath(*(p for p in parts.parts if p not in ("..", parts.anchor)))
        if file in written:
            raise DataError(
                f"{image['file_name']} and {written[file]} would both have their labels in {file}; "
                "give the pictures other names."
            )
        written[file] = image["file_name"]
        file.parent.mkdir(parents=True, exist_ok=True)
        place = os.path.relpath(images / image["file_name"], file.parent)
        file.write_text(write(image, objects[image["id"]], place), "utf-8")
    if kind == "yolo":
        text = yaml.safe_dump({"names": dict(enumerate(names.values()))}, allow_unicode=True)
        (target / "data.yaml").write_text(text, "utf-8")


def _yolo(image: Mapping[str, Any], objects: list[_Object], _: str) -> str:
    size, lines = np.array([image["width"], image["height"]]), []
    for one in objects:
        if one.polygons:
            outline = np.reshape(_joined(one.polygons), (-1, 2)) / size
        else:
            corners = np.clip(np.reshape(one.box, (2, 2)) / size, 0, 1)
            outline = np.array([corners.mean(0), corners[1] - corners[0]])
        numbers = " ".join(f"{value:.9g}" for value in outline.clip(0, 1).ravel())
        lines.append(f"{one.index} {numbers}\n")
    return "".join(lines)


def _joined(parts: list[list[float]]) -> list[float]:
    """One outline of several polygons: from corner to first corner, and back the same way."""
    if len(parts) == 1:
        return parts[0]
    there = [value for part in parts for value in (*part, *part[:2])]
    return there + [value for part in parts[-2::-1] for value in part[:2]]


def _voc(image: Mapping[str, Any], objects: list[_Object], _: str) -> str:
    root = ElementTree.Element("annotation")
    ElementTree.SubElement(root, "filename").text = image["file_name"]
    size = ElementTree.SubElement(root, "size")
    for key in ("width", "height"):
        ElementTree.SubElement(size, key).text = str(image[key])
    ElementTree.SubElement(size, "depth").text = "3"
    for one in objects:
        node = ElementTree.SubElement(root, "object")
        ElementTree.SubElement(node, "name").text = one.name
        for key in ("difficult", "truncated"):
            ElementTree.SubElement(node, key).text = "0"
        box = ElementTree.SubElement(node, "bndbox")
        for key, value in zip(("xmin", "ymin", "xmax", "ymax"), one.box, strict=True):
            ElementTree.SubElement(box, key).text = f"{value:.9g}"
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _labelme(image: Mapping[str, Any], objects: list[_Object], place: str) -> str:
    shapes = []
    for group, one in enumerate(objects):
        parts = one.polygons or [one.box]
        for part in parts:
            shape = {
                "label": one.name,
                "points": np.reshape(part, (-1, 2)).tolist(),
                "group_id": group if len(parts) > 1 else None,
                "shape_type": "polygon" if one.polygons else "rectangle",
                "flags": {},
            }
            shapes.append(shape if one.score is None else {**shape, "score": one.score})
    content = {
        "version": "5.5.0",
        "flags": {},
        "shapes": shapes,
        "imagePath": Path(place).as_posix(),
    }
    sides = {"imageData": None, "imageHeight": image["height"], "imageWidth": image["width"]}
    return json.dumps({**content, **sides}, ensure_ascii=False, indent=1)


_WRITERS = {"yolo": (".txt", _yolo), "voc": (".xml", _voc), "labelme": (".json", _labelme)}


def polygons(mask: np.ndarray) -> list[list[float]]:
    """The outlines of a mask [H, W] as polygons x0, y0, x1, y1, ... in COCO's coordinates.

    They run through the centres of the outer pixels. Holes are lost, and parts of one pixel's
    thickness are left out. Of a mask that would lose most of its area by that, the polygons run
    near the outer edges of its pixels.
    """
    outlines = _outlines(mask)
    if 4 * sum(map(cv2.contourArea, outlines)) >= mask.sum():
        return [(outline.reshape(-1) + 0.5).tolist() for outline in outlines]
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    part = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    finer = _outlines(part.repeat(_FINER, 0).repeat(_FINER, 1))
    corner = (columns[0], rows[0])
    return [((o.reshape(-1, 2) + 0.5) / _FINER + corner).ravel().tolist() for o in finer]


_FINER = 4  # parts of a pixel's side that thin masks are outlined in


def _outlines(mask: np.ndarray) -> list[np.ndarray]:
    """Contours [N, 1, 2] of the parts of a mask that have an area."""
    outlines, _ = cv2.findContours(
        np.ascontiguousarray(mask, np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE
    )
    return [outline for outline in outlines if cv2.contourArea(outline) > 0]
