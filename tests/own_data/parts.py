"""Small data sets in each format of labels, and the parts that are found in them.

An object is its class, and the four numbers that the format writes for a box.
"""

import io
import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
from detectron2.structures import BoxMode
from PIL import Image

from lambda_det.own_data import layouts
from lambda_det.own_data.labels import conversion
from tests.coco import coco_content

SIZE = (40, 30)  # of each image
BOX = ("cup", (1, 2, 11, 7))  # in corners
YAML = "names: [cup, key]\n"
LINE = "0 .5 .5 .5 .5\n"
_TEMPORARY = tempfile.TemporaryDirectory()


def temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=_TEMPORARY.name))


def find_parts(*places):
    """The parts of a data set, whose converted labels go to a folder of the tests."""
    name, parts, _ = layouts.find_parts(*places, folder=temporary_folder())
    return name, [*parts.values()]


def read_labels(place, images=None):
    """Labels in COCO's format, whose images are among them by default."""
    return conversion.read_labels(place, images or place)


def image(name="", size=SIZE):
    """An image unlike that of any other name."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 255, (3, 4, 3), np.uint8)
    return Image.fromarray(noise).resize(size)


def encoded(image, ending="png", **options):
    buffer = io.BytesIO()
    image.save(buffer, {"jpg": "JPEG", "png": "PNG"}[ending.lower()], **options)
    return buffer.getvalue()


def make(root, files):
    """Files of a data set; an image without content is made by its name."""
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        ending = name.rpartition(".")[2]
        if not content and ending.lower() in ("png", "jpg"):
            content = encoded(image(name), ending)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def cups(*names):
    """Images with a cup each."""
    return dict.fromkeys(names, (BOX,))


def classes_of(images):
    return sorted({label for things in images.values() for label, _ in things})


def coco(images, **more):
    classes = classes_of(images)
    boxes = [(n, *thing) for n, things in enumerate(images.values(), 1) for thing in things]
    annotations = [
        {"id": n, "image_id": image, "category_id": classes.index(label) + 1, "bbox": list(box)}
        for n, (image, label, box) in enumerate(boxes, 1)
    ]
    content = coco_content(
        dict(enumerate(images, 1)), annotations, dict(enumerate(classes, 1)), SIZE
    )
    return json.dumps({**more, **content})


def yolo(images):
    """The label files."""
    classes = classes_of(images)
    return {
        str(Path(name).with_suffix(".txt")): "".join(
            f"{classes.index(label)} {' '.join(map(str, box))}\n" for label, box in things
        )
        for name, things in images.items()
    }


def voc(name, *things, size=SIZE, more=""):
    """The second line and those behind it have an object each."""
    objects = "".join(
        f"<object><name>{label}</name>{more}<bndbox><xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax>"
        f"<ymax>{d}</ymax></bndbox></object>\n"
        for label, (a, b, c, d) in things
    )
    stated = f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
    return f"<annotation><filename>{name}</filename>{stated}\n{objects}</annotation>"


def cvat(images):
    text = ""
    for name, things in images.items():
        text += f'<image name="{name}" width="{SIZE[0]}" height="{SIZE[1]}">'
        for label, (a, b, c, d) in things:
            text += f'<box label="{label}" xtl="{a}" ytl="{b}" xbr="{c}" ybr="{d}"/>'
        text += "</image>"
    return f"<annotations>{text}</annotations>"


def shape(form="rectangle", points=((1, 2), (11, 7)), label="cup", **more):
    """Of LabelMe."""
    return {"label": label, "points": points, "shape_type": form, **more}


def labelme(name, *shapes, **more):
    """At first with a cup."""
    content = {"imagePath": name, "imageWidth": SIZE[0], "imageHeight": SIZE[1], **more}
    return json.dumps({**content, "shapes": shapes or [shape()]} | more)


def region(label, x, y, width, height):
    """Of VIA."""
    box = {"name": "rect", "x": x, "y": y, "width": width, "height": height}
    return {"shape_attributes": box, "region_attributes": {"kind": label} if label else {}}


def via(images):
    return json.dumps(
        {
            f"{name}9": {
                "filename": name,
                "regions": [region(label, *box) for label, box in things],
            }
            for name, things in images.items()
        }
    )


def boxes(content):
    """The class and the box of each object."""
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    return [(names[a["category_id"]], a["bbox"]) for a in content["annotations"]]


def record(sizes, size=(200, 200), classes=(0,), name="a.png"):
    """The dataset dict of an image with boxes of these widths and heights, and classes in turn."""
    of_each = {"bbox_mode": BoxMode.XYWH_ABS, "iscrowd": 0}
    annotations = [
        {**of_each, "bbox": [1, 1, *sides], "category_id": classes[n % len(classes)]}
        for n, sides in enumerate(sizes)
    ]
    width, height = size
    return {"file_name": name, "width": width, "height": height, "annotations": annotations}
