"""Pascal VOC's XML: a file for each image."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from lambda_det.detection.data.report import Report
from lambda_det.errors import DataError
from lambda_det.own_data.labels.findings import DIFFICULT
from lambda_det.own_data.labels.images import NamedImages
from lambda_det.own_data.labels.objects import LabelledImage, reading, turned_box
from lambda_det.own_data.labels.xml import line_of, read_xml, stated_size

_CORNER = re.compile(r"[xy]\d+")
_SIDES = ("xmin", "ymin", "xmax", "ymax")


def read_voc(file: Path, _: NamedImages, report: Report) -> Iterator[LabelledImage]:
    """Read a file. Corners are used as they are written, because today's tools do not add 1 as the
    VOC devkit does.
    """
    root, objects = read_xml(file), []
    for node in root.iter("object"):
        where = f"{file}, line {line_of(node)}"
        if node.find("bndbox") is None and node.find("polygon/pt") is not None:
            raise DataError(
                f"{where}: this is the XML of LabelMe's old page in the web, which is not read; "
                "write the points of its polygons as LabelMe's JSON."
            )
        with reading(f"{where}: an object", "it needs a name and a bndbox of four numbers"):
            corners = tuple(float(node.find(f"bndbox/{side}").text) for side in _SIDES)
            degrees = node.findtext("attributes/attribute[name='rotation']/value")  # of CVAT
            label = node.findtext("name", "").strip()
            thing = turned_box(label, corners, float(degrees or 0))
            if outline := _outline(node):
                thing = thing._replace(mask=[outline])
            objects.append(thing._replace(where=where))
        if (node.findtext("difficult") or "").strip().lower() not in ("", "0", "false"):
            report.add(DIFFICULT, where)
    name = (root.findtext("filename") or "").strip() or file.stem
    size = stated_size(root.findtext("size/width"), root.findtext("size/height"))
    yield LabelledImage(file, name, objects, size)


def _outline(node: ElementTree.Element) -> list[float]:
    """The polygon of an object, x1, y1, x2, y2 and so on, as Roboflow writes it; [] for none."""
    corners = [child for child in node.iterfind("polygon/*") if _CORNER.fullmatch(child.tag)]
    corners.sort(key=lambda child: (int(child.tag[1:]), child.tag))
    return [float(child.text) for child in corners]
