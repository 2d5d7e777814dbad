"""What holds for every row of the table of label formats, by a sample of each; and the shapes of
each that are not boxes.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pycocotools.mask
import pytest
from PIL import Image

from lambda_det.detection.data.box_form import numbers_of
from lambda_det.errors import DataError
from lambda_det.own_data.command_line import main as check
from lambda_det.own_data.labels import FORMATS, as_coco, read_labels, recognise
from tests.own_data.parts import find_parts

# -------------------------------------------------------------------------- a sample of each format
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


# ------------------------------------------------------------------------------ what holds for each
PAGE = Path(__file__).resolve().parents[2] / "datasets" / "README.md"
# In COCO's form. An image without an object has labels, too
OBJECTS = {
    "one.png": [("cup", [1, 2, 10, 5]), ("a key", [20.5, 10, 12, 18])],
    "none.png": [],
    "größe 3.png": [("cup", [0, 0, 40, 30])],
}


def written(name, objects):
    """The objects with the numbers that a format writes for their boxes."""
    form, size = FORMATS[name].boxes, np.array([[WIDTH, HEIGHT]])
    return {
        image: [
            (label, numbers_of(form, np.array([box]), size)[0].tolist()) for label, box in things
        ]
        for image, things in objects.items()
    }


def images_and_boxes(content):
    """The objects of a file in COCO's format, as OBJECTS has them."""
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    boxes = {image["id"]: [] for image in content["images"]}
    for annotation in content["annotations"]:
        label = names[annotation["category_id"]]
        boxes[annotation["image_id"]].append((label, pytest.approx(annotation["bbox"], abs=1e-4)))
    return {image["file_name"]: boxes[image["id"]] for image in content["images"]}


def test_each_format_has_a_sample_and_a_row_of_the_page():
    assert SAMPLES.keys() == FORMATS.keys(), "SAMPLES of this file has a sample of each format"
    page = PAGE.read_text("utf-8")
    names = [name.removesuffix(" with a list of names") for name in FORMATS]
    missing = [name for name in names if f"| {name}" not in page]
    assert missing == [], f"the table of label formats in {PAGE} has a row for each"


@pytest.mark.parametrize("name", FORMATS)
def test_boxes_come_in_pixels_from_the_form_that_the_table_names(name, tmp_path):
    folder = write_sample(name, tmp_path / "set", written(name, OBJECTS))
    assert recognise(folder)[0] == name
    (file,) = as_coco((str(folder), str(folder)), folder=tmp_path)
    assert images_and_boxes(json.loads(Path(file).read_text("utf-8"))) == OBJECTS


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "COCO"])
def test_classes_of_a_run_stand_in_place_of_those_of_labels(name, tmp_path):
    """A name that no object has is no class, as data.yaml may list; an object's must be there."""
    folder = write_sample(name, tmp_path / "set", written(name, OBJECTS))
    classes = ["a key", "pen", "cup"]
    (file,) = as_coco((str(folder), str(folder)), folder=tmp_path, classes=classes)
    content = json.loads(Path(file).read_text("utf-8"))
    assert [entry["name"] for entry in content["categories"]] == classes
    assert images_and_boxes(content) == OBJECTS
    many = [f"class {number}" for number in range(20)]
    with pytest.raises(DataError, match=r"set\S* has objects of a key, cup.*\(class 0, "):
        as_coco((str(folder), str(folder)), folder=tmp_path, classes=many)


# a file of YOLO's names the folders of its parts, see test_layouts.py
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "YOLO"])
def test_folders_of_parts_are_parts_and_their_labels_sound(name, tmp_path, capsys):
    for part in ("train", "valid", "test"):
        objects = {f"{part} {image}": things for image, things in OBJECTS.items()}
        write_sample(name, tmp_path / "set" / part, written(name, objects))
    label_format, parts = find_parts(tmp_path / "set")
    assert label_format == name
    for part, found in zip(("train", "valid", "test"), parts, strict=True):
        content = json.loads(found.labels.read_text("utf-8"))
        assert {Path(image["file_name"]).name for image in content["images"]} == {
            f"{part} {image}" for image in OBJECTS
        }
    assert check([str(tmp_path / "set")]) == 0, capsys.readouterr()


# ------------------------------------------------------------------------ shapes that are not boxes
CVAT = """<annotations><image id="0" name="sub/größe 1.png" width="40" height="30">
<box label="a" xtl="1" ytl="2" xbr="11" ybr="7"/>
<box label="b" xtl="10" ytl="10" xbr="20" ybr="20" rotation="90"/>
<polygon label="a" points="1,1;5,1;5,4"/>
<mask label="b" left="3" top="2" width="2" height="2" rle="1,3"/>
<points label="a" points="1,1"/></image></annotations>"""


def image(file, size=(40, 30)):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(file)


def boxes(content):
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    return [(names[a["category_id"]], a["bbox"]) for a in content["annotations"]]


def test_cvat(tmp_path):
    image(tmp_path / "sub" / "größe 1.png")
    (tmp_path / "annotations.xml").write_text(CVAT, "utf-8")
    content = read_labels(tmp_path)
    assert content["images"][0]["file_name"] == "sub/größe 1.png"
    plain, turned, triangle, mask = content["annotations"]
    assert plain["bbox"] == [1, 2, 10, 5] and "segmentation" not in plain
    assert turned["bbox"] == pytest.approx([10, 10, 10, 10]) and turned["segmentation"]
    assert triangle["segmentation"] == [[1, 1, 5, 1, 5, 4]] and triangle["bbox"] == [1, 1, 4, 3]
    assert mask["bbox"] == [3, 2, 2, 2]
    found = pycocotools.mask.decode(mask["segmentation"])
    assert found.shape == (30, 40) and found[2:4, 3:5].tolist() == [[0, 1], [1, 1]]


def test_a_box_turns_clockwise_as_in_cvat(tmp_path):
    """By 45 degrees the corner at the upper left comes to the top."""
    image(tmp_path / "a.png")
    box = '<box label="a" xtl="10" ytl="10" xbr="20" ybr="12" rotation="90"/>'
    (tmp_path / "a.xml").write_text(f'<annotations><image name="a.png">{box}</image></annotations>')
    (one,) = read_labels(tmp_path)["annotations"]
    assert one["bbox"] == pytest.approx([14, 6, 2, 10])
    assert one["segmentation"][0][:2] == pytest.approx([16, 6])  # was the upper left


def test_turned_boxes_of_cvat_and_polygons_of_roboflow_in_pascal_voc(tmp_path):
    image(tmp_path / "a.png")
    numbers = {"x1": 10, "y1": 10, "x2": 20, "y2": 10, "x3": 15, "y3": 12}
    corners = "".join(f"<{key}>{number}</{key}>" for key, number in numbers.items())
    words = "<attributes><attribute><name>{}</name><value>{}</value></attribute></attributes>"
    box = "<bndbox><xmin>10</xmin><ymin>10</ymin><xmax>20</xmax><ymax>12</ymax></bndbox>"
    things = [words.format("rotation", "90.0"), words.format("rotation", "0.0")]
    things += ["", f"<polygon>{corners}</polygon>", "<polygon><pt><x>1</x></pt></polygon>"]
    objects = "".join(f"<object><name>a</name>{box}{thing}</object>" for thing in things)
    (tmp_path / "a.xml").write_text(f"<annotation><filename>a.png</filename>{objects}</annotation>")
    content = read_labels(tmp_path)
    expected = [[14, 6, 2, 10]] + 4 * [[10, 10, 10, 2]]
    assert [a["bbox"] for a in content["annotations"]] == [pytest.approx(b) for b in expected]
    masks = [a.get("segmentation") for a in content["annotations"]]
    assert masks[0] and masks[1:3] == [None, None] and masks[4] is None
    assert masks[3] == [[10, 10, 20, 10, 15, 12]]


def test_labelme(tmp_path):
    image(tmp_path / "a.png")
    shapes = [
        {"label": "a", "points": [[11, 7], [1, 2]], "shape_type": "rectangle"},
        {"label": "b", "points": [[0, 0], [4, 0], [4, 4]], "shape_type": "polygon", "group_id": 7},
        {"label": "b", "points": [[8, 8], [9, 8], [9, 9]], "shape_type": "polygon", "group_id": 7},
        {"label": "a", "points": [[10, 10], [13, 14]], "shape_type": "circle"},
        {"label": "a", "points": [[10, 10]], "shape_type": "point"},
        {"label": "__ignore__", "points": [[1, 1], [9, 1], [9, 9]], "shape_type": "polygon"},
    ]
    (tmp_path / "a.json").write_text(json.dumps({"imagePath": "..\\x\\a.png", "shapes": shapes}))
    content = read_labels(tmp_path)
    assert boxes(content)[:2] == [("a", [1, 2, 10, 5]), ("b", [0, 0, 9, 9])]
    assert len(content["annotations"][1]["segmentation"]) == 2
    assert content["annotations"][2]["bbox"] == pytest.approx([5, 5, 10, 10])
    areas = [annotation["area"] for annotation in content["annotations"]]
    assert areas == pytest.approx([50, 8.5, 25 * 16 * np.sin(np.pi / 16)])
    assert [category["name"] for category in content["categories"]] == ["a", "b"]


def test_labelme_masks(tmp_path):
    """A PNG of a part of the image, from the upper left corner of its box on."""
    image(tmp_path / "a.png")
    png = io.BytesIO()
    Image.fromarray(np.array([[0, 1], [1, 1]], bool)).save(png, "PNG")
    shape = {"label": "a", "points": [[3, 2], [4, 3]], "shape_type": "mask"}
    shape["mask"] = base64.b64encode(png.getvalue()).decode()
    content = {"imagePath": "a.png", "shapes": [shape]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"a\.json: shape 0 .*imageWidth"):
        read_labels(tmp_path)
    content |= {"imageWidth": WIDTH, "imageHeight": HEIGHT}
    (tmp_path / "a.json").write_text(json.dumps(content))
    (one,) = read_labels(tmp_path)["annotations"]
    found = pycocotools.mask.decode(one["segmentation"])
    assert found.shape == (30, 40) and found[2:4, 3:5].tolist() == [[0, 1], [1, 1]]
    assert found.sum() == 3 == one["area"] and one["bbox"] == [3, 2, 2, 2]


def test_via(tmp_path):
    """Of a folder, and of a project; a class is the first attribute that has a value."""
    image(tmp_path / "a.png")
    corners = {"all_points_x": [0, 4, 4], "all_points_y": [0, 0, 4]}
    ticked, turned = {"type": {"b": False, "c": True}}, {"rx": 8, "ry": 2, "theta": np.pi / 6}
    shapes = [
        ({"name": "rect", "x": 1, "y": 2, "width": 10, "height": 5}, {"kind": "", "type": "a"}),
        ({"name": "polygon", **corners}, ticked),
        ({"name": "circle", "cx": 10, "cy": 10, "r": 5}, {}),
        ({"name": "ellipse", "cx": 20, "cy": 10, **turned}, {"a": " ", "name": "d", "type": "e"}),
        ({"name": "polyline", **corners}, ticked),
    ]
    regions = [{"shape_attributes": s, "region_attributes": a} for s, a in shapes]
    for kind in (list, lambda regions: {str(n): region for n, region in enumerate(regions)}):
        entry = {"filename": "a.png", "regions": kind(regions), "file_attributes": {}}
        content = {"a.png9": entry}
        if kind is list:
            content = {"_via_settings": {}, "_via_img_metadata": content}
        (tmp_path / "a.json").write_text(json.dumps(content))
        content = read_labels(tmp_path)
        assert [name for name, _ in boxes(content)] == ["a", "c", "object", "d"]
        found = [box for _, box in boxes(content)][:3]
        assert np.allclose(found, [[1, 2, 10, 5], [0, 0, 4, 4], [5, 5, 10, 10]])
        assert content["annotations"][3]["segmentation"][0][:2] == pytest.approx([20 + 48**0.5, 14])


def test_yolo_polygons(tmp_path):
    image(tmp_path / "a.png")
    (tmp_path / "data.yaml").write_text("names: {'0': x, 3: y}\n", "utf-8-sig")
    (tmp_path / "b.yaml").write_text("names: [another]\n")
    (tmp_path / "a.txt").write_text("0 0.1 0.1 0.5 0.1 0.5 0.5\n\n")
    content = read_labels(tmp_path)
    (one,) = content["annotations"]
    assert [category["name"] for category in content["categories"]] == ["x", "y"]
    assert one["segmentation"][0] == pytest.approx([4, 3, 20, 3, 20, 15])
