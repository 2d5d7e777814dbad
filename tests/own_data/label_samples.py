"""A sample of each label format: the same images and boxes, written as that format has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 40, 30  # of each image

# The objects of each image, by its name: the class, and the four numbers that the format writes
# for a box
Objects = Mapping[str, Sequence[tuple[str, Sequence[float]]]]


def _coco(folder: Path, objects: Objects) -> None:
    classes = _classes(objects)
    images = [
        {"id": number, "file_name": name, "width": WIDTH, "height": HEIGHT}
        for number, name in enumerate(objects, 1)
    ]
    boxes = [
        (number, classes.index(label) + 1, numbers)
        for number, things in enumerate(objects.values(), 1)
        for label, numbers in things
    ]
    annotations = [
        {"id": number, "image_id": image, "category_id": category, "bbox": list(box)}
        for number, (image, category, box) in enumerate(boxes, 1)
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(classes, 1)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "labels.json").write_text(json.dumps(content), "utf-8")


def _yolo(folder: Path, objects: Objects) -> None:
    (folder / "data.yaml").write_text(f"names: {json.dumps(_classes(objects))}\n", "utf-8")
    _yolo_lines(folder, objects)


def _yolo_with_names(folder: Path, objects: Objects) -> None:
    (folder / "classes.txt").write_text("\n".join(_classes(objects)), "utf-8")
    _yolo_lines(folder, objects)


def _yolo_lines(folder: Path, objects: Objects) -> None:
    classes = _classes(objects)
    for name, things in objects.items():
        lines = [f"{classes.index(label)} {' '.join(map(str, box))}" for label, box in things]
        (folder / name).with_suffix(".txt").write_text("\n".join(lines))


def _cvat(folder: Path, objects: Objects) -> None:
    keys = ("xtl", "ytl", "xbr", "ybr")
    nodes = [
        f'<image name="{name}" width="{WIDTH}" height="{HEIGHT}">'
        + "".join(f'<box label="{label}" {_attributes(keys, box)}/>' for label, box in things)
        + "</image>"
        for name, things in objects.items()
    ]
    text = f"<annotations>{''.join(nodes)}</annotations>"
    (folder / "annotations.xml").write_text(text, "utf-8")


def _voc(folder: Path, objects: Objects) -> None:
    keys = ("xmin", "ymin", "xmax", "ymax")
    for name, things in objects.items():
        nodes = [
            f"<object><name>{label}</name><bndbox>"
            + "".join(f"<{key}>{number}</{key}>" for key, number in zip(keys, box, strict=True))
            + "</bndbox></object>"
            for label, box in things
        ]
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height></size>"
        text = f"<annotation><filename>{name}</filename>{size}{''.join(nodes)}</annotation>"
        (folder / name).with_suffix(".xml").write_text(text, "utf-8")


def _labelme(folder: Path, objects: Objects) -> None:
    for name, things in objects.items():
        shapes = [
            {"label": label, "points": [box[:2], box[2:]], "shape_type": "rectangle"}
            for label, box in things
        ]
        content = {"imagePath": name, "imageWidth": WIDTH, "imageHeight": HEIGHT, "shapes": shapes}
        (folder / name).with_suffix(".json").write_text(json.dumps(content), "utf-8")


def _via(folder: Path, objects: Objects) -> None:
    keys = ("x", "y", "width", "height")
    content = {
        f"{name}9": {
            "filename": name,
            "regions": [
                {
                    "region_attributes": {"class": label},
                    "shape_attributes": {"name": "rect", **dict(zip(keys, box, strict=True))},
                }
                for label, box in things
            ],
        }
        for name, things in objects.items()
    }
    (folder / "via.json").write_text(json.dumps(content), "utf-8")


# By the names of FORMATS
SAMPLES: dict[str, Callable[[Path, Objects], None]] = {
    "COCO": _coco,
    "YOLO": _yolo,
    "YOLO with a list of names": _yolo_with_names,
    "CVAT": _cvat,
    "Pascal VOC": _voc,
    "LabelMe": _labelme,
    "VIA": _via,
}


def write_sample(name: str, folder: Path, objects: Objects) -> Path:
    """Write images and their labels in a format; returns the folder."""
    folder.mkdir(parents=True)
    for image in objects:
        # no two images are alike, as copies in two parts would be found
        noise = np.random.default_rng([ord(letter) for letter in image])
        pixels = noise.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
        Image.fromarray(pixels).save(folder / image)
    SAMPLES[name](folder, objects)
    return folder


def _classes(objects: Objects) -> list[str]:
    return sorted({label for things in objects.values() for label, _ in things})


def _attributes(keys: Sequence[str], numbers: Sequence[float]) -> str:
    return " ".join(f'{key}="{number}"' for key, number in zip(keys, numbers, strict=True))
