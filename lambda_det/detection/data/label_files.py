"""Content of COCO's format written as labels of other tools: YOLO, Pascal VOC, LabelMe and CVAT."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape, quoteattr

import cv2
import numpy as np
import pycocotools.mask
import yaml

from lambda_det.errors import DataError, refused
from lambda_det.files import relative_path, replace_text

__all__ = ["WRITTEN", "place_labels", "polygons", "write_labels"]

logger = logging.getLogger(__name__)

WRITTEN = ("coco", "yolo", "voc", "labelme", "cvat")
_VOC = """<annotation>
  <filename>{}</filename>
  <size><width>{}</width><height>{}</height><depth>3</depth></size>
{}</annotation>
"""
_VOC_OBJECT = """  <object>
    <name>{}</name><truncated>0</truncated><difficult>0</difficult>
    <bndbox>
      <xmin>{:.9g}</xmin><ymin>{:.9g}</ymin><xmax>{:.9g}</xmax><ymax>{:.9g}</ymax>
    </bndbox>
  </object>
"""


class _Object(NamedTuple):
    """An object: its class, its corners x0, y0, x1, y1, and polygons, of which a box has none."""

    index: int
    name: str
    box: tuple[float, ...]
    outline: list[list[float]]
    score: float | None


def write_labels(
    content: Mapping[str, Any],
    kind: str,
    target: Path,
    images: str | os.PathLike,
    sources: Mapping[str, Path] | None = None,
) -> None:
    """Write a data set as a file of COCO's format, or as a folder with a file for each picture,
    or, for CVAT, for all of them.

    Args:
        content: of COCO's format, see :func:`lambda_det.own_data.labels.read_labels`.
        kind: one of ``WRITTEN``.
        target: the file, or the folder; files that are there are replaced.
        images: the folder that the names of the pictures are relative to.
        sources: the files of pictures that are elsewhere, by their names.

    Raises:
        DataError: two pictures have the same name but for its ending, or a file cannot be written.
    """
    with refused(DataError, f"{target} cannot be written", "", OSError, ValueError):  # bad names
        if kind == "coco":
            kept = {key: value for key, value in content.items() if key != "info"}
            for annotation in kept["annotations"]:
                annotation.pop("source", None)
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_text(target, json.dumps(kept))
        else:
            _write_folder(content, kind, target, Path(images), sources or {})


def place_labels(names: Iterable[str], kind: str, target: Path) -> dict[str, Path]:
    """The file of labels of each picture by its name.

    Raises:
        DataError: two pictures have the same name but for its ending.
    """
    if kind == "cvat":
        return dict.fromkeys(names, target / "annotations.xml")
    taken: dict[Path, str] = {}
    for given in names:
        name = Path(given).with_suffix(_WRITERS[kind][0])
        # A name may lead out of the folder of the pictures; the labels stay in theirs
        file = target.joinpath(*(part for part in name.parts if part not in ("..", name.anchor)))
        if file in taken:
            raise DataError(
                f"{given} and {taken[file]} would both have their labels in {file}; give the "
                "pictures other names."
            )
        taken[file] = given
    return {name: file for file, name in taken.items()}


def _write_folder(
    content: Mapping[str, Any],
    kind: str,
    target: Path,
    images: Path,
    sources: Mapping[str, Path],
) -> None:
    names = {category["id"]: category["name"] for category in content["categories"]}
    objects: dict[int, list[_Object]] = {image["id"]: [] for image in content["images"]}
    things = [one for one in content["annotations"] if not one.get("iscrowd")]
    if crowds := len(content["annotations"]) - len(things):
        logger.warning(f"{crowds} crowds are left out of {kind}")
    for one in things:
        (x, y, width, height), mask = one["bbox"], one.get("segmentation") or []
        outline = polygons(pycocotools.mask.decode(mask)) if isinstance(mask, dict) else mask
        index, name = list(names).index(one["category_id"]), names[one["category_id"]]
        box = (x, y, x + width, y + height)
        objects[one["image_id"]].append(_Object(index, name, box, outline, one.get("score")))
    files = place_labels((image["file_name"] for image in content["images"]), kind, target)
    texts: dict[Path, str] = {}
    for image in content["images"]:
        file = files[name := image["file_name"]]
        place = relative_path(sources.get(name, images / name), file.parent)
        texts[file] = texts.get(file, "") + _WRITERS[kind][1](image, objects[image["id"]], place)
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_CVAT.format(text) if kind == "cvat" else text, "utf-8")
    if kind == "yolo":
        text = yaml.safe_dump({"names": dict(enumerate(names.values()))}, allow_unicode=True)
        (target / "data.yaml").write_text(text, "utf-8")


def _yolo(image: Mapping[str, Any], objects: list[_Object], _: str) -> str:
    size, lines = np.array([image["width"], image["height"]]), []
    for one in objects:
        corners = np.clip(np.reshape(one.box, (2, 2)) / size, 0, 1)
        points = np.array([corners.mean(0), corners[1] - corners[0]])
        if one.outline:
            # In one piece: from part to part by their first corners, and back the same way
            back = [part[:2] for part in one.outline[-2::-1]]
            there = [[*part, *part[:2]] if back else part for part in one.outline]
            points = (np.concatenate([*there, *back]).reshape(-1, 2) / size).clip(0, 1)
        numbers = " ".join(f"{value:.9g}" for value in points.ravel())
        lines.append(f"{one.index} {numbers}\n")
    return "".join(lines)


def _voc(image: Mapping[str, Any], objects: list[_Object], _: str) -> str:
    nodes = "".join(_VOC_OBJECT.format(escape(one.name), *one.box) for one in objects)
    return _VOC.format(escape(image["file_name"]), image["width"], image["height"], nodes)


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
    content = {"version": "5.5.0", "flags": {}, "shapes": shapes, "imagePath": place}
    content |= {"imageData": None, "imageHeight": image["height"], "imageWidth": image["width"]}
    return json.dumps(content, ensure_ascii=False, indent=1)


def _cvat(image: Mapping[str, Any], objects: list[_Object], _: str) -> str:
    names = ("id", "file_name", "width", "height")
    values = (quoteattr(str(image[name])) for name in names)
    shapes = "".join(f"    {_cvat_shape(image, one)}\n" for one in objects)
    return "  <image id={} name={} width={} height={}>\n{}  </image>\n".format(*values, shapes)


def _cvat_shape(image: Mapping[str, Any], one: _Object) -> str:
    label = f'label={quoteattr(one.name)} occluded="0"'
    if not one.outline:
        box = '<box {} xtl="{:.9g}" ytl="{:.9g}" xbr="{:.9g}" ybr="{:.9g}"/>'
        return box.format(label, *one.box)
    if len(one.outline) == 1:
        points = ";".join(f"{x:.9g},{y:.9g}" for x, y in np.reshape(one.outline[0], (-1, 2)))
        return f'<polygon {label} points="{points}"/>'
    # Several polygons are a mask: runs of its part of the image, row by row, from zeros on
    parts = pycocotools.mask.frPyObjects(one.outline, image["height"], image["width"])
    mask = pycocotools.mask.decode(pycocotools.mask.merge(parts))
    if not mask.any():  # parts too thin for a pixel
        return _cvat_shape(image, one._replace(outline=one.outline[:1]))
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    part = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    ends = np.flatnonzero(np.diff(part.ravel(), prepend=0, append=2))
    runs = ", ".join(map(str, np.diff(ends, prepend=0)))
    height, width = part.shape
    place = f'left="{columns[0]}" top="{rows[0]}" width="{width}" height="{height}"'
    return f'<mask {label} rle="{runs}" {place}/>'


_CVAT = '<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n{}</annotations>\n'
_WRITERS = {
    "yolo": (".txt", _yolo),
    "voc": (".xml", _voc),
    "labelme": (".json", _labelme),
    "cvat": (".xml", _cvat),
}


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
