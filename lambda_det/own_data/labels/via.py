"""VIA's JSON (the VGG Image Annotator): a file for all images of a folder, or a project."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mode
from typing import Any

from lambda_det.detection.data.coco_format import read_json
from lambda_det.detection.data.report import Report
from lambda_det.own_data.labels.findings import ATTRIBUTE
from lambda_det.own_data.labels.images import NamedImages
from lambda_det.own_data.labels.labelme import objects_of
from lambda_det.own_data.labels.objects import LabelledImage, ellipse, reading


def read_via(file: Path, _: NamedImages, report: Report) -> Iterator[LabelledImage]:
    content = read_json(str(file))
    with reading(file, "export it again as JSON"):
        entries = [
            (str(entry["filename"]), _regions(entry.get("regions") or ()))
            for entry in content.get("_via_img_metadata", content).values()
        ]
    found = []  # the place of each object, and the attribute of which its class is, with that
    for name, regions in entries:
        objects = objects_of(file, regions, report, None, f"{name}, ", _shape)
        for number, region in enumerate(regions):
            found.append((f"{file}: {name}, shape {number}", *_class(region)))
        yield LabelledImage(file, name, objects)
    usual = mode(attribute for _, attribute, _ in found) if found else ""
    for where, attribute, label in found:
        if attribute != usual:
            words = f"{label!r} is of {attribute!r}" if attribute else "it has no class"
            report.add(ATTRIBUTE, f"{where}: {words}")


def _regions(regions: Any) -> list[Any]:
    """The regions; the first version has them in an object, by their numbers."""
    return list(regions.values() if isinstance(regions, dict) else regions)


def _class(region: dict[str, Any]) -> tuple[str, str]:
    """The first attribute with a value, and that value, which is the class; or "" and "object"."""
    for attribute, value in (region.get("region_attributes") or {}).items():
        if isinstance(value, dict):  # a checkbox for each class
            value = next((key for key, is_ticked in value.items() if is_ticked), "")
        if text := str(value or "").strip():
            return attribute, text
    return "", "object"


def _shape(region: dict[str, Any]) -> dict[str, Any]:
    """Make a shape of LabelMe's."""
    shape, label = region["shape_attributes"], _class(region)[1]
    form, columns = shape["name"], [shape.get(f"all_points_{x}", ()) for x in "xy"]
    if len(columns[0]) != len(columns[1]):
        raise ValueError("all_points_x and all_points_y are of different lengths")
    points = list(zip(*columns, strict=True))
    if form == "rect":
        x, y = shape["x"], shape["y"]
        form, points = "rectangle", [[x, y], [x + shape["width"], y + shape["height"]]]
    elif form in ("circle", "ellipse"):
        form, radii = "polygon", (shape.get(f"r{x}", shape.get("r")) for x in "xy")
        points = ellipse((shape["cx"], shape["cy"]), *radii, shape.get("theta", 0))
    return {"label": label, "points": points, "shape_type": form}
