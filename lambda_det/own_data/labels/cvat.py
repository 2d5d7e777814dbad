"""CVAT's XML for images: a file for all images of a task or project."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from lambda_det.detection.data.report import Report
from lambda_det.detection.data.truth import MAX_PIXELS, around
from lambda_det.errors import DataError
from lambda_det.own_data.labels.findings import unread_shape
from lambda_det.own_data.labels.images import NamedImages
from lambda_det.own_data.labels.objects import (
    LabelledImage,
    LabelledObject,
    ellipse,
    of_mask,
    polygon,
    reading,
    turned_box,
)
from lambda_det.own_data.labels.xml import line_of, read_xml, stated_size


def read_cvat(file: Path, _: NamedImages, report: Report) -> Iterator[LabelledImage]:
    nodes = list(read_xml(file).iter("image"))
    if not nodes:
        raise DataError(f"{file} has no image; export it as CVAT for images 1.1, not for video.")
    for node in nodes:
        size = stated_size(node.get("width"), node.get("height"))
        objects = []
        for shape in node:
            where = f"{file}, line {line_of(shape)}"
            with reading(f"{where}: a {shape.tag}", "export it again as CVAT for images 1.1"):
                thing = _object(shape, size)
            if thing:
                objects.append(thing._replace(where=where))
            else:
                report.add(unread_shape(shape.tag), where)
        yield LabelledImage(file, node.get("name", ""), objects, size, node.get("subset", ""))


def _object(shape: ElementTree.Element, size: tuple[int, int] | None) -> LabelledObject | None:
    """The object of a shape in an image of a given size; None for a type that is not read."""
    value = shape.attrib
    degrees = float(value.get("rotation", 0))
    if shape.tag == "box":
        box = tuple(float(value[key]) for key in ("xtl", "ytl", "xbr", "ybr"))
        return turned_box(value["label"], box, degrees)
    if shape.tag == "polygon":
        return polygon(value["label"], (point.split(",") for point in value["points"].split(";")))
    if shape.tag == "ellipse":
        x, y, rx, ry = (float(value[key]) for key in ("cx", "cy", "rx", "ry"))
        return polygon(value["label"], ellipse((x, y), rx, ry, math.radians(degrees)))
    if shape.tag == "cuboid":  # the corners of the front and the back
        points = [float(value[f"{axis}{at}"]) for at in _CUBOID for axis in "xy"]
        return LabelledObject(value["label"], around([points]))
    if shape.tag == "mask":  # runs of a part of the image, row by row, beginning with zeros
        left, top, width, height = (int(value[key]) for key in ("left", "top", "width", "height"))
        runs = [int(run) for run in value["rle"].split(",")]
        if sum(runs) != width * height or sum(runs) > MAX_PIXELS:
            raise ValueError(f"its runs are of {sum(runs)} pixels")
        pixels = np.repeat(np.arange(len(runs)) % 2, runs).reshape(height, width)
        return of_mask(value["label"], pixels, (left, top), size)
    return None


_CUBOID = ("tl1", "bl1", "tr1", "br1", "tl2", "bl2", "tr2", "br2")
