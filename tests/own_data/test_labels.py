"""Labels of other tools: which files and images belong together, and their obvious mistakes."""

import json

import numpy as np
import pytest
from PIL import Image
from pycocotools.mask import encode, toBbox

from lambda_det.detection.data.coco_format import READER
from lambda_det.detection.data.records import read_image
from lambda_det.errors import DataError
from lambda_det.own_data.command_line import convert_main
from lambda_det.own_data.labels.formats import recognise
from lambda_det.own_data.labels.objects import of_mask
from lambda_det.own_data.labels.yolo import yolo_names
from lambda_det.own_data.layouts import as_coco
from tests.own_data.parts import BOX, LINE, YAML, boxes, encoded, image, make, read_labels, voc

ONE = {"data.yaml": YAML, "a.png": ""}
EMPTY = voc("a.png")


def test_pascal_voc(tmp_path, caplog):
    """Where the file states no size, it is that of the image."""
    caplog.set_level("INFO")
    for name in ("größe 1", "empty", "without", "._hidden", "drawn/of another folder"):
        make(tmp_path / "images", {f"{name}.png": ""})
    things = [("cell", (1, 2, 11, 7.5)), ("a cell", (0, 0, 4, 4))]
    labels = {
        "größe 1.xml": voc("größe 1.png", *things, size=(0, 0)),
        "empty.xml": voc("empty.png"),
    }
    content = read_labels(make(tmp_path / "labels", labels), tmp_path / "images")
    sizes = [(image["file_name"], image["width"], image["height"]) for image in content["images"]]
    assert sizes == [("empty.png", 40, 30), ("größe 1.png", 40, 30)]
    assert boxes(content) == [("cell", [1, 2, 10, 5.5]), ("a cell", [0, 0, 4, 4])]
    assert {a["image_id"] for a in content["annotations"]} == {2}
    assert "2 x image without labels" in caplog.text


def test_labels_may_have_the_whole_name_of_their_image(tmp_path):
    """Such as a.png.xml, also where a list names the images."""
    names = ["a.png", "b.png", "c.png"]
    for name, labels in zip(names, ("a.png.xml", "b.xml", "c.png.xml"), strict=True):
        make(tmp_path, {name: "", labels: voc(name, BOX)})
    listed = make(tmp_path, {"train.txt": "a.png\nb.png\n"}) / "train.txt"
    for place, expected in ((tmp_path, names), (listed, names[:2])):
        content = read_labels(place, tmp_path)
        assert [image["file_name"] for image in content["images"]] == expected


def poses(v="", h=""):
    """Boxes with two points; with the words for seen and hidden ones, if there are any."""
    return [
        f"0 .5 .5 .5 .4 .26 .31{v} .74 .69{v}",
        f"1 .25 .25 .2 .2 .16 .16{v} .34 .34{v}",
        f"0 .75 .25 .5 .2 .51 .16{v} .99 .34{v}",
        f"0 .5 .25 .5 .2 .26 .16{v} .6 .3{h}",
    ]


BOXES = [[10, 9, 20, 12], [6, 4.5, 8, 6], [20, 4.5, 20, 6], [10, 4.5, 20, 6]]
QUADS = [
    "0 .4 .4 .45 .4 .45 .45 .4 .45",
    "0 .3 .4 .35 .4 .35 .45 .3 .45",
    "0 .4 .3 .45 .3 .45 .35 .4 .35",
    "0 .3 .3 .35 .3 .35 .35 .3 .35",
]


@pytest.mark.parametrize(
    ("lines", "are_poses"),
    [
        (poses(" 2", " 0"), True),
        (poses(), True),
        (poses(" 1", " 0")[:1], True),
        (QUADS, False),  # whose corners lie in the boxes that their first corners would make
        ([*poses(), "0 .1 .1 .2 .1 .1 .2"], False),
        (poses(" .5", " .5"), False),
    ],
)
def test_poses_are_boxes_also_where_data_yaml_does_not_say_so(tmp_path, lines, are_poses):
    """All lines are a box with as many points, which lie in it; else they are polygons."""
    content = read_labels(make(tmp_path, ONE | {"a.txt": "\n".join(lines)}))
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
        around = np.zeros((60, 60), np.uint8)
        around[top + 20 :, left + 20 :][: part.shape[0], : part.shape[1]] = part
        image = np.asfortranarray(around[20 : 20 + height, 20 : 20 + width])
        thing, runs = of_mask("cup", part, (left, top), (width, height)), encode(image)
        assert (thing is None) == (not image.any())
        if thing:
            assert thing.mask["counts"].encode() == runs["counts"]
            x, y, w, h = toBbox(runs).tolist()
            assert thing.box == (x, y, x + w, y + h)
    for far in (2**32, -(2**63), 10**30):
        assert of_mask("cup", np.ones((2, 2), bool), (far, 0), (4, 4)) is None


def test_yolo_labels_lie_beside_images_of_a_folder_images(tmp_path):
    make(tmp_path / "images", ONE | {"a.txt": LINE})
    assert len(read_labels(tmp_path / "images")["annotations"]) == 1


def test_an_image_that_lies_is_turned_as_in_training(tmp_path):
    lying = Image.Exif()
    lying[274] = 6  # EXIF's orientation
    picture = encoded(image(), "jpg", exif=lying)
    content = read_labels(
        make(tmp_path, {"data.yaml": YAML, "a.jpg": picture, "a.txt": "0 .5 .5 .5 1\n"})
    )
    (entry,), (one,) = content["images"], content["annotations"]
    assert read_image({**entry, "file_name": str(tmp_path / "a.jpg")}).shape == (40, 30, 3)
    assert one["bbox"] == [7.5, 0, 15, 40]


@pytest.mark.parametrize("form", ["[{}, {}, {}, {}]", "{{0: {}, 1: {}, 2: {}, 3: {}}}"])
def test_names_of_classes_are_what_is_written(form, tmp_path):
    names = ["no", "01", "1.50", "2020-01-01"]
    make(tmp_path, {"data.yaml": f"names: {form.format(*names)}\nnc: 4\n"})
    assert list(yolo_names(tmp_path / "data.yaml").values()) == names


REFUSED = {
    "not XML": ({"a.xml": "<annotation>"}, "a.xml"),
    "a box without a side": (
        {"a.xml": EMPTY.replace("</annotation>", "<object><name>x</name></object></annotation>")},
        "a.xml, line 2",
    ),
    "a name that is empty": (
        {"a.xml": voc("a.png", ("", (1, 1, 4, 4)))},
        "its class has no name",
    ),
    "two files of one image": ({"x.xml": EMPTY, "y.xml": EMPTY}, "y.xml: a.png and "),
    "no image": ({"b.xml": voc("b.png")}, "b.xml: its image 'b.png'"),
    "no names": ({"data.yaml": "nc: 1\ntrain: images"}, "data.yaml"),
    "a name of YOLO's without a number": ({"data.yaml": "names: {a: x}"}, "data.yaml: names"),
    "a name that is none": ({"data.yaml": "names: ['']"}, "class 0 is no text"),
    "two names of YOLO's with one number": ({"data.yaml": "names: {0: x, 00: y}"}, "data.yaml"),
    "one number twice": ({"data.yaml": "names:\n  0: x\n  0: y"}, "the key 0"),
    "half a VIA": (
        {"a.json": '{"a": {"filename": "a.png", "file_attributes": {}, "regions": [5]}}'},
        "a.json: a.png, shape 0",
    ),
    "half a LabelMe": ({"a.json": '{"shapes": [{"points": [[1, 1]]}]}'}, "a.json: shape 0"),
    "not YAML": ({"data.yaml": "names: [x"}, "data.yaml"),
    "an image that is none": (ONE | {"b.png": "text"}, "b.png"),
    "CVAT of a video": ({"a.xml": "<annotations><track/></annotations>"}, "for images"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_name_the_file_and_the_line(case, tmp_path):
    files, message = REFUSED[case]
    make(tmp_path, {"a.png": "", **files})
    with pytest.raises(DataError) as found:
        raise DataError(read_labels(tmp_path)[READER]["findings"])  # a line among others
    assert message in str(found.value)


@pytest.mark.parametrize("name", ["t.JSON", "t.coco", "t", "train.txt"])
def test_a_file_of_coco_s_may_have_any_name(name, tmp_path):
    """Also one that lists of images have."""
    (tmp_path / name).write_text('{"images": [], "annotations": [], "categories": []}')
    assert recognise(tmp_path / name)[0] == "COCO"
    place = str(tmp_path / name), str(tmp_path)
    assert as_coco(place, folder=tmp_path) == [place]
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
    make(tmp_path, {"day/a.png": "", "night/a.png": "", "a.xml": EMPTY})
    with pytest.raises(DataError, match="2 images"):
        read_labels(tmp_path)
    (tmp_path / "day").rename(tmp_path / "JPEGImages")
    assert read_labels(tmp_path)["images"][0]["file_name"] == "JPEGImages/a.png"
    make(tmp_path, {"a.xml": voc("night/a.png")})
    assert read_labels(tmp_path)["images"][0]["file_name"] == "night/a.png"


def test_the_command_writes_a_file_and_replaces_none(tmp_path, capsys):
    make(tmp_path, {"a.png": "", "a.xml": voc("a.png", BOX)})
    words = [str(tmp_path), str(tmp_path / "out" / "train.json")]
    assert convert_main(words) == 0
    content = json.loads((tmp_path / "out" / "train.json").read_text())
    assert content["annotations"][0]["bbox"] == [1, 2, 10, 5]
    assert convert_main(words) == 2 and "--overwrite" in capsys.readouterr().err
    assert convert_main([*words, "--overwrite"]) == 0


def test_yolo_s_labels_that_are_named_come_before_those_of_the_images(tmp_path):
    """Else what is corrected in them would change nothing."""
    make(tmp_path, {"new/classes.txt": "cup\nkey\n", "new/a.txt": f"1{LINE[1:]}"})
    make(tmp_path, {"images/a.png": "", "labels/a.txt": LINE})
    ((name, _),) = boxes(read_labels(tmp_path / "new", tmp_path / "images"))
    assert name == "key"


def test_labels_without_an_image_are_found_in_a_folder_apart_from_the_images(tmp_path):
    make(tmp_path, {"new/classes.txt": "cup\n", "new/a.txt": LINE, "new/lost.txt": LINE})
    make(tmp_path, {"images/a.png": "", "labels/a.txt": LINE})
    words = [f"{tmp_path / name}" for name in ("new", "out.json", "images")]
    assert convert_main([*words[:2], "--images", words[2]]) == 1


def test_the_command_says_by_its_status_that_labels_have_no_image(tmp_path):
    make(tmp_path / "in", {"a.png": "", **{f"{n}.xml": voc(f"{n}.png", BOX) for n in "ab"}})
    assert convert_main([str(tmp_path / "in"), str(tmp_path / "out.json")]) == 1
    assert len(json.loads((tmp_path / "out.json").read_text())["images"]) == 1
