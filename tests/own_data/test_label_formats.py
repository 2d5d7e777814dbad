"""What holds for every row of the table of label formats, by a sample of each; and the shapes of
each that are not boxes.
"""

import base64
import json
from pathlib import Path

import numpy as np
import pycocotools.mask
import pytest
from PIL import Image

from lambda_det.errors import DataError
from lambda_det.own_data.labels.formats import recognise
from lambda_det.own_data.labels.table import FORMATS
from lambda_det.own_data.layouts import as_coco
from tests.own_data.parts import (
    SIZE,
    boxes,
    classes_of,
    coco,
    cvat,
    encoded,
    labelme,
    make,
    read_labels,
    shape,
    via,
    voc,
    yolo,
)


def stems(write, ending, images):
    """A file of labels for each image."""
    return {f"{Path(name).stem}.{ending}": write(name, things) for name, things in images.items()}


def labelme_of(name, things):
    return labelme(name, shapes=[shape(points=(box[:2], box[2:]), label=c) for c, box in things])


# The files of labels of images, by the names of FORMATS
SAMPLES = {
    "COCO": lambda images: {"labels.json": coco(images)},
    "YOLO": lambda images: {
        "data.yaml": f"names: {json.dumps(classes_of(images))}",
        **yolo(images),
    },
    "YOLO with a list of names": lambda images: {
        "classes.txt": "\n".join(classes_of(images)),
        **yolo(images),
    },
    "CVAT": lambda images: {"annotations.xml": cvat(images)},
    "Pascal VOC": lambda images: stems(lambda name, things: voc(name, *things), "xml", images),
    "LabelMe": lambda images: stems(labelme_of, "json", images),
    "VIA": lambda images: {"via.json": via(images)},
}


def written(form, box):
    """The numbers of a box in COCO's form as labels of a form, of ``BOX_FORMS``, have them."""
    x, y, width, height = box
    middle = [x + width / 2, y + height / 2, width, height]
    return {
        "sides in pixels": box,
        "corners in pixels": [x, y, x + width, y + height],
        "centre and size in shares of 1": (np.array(middle) / np.tile(SIZE, 2)).tolist(),
    }[form]


def write_sample(name, folder, objects):
    """Write images and their labels in a format; objects are in COCO's form."""
    form = FORMATS[name].boxes
    images = {
        image: [(label, written(form, box)) for label, box in things]
        for image, things in objects.items()
    }
    return make(folder, dict.fromkeys(images, "") | SAMPLES[name](images))


# ------------------------------------------------------------------------------ what holds for each
# In COCO's form. An image without an object has labels, too
OBJECTS = {
    "one.png": [("cup", [1, 2, 10, 5]), ("a key", [20.5, 10, 12, 18])],
    "none.png": [],
    "größe 3.png": [("cup", [0, 0, 40, 30])],
}


def images_and_boxes(content):
    """The objects of a file in COCO's format, as OBJECTS has them."""
    found = {image["id"]: [] for image in content["images"]}
    for annotation, (label, box) in zip(content["annotations"], boxes(content), strict=True):
        found[annotation["image_id"]].append((label, pytest.approx(box, abs=1e-4)))
    return {image["file_name"]: found[image["id"]] for image in content["images"]}


@pytest.mark.parametrize("name", FORMATS)
def test_boxes_come_in_pixels_from_the_form_that_the_table_names(name, tmp_path):
    page = (Path(__file__).resolve().parents[2] / "datasets" / "README.md").read_text("utf-8")
    assert f"| {name.removesuffix(' with a list of names')}" in page
    folder = write_sample(name, tmp_path / "set", OBJECTS)
    assert recognise(folder)[0] == name
    ((file, _),) = as_coco((str(folder), str(folder)), folder=tmp_path)
    assert images_and_boxes(json.loads(Path(file).read_text("utf-8"))) == OBJECTS


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "COCO"])
def test_classes_of_a_run_stand_in_place_of_those_of_labels(name, tmp_path):
    """A name that no object has is no class, as data.yaml may list; an object's must be there."""
    folder = write_sample(name, tmp_path / "set", OBJECTS)
    classes = ["a key", "pen", "cup"]
    ((file, _),) = as_coco((str(folder), str(folder)), folder=tmp_path, classes=classes)
    content = json.loads(Path(file).read_text("utf-8"))
    assert [entry["name"] for entry in content["categories"]] == classes
    assert images_and_boxes(content) == OBJECTS
    with pytest.raises(DataError, match=r"set\S* has objects of a key, cup.*\(pen\)") as raised:
        as_coco((str(folder), str(folder)), folder=tmp_path, classes=["pen"])
    first = next(one for one in content["annotations"] if one["category_id"] == 1)
    assert f"The first one is in {first['source']}." in str(raised.value)


# ------------------------------------------------------------------------ shapes that are not boxes
def read(folder, files):
    """The content, the boxes and the masks that are made of files of labels."""
    content = read_labels(make(folder, {"a.png": ""} | files))
    masks = [one.get("segmentation") for one in content["annotations"]]
    return content, [pytest.approx(box) for _, box in boxes(content)], masks


def drawn(mask):
    """The pixels of a mask in run lengths."""
    pixels = pycocotools.mask.decode(mask)
    assert pixels.shape == SIZE[::-1]
    return np.argwhere(pixels).tolist()


CVAT = """<annotations><image id="0" name="sub/größe 1.png" width="40" height="30">
<box label="a" xtl="1" ytl="2" xbr="11" ybr="7"/>
<box label="b" xtl="10" ytl="10" xbr="20" ybr="12" rotation="90"/>
<polygon label="a" points="1,1;5,1;5,4"/>
<mask label="b" left="3" top="2" width="2" height="2" rle="1,3"/>
<ellipse label="b" cx="10" cy="12" rx="8" ry="4" rotation="90"/>
<points label="a" points="1,1"/></image></annotations>"""


def test_cvat(tmp_path):
    """A box turns clockwise: by 90 degrees its upper left corner comes to the upper right."""
    content, found, masks = read(tmp_path, {"sub/größe 1.png": "", "annotations.xml": CVAT})
    assert content["images"][0]["file_name"] == "sub/größe 1.png"
    assert found == [[1, 2, 10, 5], [14, 6, 2, 10], [1, 1, 4, 3], [3, 2, 2, 2], [6, 4, 8, 16]]
    assert masks[0] is None and masks[1][0][:2] == pytest.approx([16, 6])
    assert masks[2] == [[1, 1, 5, 1, 5, 4]]
    assert drawn(masks[3]) == [[2, 4], [3, 3], [3, 4]]


def test_turned_boxes_of_cvat_and_polygons_of_roboflow_in_pascal_voc(tmp_path):
    corners = "<x1>10</x1><y1>10</y1><x2>20</x2><y2>10</y2><x3>15</x3><y3>12</y3>"
    words = "<attributes><attribute><name>rotation</name><value>{}</value></attribute></attributes>"
    things = [words.format("90.0"), words.format("0.0"), ""]
    things += [f"<polygon>{corners}</polygon>", "<polygon><pt><x>1</x></pt></polygon>"]
    files = {f"{n}.xml": voc(f"{n}.png", BOX, more=thing) for n, thing in enumerate(things)}
    _, found, masks = read(tmp_path, files | {f"{n}.png": "" for n in range(len(things))})
    assert found == [[14, 6, 2, 10]] + 4 * [[10, 10, 10, 2]]
    assert masks[0] and masks[1:] == [None, None, [[10, 10, 20, 10, 15, 12]], None]


BOX = ("a", (10, 10, 20, 12))


def test_labelme(tmp_path):
    """Two polygons of one object, of a group; a name of the image with folders of Windows."""
    shapes = [
        shape(points=((11, 7), (1, 2)), label="a"),
        shape("polygon", ((0, 0), (4, 0), (4, 4)), "b", group_id=7),
        shape("polygon", ((8, 8), (9, 8), (9, 9)), "b", group_id=7),
        shape("circle", ((10, 10), (13, 14)), "a"),
        shape("point", ((10, 10),), "a"),
        shape("polygon", ((1, 1), (9, 1), (9, 9)), "__ignore__"),
    ]
    content, found, masks = read(tmp_path, {"a.json": labelme("..\\x\\a.png", *shapes)})
    assert found == [[1, 2, 10, 5], [0, 0, 9, 9], [5, 5, 10, 10]] and len(masks[1]) == 2
    areas = [annotation["area"] for annotation in content["annotations"]]
    assert areas == pytest.approx([50, 8.5, 25 * 16 * np.sin(np.pi / 16)])
    assert [name for name, _ in boxes(content)] == ["a", "b", "a"]


def test_labelme_masks(tmp_path):
    """A PNG of a part of the image, from the upper left corner of its box on."""
    png = base64.b64encode(encoded(Image.fromarray(np.array([[0, 1], [1, 1]], bool)))).decode()
    mask = shape("mask", ((3, 2), (4, 3)), mask=png)
    with pytest.raises(DataError, match=r"a\.json: shape 0 .*imageWidth"):
        read(tmp_path, {"a.json": labelme("a.png", mask, imageWidth=None)})
    content, found, masks = read(tmp_path, {"a.json": labelme("a.png", mask)})
    assert drawn(masks[0]) == [[2, 4], [3, 3], [3, 4]]
    assert content["annotations"][0]["area"] == 3 and found == [[3, 2, 2, 2]]


def test_via(tmp_path):
    """Of its first version; a class is the first attribute that has a value."""
    corners = {"all_points_x": [0, 4, 4], "all_points_y": [0, 0, 4]}
    ticked, turned = {"type": {"b": False, "c": True}}, {"rx": 8, "ry": 2, "theta": np.pi / 6}
    shapes = [
        ({"name": "rect", "x": 1, "y": 2, "width": 10, "height": 5}, {"kind": "", "type": "a"}),
        ({"name": "polygon", **corners}, ticked),
        ({"name": "circle", "cx": 10, "cy": 10, "r": 5}, {}),
        ({"name": "ellipse", "cx": 20, "cy": 10, **turned}, {"a": " ", "name": "d", "type": "e"}),
        ({"name": "polyline", **corners}, ticked),
    ]
    regions = {
        str(number): {"shape_attributes": one, "region_attributes": attributes}
        for number, (one, attributes) in enumerate(shapes)
    }
    labels = json.dumps({"a.png9": {"filename": "a.png", "regions": regions}})
    content, found, masks = read(tmp_path, {"a.json": labels})
    assert [name for name, _ in boxes(content)] == ["a", "c", "object", "d"]
    assert found[:3] == [[1, 2, 10, 5], [0, 0, 4, 4], [5, 5, 10, 10]]
    assert masks[3][0][:2] == pytest.approx([20 + 48**0.5, 14])


def test_yolo_polygons(tmp_path):
    """data.yaml has a mark of its encoding and numbers of the classes, and another file names."""
    names = "names: {'0': x, 3: y}\n".encode("utf-8-sig")
    files = {"data.yaml": names, "b.yaml": "names: [another]\n"}
    content, _, masks = read(tmp_path, files | {"a.txt": "0 0.1 0.1 0.5 0.1 0.5 0.5\n\n"})
    assert [category["name"] for category in content["categories"]] == ["x", "y"]
    assert masks == [[pytest.approx([4, 3, 20, 3, 20, 15])]]
