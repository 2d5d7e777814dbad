"""Labels of other tools: which files and images belong together, and their obvious mistakes."""

import json

import numpy as np
import pycocotools.mask
import pytest
from PIL import Image

from lambda_det.detection.data.coco_format import READER
from lambda_det.detection.data.records import read_image
from lambda_det.errors import DataError
from lambda_det.own_data.command_line import convert_main
from lambda_det.own_data.labels import read_labels, recognise
from lambda_det.own_data.labels.objects import of_mask
from lambda_det.own_data.labels.yolo import yolo_names
from tests.own_data.test_label_formats import boxes, image

VOC = """<annotation><filename>{name}</filename><size><width>1</width><height>1</height></size>
{objects}</annotation>"""
EMPTY = VOC.format(name="a.png", objects="")
VOC_OBJECT = """<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax>
<ymax>{}</ymax></bndbox></object>"""


def test_pascal_voc(tmp_path, caplog):
    """The size is that of the image, not the one that the file gets wrong."""
    caplog.set_level("INFO")
    for name in ("größe 1", "empty", "without", "._hidden", "drawn/of another folder"):
        image(tmp_path / "images" / f"{name}.png")
    objects = VOC_OBJECT.format("cell", 1, 2, 11, 7.5) + VOC_OBJECT.format("a cell", 0, 0, 4, 4)
    for name, text in (("größe 1", objects), ("empty", "")):
        file = tmp_path / "labels" / f"{name}.xml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(VOC.format(name=f"{name}.png", objects=text), "utf-8")
    content = read_labels(tmp_path / "labels", tmp_path / "images")
    sizes = [(image["file_name"], image["width"], image["height"]) for image in content["images"]]
    assert sizes == [("empty.png", 40, 30), ("größe 1.png", 40, 30)]
    assert boxes(content) == [("cell", [1, 2, 10, 5.5]), ("a cell", [0, 0, 4, 4])]
    assert {a["image_id"] for a in content["annotations"]} == {2}
    assert "2 x image without labels" in caplog.text


def test_labels_may_have_the_whole_name_of_their_image(tmp_path):
    """Such as a.png.xml, also where a list names the images."""
    for name, labels in (("a", "a.png.xml"), ("b", "b.xml"), ("c", "c.png.xml")):
        image(tmp_path / f"{name}.png")
        objects = VOC_OBJECT.format("cell", 1, 2, 11, 7)
        (tmp_path / labels).write_text(VOC.format(name=f"{name}.png", objects=objects))
    listed = tmp_path / "train.txt"
    listed.write_text("a.png\nb.png\n")
    for place, names in ((tmp_path, ["a.png", "b.png", "c.png"]), (listed, ["a.png", "b.png"])):
        content = read_labels(place, tmp_path)
        assert [image["file_name"] for image in content["images"]] == names


POSES = [
    "0 .5 .5 .5 .4 .26 .31{v} .74 .69{v}",
    "1 .25 .25 .2 .2 .16 .16{v} .34 .34{v}",
    "0 .75 .25 .5 .2 .51 .16{v} .99 .34{v}",
    "0 .5 .25 .5 .2 .26 .16{v} .6 .3{h}",
]
BOXES = [[10, 9, 20, 12], [6, 4.5, 8, 6], [20, 4.5, 20, 6], [10, 4.5, 20, 6]]
QUADS = [
    "0 .4 .4 .45 .4 .45 .45 .4 .45",
    "0 .3 .4 .35 .4 .35 .45 .3 .45",
    "0 .4 .3 .45 .3 .45 .35 .4 .35",
    "0 .3 .3 .35 .3 .35 .35 .3 .35",
]


@pytest.mark.parametrize(
    "lines, are_poses",
    [
        ([line.format(v=" 2", h=" 0") for line in POSES], True),
        ([line.format(v="", h="") for line in POSES], True),
        ([line.format(v=" 1", h=" 0") for line in POSES[:1]], True),
        (QUADS, False),  # whose corners lie in the boxes that their first corners would make
        ([*(line.format(v="", h="") for line in POSES), "0 .1 .1 .2 .1 .1 .2"], False),
        ([line.format(v=" .5", h=" .5") for line in POSES], False),
    ],
)
def test_poses_are_boxes_also_where_data_yaml_does_not_say_so(tmp_path, lines, are_poses):
    """All lines are a box with as many points, which lie in it; else they are polygons."""
    image(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "data.yaml").write_text("names: [a, b]")
    content = read_labels(tmp_path)
    assert len(content["annotations"]) == len(lines)
    for entry, box in zip(content["annotations"], BOXES, strict=False):
        assert ("segmentation" not in entry) == are_poses
        assert not are_poses or entry["bbox"] == pytest.approx(box)
    assert len(content[READER]["findings"]) == are_poses


def test_masks_of_a_part_are_pycocotools_masks_of_the_image():
    random = np.random.default_rng(0)
    for _ in range(500):
        width, height = random.integers(1, 12, 2).tolist()
        left, top = random.integers(-3, 10, 2).tolist()
        part = random.random(random.integers(1, 14, 2)) < random.choice([0.1, 0.5, 0.9, 1])
        around = np.zeros((60, 60), np.uint8, order="F")
        around[top + 20 :, left + 20 :][: part.shape[0], : part.shape[1]] = part
        image = np.asfortranarray(around[20 : 20 + height, 20 : 20 + width])
        thing = of_mask("cup", part, (left, top), (width, height))
        if thing is None:
            assert not image.any()
            continue
        assert thing.mask["counts"].encode() == pycocotools.mask.encode(image)["counts"]
        x, y, w, h = pycocotools.mask.toBbox(pycocotools.mask.encode(image)).tolist()
        assert thing.box == (x, y, x + w, y + h)


def test_yolo_labels_lie_beside_images_of_a_folder_images(tmp_path):
    image(tmp_path / "images" / "a.png")
    (tmp_path / "images" / "data.yaml").write_text("names: [x]\n")
    (tmp_path / "images" / "a.txt").write_text("0 .5 .5 1 1\n")
    assert len(read_labels(tmp_path / "images")["annotations"]) == 1


def test_an_image_that_lies_is_turned_as_in_training(tmp_path):
    lying = Image.Exif()
    lying[274] = 6  # EXIF's orientation
    Image.new("RGB", (40, 30)).save(tmp_path / "a.jpg", exif=lying)
    (tmp_path / "data.yaml").write_text("names: [x]\n")
    (tmp_path / "a.txt").write_text("0 .5 .5 .5 1\n")
    content = read_labels(tmp_path)
    (image,), (one,) = content["images"], content["annotations"]
    assert read_image({**image, "file_name": str(tmp_path / "a.jpg")}).shape == (40, 30, 3)
    assert one["bbox"] == [7.5, 0, 15, 40]


@pytest.mark.parametrize("form", ["[{}, {}, {}, {}]", "{{0: {}, 1: {}, 2: {}, 3: {}}}"])
def test_names_of_classes_are_what_is_written(form, tmp_path):
    names = ["no", "01", "1.50", "2020-01-01"]
    (tmp_path / "data.yaml").write_text(f"names: {form.format(*names)}\nnc: 4\n")
    assert list(yolo_names(tmp_path / "data.yaml").values()) == names


NAMES = "names: [x]"
REFUSED = {
    "not XML": ({"a.xml": "<annotation>"}, "a.xml"),
    "a box without a side": (
        {"a.xml": VOC.format(name="a.png", objects="<object><name>x</name></object>")},
        "a.xml, line 2",
    ),
    "two files of one image": ({"x.xml": EMPTY, "y.xml": EMPTY}, "y.xml and "),
    "no image": ({"b.xml": VOC.format(name="b.png", objects="")}, "b.xml: its image 'b.png'"),
    "a word": ({"data.yaml": NAMES, "a.txt": "0 0.5 0.5 w 1"}, "a.txt, line 1"),
    "another class": ({"data.yaml": NAMES, "a.txt": "0 0 0 1 1\n2 0 0 1 1"}, "line 2: class 2"),
    "three numbers": ({"data.yaml": NAMES, "a.txt": "0 .5 .5 1"}, "a.txt, line 1"),
    "no names": ({"data.yaml": "nc: 1\ntrain: images"}, "data.yaml"),
    "a name of YOLO's without a number": ({"data.yaml": "names: {a: x}"}, "data.yaml: names"),
    "two names of YOLO's with one number": ({"data.yaml": "names: {0: x, 00: y}"}, "data.yaml"),
    "one number twice": ({"data.yaml": "names:\n  0: x\n  0: y"}, "the key 0"),
    "half a VIA": (
        {"a.json": '{"a": {"filename": "a.png", "file_attributes": {}, "regions": [5]}}'},
        "a.json: a.png, shape 0",
    ),
    "half a LabelMe": ({"a.json": '{"shapes": [{"points": [[1, 1]]}]}'}, "a.json: shape 0"),
    "not YAML": ({"data.yaml": "names: [x"}, "data.yaml"),
    "two YOLO files": ({"a.yaml": NAMES, "b.yaml": NAMES}, "b.yaml"),
    "not a number": ({"data.yaml": NAMES, "a.txt": "0 nan .5 1 1"}, "a.txt, line 1"),
    "an image that is none": ({"data.yaml": NAMES, "b.png": "text"}, "b.png"),
    "CVAT of a video": ({"a.xml": "<annotations><track/></annotations>"}, "for images"),
    "nothing": ({}, "YOLO"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_name_the_file_and_the_line(case, tmp_path):
    files, message = REFUSED[case]
    image(tmp_path / "a.png")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as found:
        read_labels(tmp_path)
    assert message in str(found.value)


@pytest.mark.parametrize("name", ["t.JSON", "t.coco", "t"])
def test_a_file_of_coco_s_may_have_any_name(name, tmp_path):
    (tmp_path / name).write_text('{"images": [], "annotations": [], "categories": []}')
    assert recognise(tmp_path / name)[0] == "COCO"
    (tmp_path / name).write_text("{}")  # which COCO's reader refuses
    assert recognise(tmp_path / name)[0] == "COCO"


@pytest.mark.parametrize("name", ["notes.md", "notes.txt", "notes"])
def test_a_file_of_no_known_format_is_told_which_are_known(name, tmp_path):
    (tmp_path / name).write_text("image;label\na.png;cell\n")
    with pytest.raises(DataError, match=rf"{name} .*YOLO.*LabelMe") as found:
        recognise(tmp_path / name)
    assert "JSON" not in str(found.value)


def test_images_of_one_name_are_not_guessed(tmp_path):
    """But for those of Pascal VOC, which may have drawings of the labels beside them."""
    for folder in ("day", "night"):
        image(tmp_path / folder / "a.png")
    (tmp_path / "a.xml").write_text(EMPTY)
    with pytest.raises(DataError, match="2 images"):
        read_labels(tmp_path)
    (tmp_path / "day").rename(tmp_path / "JPEGImages")
    assert read_labels(tmp_path)["images"][0]["file_name"] == "JPEGImages/a.png"
    (tmp_path / "a.xml").write_text(VOC.format(name="night/a.png", objects=""))
    assert read_labels(tmp_path)["images"][0]["file_name"] == "night/a.png"


def test_the_command_writes_a_file_and_replaces_none(tmp_path, capsys):
    image(tmp_path / "a.png")
    (tmp_path / "a.xml").write_text(VOC.format(name="a.png", objects=VOC_OBJECT.format(*"x0123")))
    words = [str(tmp_path), str(tmp_path / "out" / "train.json")]
    assert convert_main(words) == 0
    content = json.loads((tmp_path / "out" / "train.json").read_text())
    assert content["annotations"][0]["bbox"] == [0, 1, 2, 2]
    assert convert_main(words) == 2 and "--overwrite" in capsys.readouterr().err
    assert convert_main([*words, "--overwrite"]) == 0
