"""Pascal VOC's XML: a file for each picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lambda_det.own_data.labels.findings import DIFFICULT, Findings
from lambda_det.own_data.labels.objects import LabelledObject, LabelledPicture, reading
from lambda_det.own_data.labels.pictures import Pictures
from lambda_det.own_data.labels.xml import line_of, read_xml, stated_size

_SIDES = ("xmin", "ymin", "xmax", "ymax")


def read_voc(file: Path, _: Pictures, findings: Findings) -> Iterator[LabelledPicture]:
    """Read a file. Corners are used as they are written, because today's tools do not add 1 as the
    VOC devkit does.
    """
    root, objects = read_xml(file), []
    for node in root.iter("object"):
        where = f"{file}, line {line_of(node)}"
        with reading(f"{where}: an object", "it needs a name and a bndbox of four numbers"):
            corners = tuple(float(node.find(f"bndbox/{side}").text) for side in _SIDES)
            objects.append(LabelledObject(node.find("name").text.strip(), corners, where=where))
        if (node.findtext("difficult") or "").strip().lower() not in ("", "0", "false"):
            findings.add(DIFFICULT, where)
    name = (root.findtext("filename") or "").strip() or file.stem
    size = stated_size(root.findtext("size/width"), root.findtext("size/height"))
    yield LabelledPicture(file, name, objects, size)
