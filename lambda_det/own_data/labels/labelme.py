"""LabelMe's JSON, a file for each image; and its shapes, which other formats resemble."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lambda_det.detection.data.coco_format import read_json
from lambda_det.detection.data.report import Report
from lambda_det.detection.data.truth import around
from lambda_det.errors import DataError
from lambda_det.own_data.labels.findings import (
    EMPTY_MASK,
    JOINED,
    NO_CLASS,
    unread_shape,
)
from lambda_det.own_data.labels.images import NamedImages
from lambda_det.own_data.labels.objects import (
    LabelledImage,
    LabelledObject,
    ellipse,
    of_mask,
    polygon,
    reading,
)
from lambda_det.own_data.labels.xml import stated_size

_IGNORED = "__ignore__"  # this is no class: LabelMe's own exporters leave it out
_NO_GROUP = (None, "", -1, "-1")  # as tools write that a shape stands alone
_OUTLINES = ("polygon", "rotation", "oriented_rectangle", "quadrilateral")  # also X-AnyLabeling's


def read_labelme(file: Path, _: NamedImages, report: Report) -> Iterator[LabelledImage]:
    content = read_json(str(file))
    shapes = content.get("shapes") or []
    if not isinstance(shapes, list):
        raise DataError(f"{file} has no list of shapes; write it again.")
    name = str(content.get("imagePath") or file.stem)
    size = stated_size(content.get("imageWidth"), content.get("imageHeight"))
    yield LabelledImage(file, name, objects_of(file, shapes, report, size), size)


def objects_of(
    file: Path,
    shapes: Iterable[Any],
    report: Report,
    size: tuple[int, int] | None = None,
    place: str = "",
    convert: Callable[[Any], dict[str, Any]] = dict,
) -> list[LabelledObject]:
    """The objects of shapes.

    Args:
        file: of the shapes.
        shapes: ``convert`` makes each of them a shape of LabelMe's.
        report: for shapes that are left out.
        size: width and height of the image, which masks of a part of it need.
        place: of the shapes in the file, for messages.
    """
    groups: dict[Any, list[LabelledObject]] = {}
    for number, shape in enumerate(shapes):
        where = f"{file}: {place}shape {number}"
        with reading(where):
            shape = convert(shape)
            label = "" if shape["label"] is None else str(shape["label"])
            if label == _IGNORED:
                report.add(NO_CLASS, where)
                continue
            thing = _object(label, shape, size, report, where)
        if thing is None:
            report.add(unread_shape(str(shape["shape_type"])), where)
            continue
        group = shape.get("group_id")  # the polygons of each object
        alone = group in _NO_GROUP or isinstance(thing.mask, dict)
        key = number if alone else (label, str(group))
        groups.setdefault(key, []).append(thing._replace(where=where))
    for objects in groups.values():
        if len(objects) > 1:
            report.add(JOINED, f"{objects[0].where} and {len(objects) - 1} more")
    return list(map(_joined, groups.values()))


def _object(
    label: str,
    shape: dict[str, Any],
    size: tuple[int, int] | None,
    report: Report,
    where: str,
) -> LabelledObject | None:
    """The object of a shape; None for a type that is not read."""
    form = shape.get("shape_type") or "polygon"
    points = np.array(shape["points"], float).reshape(-1, 2)
    if form == "circle":
        radius = np.hypot(*(points[1] - points[0]))
        return polygon(label, ellipse(points[0], radius, radius))
    if form in _OUTLINES:
        return polygon(label, points)
    if form == "mask":  # a PNG of a part of the image, which begins at the first point
        if shape.get("mask"):
            if size is None:
                raise ValueError("a mask needs imageWidth and imageHeight")
            pixels = np.array(Image.open(io.BytesIO(base64.b64decode(shape["mask"]))))
            corner = points[0].round().astype(int).tolist()
            if thing := of_mask(label, pixels > 0, corner, size):
                return thing
        report.add(EMPTY_MASK, where)
    if form in ("rectangle", "mask"):
        return LabelledObject(label, around([points.ravel().tolist()]))
    return None


def _joined(objects: list[LabelledObject]) -> LabelledObject:
    """One object of several polygons or rectangles."""
    if len(objects) == 1:
        return objects[0]
    masks = [one.mask for one in objects]
    polygons = [polygon for mask in masks for polygon in mask] if all(masks) else None
    return objects[0]._replace(box=around([one.box for one in objects]), mask=polygons)
