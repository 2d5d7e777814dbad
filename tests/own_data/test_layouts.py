"""Folders of usual tools, their parts, and one data set through every format that is written."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pycocotools.mask import area, decode, encode, frPyObjects, merge, toBbox

from lambda_det.detection.data.annotations import check_coco
from lambda_det.detection.data.coco_format import READER, read_json
from lambda_det.detection.data.label_files import WRITTEN, write_labels
from lambda_det.errors import DataError
from lambda_det.own_data import command_line
from lambda_det.own_data.labels import as_coco, read_labels
from lambda_det.own_data.labels.formats import recognise
from tests.coco import coco_content
from tests.own_data.parts import find_parts

BOX = "<object><name>{}</name><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>9</xmax><ymax>8</ymax>"
VOC = "<annotation><filename>{}</filename>\n" + BOX + "</bndbox></object></annotation>"
YAML = "names: [cell]\n"
VIA = """{"a.png9": {"filename": "a.png", "file_attributes": {}, "regions": [{"region_attributes":
{"a": "b"}, "shape_attributes": {"name": "circle", "cx": 9, "cy": 9, "r": 5.5}}]}}"""
SHAPE = {"label": "cell", "points": [[1, 2], [9, 8]], "shape_type": "rectangle"}
LABELME = json.dumps({"shapes": [SHAPE], "imagePath": "a.png"})
LINE = "0 .5 .5 1 1\n"
FOLDERS = [name for name, row in WRITTEN.items() if row.write]  # with a file for each image
WITH_MASKS = [name for name in FOLDERS if WRITTEN[name].masks]


def coco(name: str) -> str:
    return json.dumps(coco_content({1: name}, [], {1: "cell"}, size=(40, 30)))


def make(root: Path, files: dict[str, str]) -> Path:
    """Files of a data set; those of images are named by their ending alone."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith((".png", ".jpg")):
            Image.new("RGB", (40, 30)).save(root / name)
        else:
            (root / name).write_text(text, "utf-8")
    return root


def images_of(parts: list, root: Path) -> list[list[str]]:
    """The images of each part by their paths."""
    contents = [read_json(str(part.labels)) for part in parts]
    return [
        sorted(
            (part.images / image["file_name"]).relative_to(root).as_posix()
            for image in content["images"]
        )
        for part, content in zip(parts, contents, strict=True)
    ]


# Files, the format, and the images of each part
LAYOUTS = {
    "Roboflow's YOLO, whose paths are one level too high": (
        {
            "data.yaml": YAML + "train: ../left/images\nval: ../right/images\ntest: ../no/images\n",
            **dict.fromkeys(["left/images/a.png", "right/images/b.png", "more/images/c.png"], ""),
            "left/labels/a.txt": LINE,
        },
        ("YOLO", ["left/images/a.png"], ["right/images/b.png"]),
    ),
    "Ultralytics' YOLO, which is validated on its training images": (
        {
            "coco8.yaml": "path: ../nowhere\ntrain: images/train\nval: images/train\n" + YAML,
            "images/train/größe 1.png": "",
            "labels/train/größe 1.txt": LINE,
        },
        ("YOLO", ["images/train/größe 1.png"]),
    ),
    "YOLO whose data.yaml names no parts": (
        {
            "data.yaml": YAML,
            **dict.fromkeys(["test cat/train/a.png", "test cat/val/a.png", "logo.png"], ""),
        },
        ("YOLO", ["test cat/train/a.png"], ["test cat/val/a.png"]),
    ),
    "YOLO with other words for the parts, of another machine": (
        {
            "data.yaml": YAML
            + "path: 'D:\\me\\set'\ntrain: 'D:\\me\\set\\train\\images'\n"
            + "valid: /content/set/valid/images\ntest: null\n",
            **dict.fromkeys(["train/images/a.png", "valid/images/a.png"], ""),
        },
        ("YOLO", ["train/images/a.png"], ["valid/images/a.png"]),
    ),
    "YOLO with lists of images of another machine": (
        {
            "data.yaml": YAML + "train: train.txt\nval: [val.txt]\n",
            "train.txt": "data/images/a.png\n\n./images/b.png\n",
            "val.txt": "/home/me/images/c.png\n",
            **dict.fromkeys([f"images/{name}.png" for name in "abcd"], ""),
        },
        ("YOLO", ["images/a.png", "images/b.png"], ["images/c.png"]),
    ),
    "YOLO of CVAT": (
        {"obj.names": "cell\n\n", "obj_train_data/a.png": "", "obj_train_data/a.txt": ""},
        ("YOLO with a list of names", ["obj_train_data/a.png"]),
    ),
    "YOLO of Darknet": (
        {
            "obj.names": "cell\n",
            "obj.data": "classes = 1\ntrain = data/train.txt\nvalid = data/test.txt\n",
            "train.txt": "data/obj/a.png\n",
            "test.txt": "data/obj/b.png\n",
            **dict.fromkeys([f"obj/{name}.png" for name in "abc"], ""),
        },
        ("YOLO with a list of names", ["obj/a.png"], ["obj/b.png"]),
    ),
    "YOLO with a list of names": (
        {
            **dict.fromkeys(["classes.txt", "labels/train/classes.txt"], "cell\n"),
            **dict.fromkeys(["images/train/a.png", "images/val/a.png", "images/test/c.png"], ""),
            "labels/train/a.txt": LINE,
        },
        (
            "YOLO with a list of names",
            ["images/train/a.png"],
            ["images/val/a.png"],
            ["images/test/c.png"],
        ),
    ),
    "YOLO with a part without a word": (
        {
            "classes.txt": "cell\n",
            **dict.fromkeys(["day/a.png", "night/a.png", "valid/c.png", "day/new/b.png"], ""),
            **dict.fromkeys(["day/a.txt", "night/a.txt", "valid/c.txt"], LINE),
        },
        (
            "YOLO with a list of names",
            ["day/a.png", "day/new/b.png", "night/a.png"],
            ["valid/c.png"],
        ),
    ),
    "Pascal VOC's lists": (
        {
            **{f"VOC2007/Annotations/{n}.xml": VOC.format(f"{n}.jpg", "cell") for n in "abcd"},
            **dict.fromkeys([f"VOC2007/JPEGImages/{n}.jpg" for n in "abc"], ""),
            "VOC2007/ImageSets/Main/train.txt": "# mine\na\nb\n",
            "VOC2007/ImageSets/Main/val.txt": "c\n",
            "VOC2007/ImageSets/Main/cell_train.txt": "a 1\nb -1\n",
        },
        (
            "Pascal VOC",
            ["VOC2007/JPEGImages/a.jpg", "VOC2007/JPEGImages/b.jpg"],
            ["VOC2007/JPEGImages/c.jpg"],
        ),
    ),
    "Pascal VOC's lists, where training and validation are one": (
        {
            **{f"Annotations/{n}.xml": VOC.format(f"{n}.jpg", "cell") for n in "ab"},
            **dict.fromkeys([f"JPEGImages/{n}.jpg" for n in "ab"], ""),
            "ImageSets/Main/trainval.txt": "a\n",
            "ImageSets/Main/val.txt": "a\n",
            "ImageSets/Main/test.txt": "b\n",
        },
        ("Pascal VOC", ["JPEGImages/a.jpg"], ["JPEGImages/b.jpg"]),
    ),
    "Pascal VOC with parts of each class": (
        {
            **{f"{x}/{y}/a.xml": VOC.format("a.jpg", "c") for x in "xy" for y in ("train", "val")},
            **{f"{x}/{y}/a.jpg": "" for x in "xy" for y in ("train", "val")},
        },
        ("Pascal VOC", ["x/train/a.jpg", "y/train/a.jpg"], ["x/val/a.jpg", "y/val/a.jpg"]),
    ),
    "Pascal VOC with folders of labels and of images": (
        {
            **{f"Annotations/{x}/a.xml": VOC.format("a.jpg", "c") for x in ("scans", "test")},
            **dict.fromkeys(["JPEGImages/scans/a.jpg", "JPEGImages/test/a.jpg"], ""),
        },
        ("Pascal VOC", ["JPEGImages/scans/a.jpg"], ["JPEGImages/test/a.jpg"]),
    ),
    "Pascal VOC with parts of the images alone": (
        {
            **{f"Annotations/{x}.xml": VOC.format(f"{x}.jpg", "c") for x in "abc"},
            **dict.fromkeys(["images/a.jpg", "images/b.jpg", "images/Validation/c.jpg"], ""),
        },
        ("Pascal VOC", ["images/a.jpg", "images/b.jpg"], ["images/Validation/c.jpg"]),
    ),
    "COCO's own": (
        {
            "annotations/instances_train2017.json": coco("a.jpg"),
            "annotations/person_keypoints_train2017.json": coco("a.jpg"),
            "annotations/instances_val2017.json": coco("a.jpg"),
            **dict.fromkeys(["train2017/a.jpg", "val2017/a.jpg"], ""),
        },
        ("COCO", ["train2017/a.jpg"], ["val2017/a.jpg"]),
    ),
    "COCO with a part without a word": (
        {
            "scans.json": coco("a.jpg"),
            "val.json": coco("a.jpg"),
            **dict.fromkeys(["scans/a.jpg", "val/a.jpg"], ""),
        },
        ("COCO", ["scans/a.jpg"], ["val/a.jpg"]),
    ),
    "LabelMe, a file an image, and images of one name": (
        {"x/a.json": LABELME, "y/a.json": LABELME, "x/a.png": "", "y/a.png": ""},
        ("LabelMe", ["x/a.png", "y/a.png"]),
    ),
    "LabelMe, where one part is not to train on by its name": (
        {"test/a.json": LABELME, "test/a.png": ""},
        ("LabelMe", ["test/a.png"]),
    ),
    "VIA, with a copy": (
        {
            **dict.fromkeys(["train/via_region_data.json", "train/copy.json", "val/b.json"], VIA),
            **dict.fromkeys(["train/a.png", "val/a.png"], ""),
        },
        ("VIA", ["train/a.png"], ["val/a.png"]),
    ),
    "VIA, with files that are called like the parts": (
        {
            "via_train.json": VIA,
            "via_val.json": VIA.replace("a.png", "b.png"),
            **dict.fromkeys(["images/a.png", "images/b.png"], ""),
        },
        ("VIA", ["images/a.png"], ["images/b.png"]),
    ),
    "COCO with files in camel case": (
        {
            "annotations/instances_TrainVal.json": coco("a.jpg"),
            "annotations/instances_ValImages2017.json": coco("b.jpg"),
            **dict.fromkeys(["TrainVal/a.jpg", "ValImages2017/b.jpg"], ""),
        },
        ("COCO", ["TrainVal/a.jpg"], ["ValImages2017/b.jpg"]),
    ),
    "Pascal VOC's lists in another spelling": (
        {
            **{f"Annotations/{n}.xml": VOC.format(f"{n}.jpg", "cell") for n in "ab"},
            **dict.fromkeys([f"JPEGImages/{n}.jpg" for n in "ab"], ""),
            "ImageSets/Main/train_val.txt": "a\n",
            "ImageSets/Main/val.txt": "a\n",
            "ImageSets/Main/test.txt": "b\n",
        },
        ("Pascal VOC", ["JPEGImages/a.jpg"], ["JPEGImages/b.jpg"]),
    ),
    "LabelMe with a folder for each class": (
        {
            f"{name}/a.{ending}": LABELME
            for name in ("DevBoard", "EvalBoard", "Resistor", "TestTube", "VOCDevKit")
            for ending in ("json", "png")
        },
        (
            "LabelMe",
            [f"{x}/a.png" for x in ("DevBoard", "EvalBoard", "Resistor", "TestTube", "VOCDevKit")],
        ),
    ),
    "LabelMe with folders of days and things": (
        {
            f"{name}/a.{ending}": LABELME
            for name in ("cups", "flight_1", "test_flight_2", "test_tubes", "val_di_fassa")
            for ending in ("json", "png")
        },
        (
            "LabelMe",
            [
                f"{x}/a.png"
                for x in ("cups", "flight_1", "test_flight_2", "test_tubes", "val_di_fassa")
            ],
        ),
    ),
    "LabelMe with a number and a year": (
        {
            f"{name}/a.{ending}": LABELME
            for name in ("train_1", "train_2", "val-2017")
            for ending in ("json", "png")
        },
        ("LabelMe", ["train_1/a.png", "train_2/a.png"], ["val-2017/a.png"]),
    ),
    "YOLO with keys of other programs": (
        {
            "data.yaml": YAML
            + "train: train\nval: val\neval: bbox\nevaluation: {metric: ap}\ndev: 0.1\n"
            + "best: runs/best.pt\ntext: a/b\nlatest: runs/latest\nrest: a/b\n",
            **dict.fromkeys(["train/a.png", "val/b.png"], ""),
        },
        ("YOLO", ["train/a.png"], ["val/b.png"]),
    ),
    "YOLO that is evaluated in a way, with parts of the folders alone": (
        {
            "data.yaml": YAML + "eval: true\n",
            **dict.fromkeys(["train/a.png", "val/b.png"], ""),
        },
        ("YOLO", ["train/a.png"], ["val/b.png"]),
    ),
    "COCO in one file": (
        {"config.yaml": "train:\n  a: 1\n", "labels.json": coco("a.png"), "pictures/a.png": ""},
        ("COCO", ["pictures/a.png"]),
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_folders_of_usual_tools(case, tmp_path):
    files, (name, *expected) = LAYOUTS[case]
    root = make(tmp_path / "my train data", files)
    found, parts = find_parts(root)
    assert (found, images_of(parts, root)) == (name, expected)


REFUSED = {
    "two files of COCO's": ({"a.json": coco("a.png"), "b.json": coco("a.png")}, "a.json"),
    "an image of COCO's that is nowhere": ({"a.json": coco("b.png")}, "--train "),
    "a class called train": (
        {
            **{f"{name}/b.xml": VOC.format("b.png", "a") for name in ("bus", "train")},
            **dict.fromkeys(["bus/b.png", "train/b.png"], ""),
        },
        "1 of 2 labels",
    ),
    "a class of YOLO's called train": (
        {
            "data.yaml": YAML,
            **dict.fromkeys(["bus/b.png", "train/c.png", "bus/b.txt", "train/c.txt"], ""),
        },
        "1 of 2 labels",
    ),
    "two data.yaml": ({f"{x}/data.yaml": YAML + "train: .\n" for x in "xy"}, "name one of them"),
    "a folder that is not there": ({"data.yaml": YAML + "train: [a, b]", "a/a.png": ""}, "names b"),
    "an empty list": (
        {"ImageSets/Main/train.txt": "", "b.xml": VOC.format("a.png", "a")},
        "train.txt: of 0 images",
    ),
    "a list elsewhere of what is not there": (
        {"data.yaml": YAML + "train: lists/a.txt\n", "lists/a.txt": "../a.png\nb.png\n"},
        "a.txt, line 2",
    ),
}


@pytest.mark.parametrize(
    "spelling", ["train_val", "train-val", "Train Val", "TRAINVAL", "TrainVal"]
)
def test_training_and_validation_together_are_trained_on(spelling, tmp_path):
    folders = (f"{spelling}Images", "TestImages")
    labels = {f"{folder}/a.json": LABELME for folder in folders}
    make(tmp_path, labels | {f"{folder}/a.png": "" for folder in folders})
    _, parts = find_parts(tmp_path)
    assert images_of(parts, tmp_path) == [[f"{folder}/a.png"] for folder in folders]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("vla", "val"),
        ("tran", "train"),
        ("trian", "train"),
        ("tets", "test"),
        ("Training", "train"),
        ("Validaton", "validation"),
    ],
)
def test_a_misspelt_key_of_yolo_s_is_found(key, meant, tmp_path):
    files = {"data.yaml": f"{YAML}train: some\n{key}: other\n"}
    make(tmp_path, files | dict.fromkeys(["some/a.png", "other/b.png"], ""))
    with pytest.raises(DataError, match=rf"'{key}' names no part; did you mean {meant}\?"):
        find_parts(tmp_path)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_clear_is_refused(case, tmp_path):
    files, words = REFUSED[case]
    make(tmp_path, {**files, "a.png": ""})
    with pytest.raises(DataError) as found:
        find_parts(tmp_path)
    assert words in str(found.value)


@pytest.mark.parametrize("images", [{}, {"images": None}])
def test_a_test_part_without_its_images_is_left_out(images, tmp_path, caplog):
    """The training does not use it where there are two others. Else it is evaluated on."""
    files = {f"{part}/_annotations.coco.json": coco("a.png") for part in ("train", "valid")}
    labels = "test/_annotations.coco.json"
    files[labels] = json.dumps(json.loads(coco("a.png")) | images)
    make(tmp_path, files | {"train/a.png": "", "valid/a.png": ""})
    _, parts = find_parts(tmp_path)
    assert images_of(parts, tmp_path) == [["train/a.png"], ["valid/a.png"]]
    assert str(tmp_path / labels) in caplog.text and "--train" not in caplog.text
    (tmp_path / "valid").rename(tmp_path / "train" / "more")
    (tmp_path / "train" / "more" / "_annotations.coco.json").unlink()
    with pytest.raises(DataError, match=labels):
        find_parts(tmp_path)


def test_a_few_labels_of_other_formats_are_looked_at(tmp_path, monkeypatch, caplog):
    """And those that cannot be read refuse nothing."""
    files = {"data.yaml": YAML, "a.png": "", "a.txt": LINE, "b.xml": VOC.format("a.png", "cell")}
    make(tmp_path, files | {f"{number:02}.json": LABELME for number in range(40)})
    read, read_bytes = [], Path.read_bytes

    def counted(file):
        if file.suffix == ".json":
            read.append(file.name)
        if file.name == "00.json":
            raise PermissionError(13, "Permission denied", str(file))
        return read_bytes(file)

    monkeypatch.setattr(Path, "read_bytes", counted)
    name, _ = find_parts(tmp_path)
    assert name == "YOLO" and len(read) == 20
    assert "01.json of LabelMe" in caplog.text and "b.xml of Pascal VOC" in caplog.text


DAMAGE = [*rb"5 null [] {} -1 1e999 .. nan <".split(), b"\xff", b"\0", b"\n", b""]
CVAT = """<annotations><image name="a.png" width="40" height="30">
<box label="a" xtl="1" ytl="2" xbr="11" ybr="7" rotation="9"/>
<mask label="b" left="3" top="2" width="2" height="2" rle="1,3"/></image></annotations>"""
SHAPES = """{"imagePath": "a.png", "shapes": [
{"label": "a", "points": [[1, 2], [9, 4], [5, 8]], "shape_type": "polygon", "group_id": 1},
{"label": "b", "points": [[9, 9], [9, 14]], "shape_type": "circle"}]}"""
SOUND = [
    *(files for files, _ in LAYOUTS.values()),
    {"annotations.xml": CVAT, "a.png": ""},
    {"a.json": SHAPES, "a.png": ""},
]


@given(
    files=st.sampled_from(SOUND),
    place=st.tuples(*[st.floats(0, 1)] * 2),
    length=st.integers(0, 12),
    damage=st.sampled_from(DAMAGE),
)
@pytest.mark.fuzz
def test_damaged_files_are_read_or_refused_in_words(files, place, length, damage, tmp_path_factory):
    root = make(tmp_path_factory.mktemp("set"), files)
    texts = [name for name, text in files.items() if text]
    file = root / texts[int(place[0] * (len(texts) - 1))]
    text = file.read_bytes()
    start = int(place[1] * len(text))
    file.write_bytes(text[:start] + damage + text[start + length :])
    with contextlib.suppress(DataError):
        for converted, images, *_ in find_parts(root)[1]:
            if not check_coco(converted, images, files="none").refusal():
                for kind in WRITTEN:
                    write_labels(read_json(str(converted)), kind, root / "out" / kind, images)


@pytest.mark.parametrize("inner", ["", "val/"])
def test_a_project_of_cvat_has_a_part_for_each_subset(inner, tmp_path):
    """In one file, which gives the images of all the same names, in folders that say nothing."""
    box = '<box label="a" xtl="1" ytl="2" xbr="9" ybr="7"/>'
    subsets = ("Validation", "Train", "Test")
    images = [f'<image name="{inner}a.png" subset="{name}">{box}</image>' for name in subsets]
    text = f"<annotations>{''.join(images)}</annotations>"
    pictures = {f"images/{name}/{inner}a.png": "" for name in subsets}
    home = make(tmp_path, {"annotations.xml": text, **pictures}) / "images"
    _, parts = find_parts(tmp_path, home)
    contents = [read_json(str(part.labels)) for part in parts]
    assert images_of(parts, home) == [
        [f"{name}/{inner}a.png"] for name in ("Train", "Validation", "Test")
    ]
    assert [len(c["annotations"]) for c in contents] == [1, 1, 1] and parts[1].images == home


def test_parts_have_the_classes_of_all_and_messages_their_lines(tmp_path):
    """The rarest class is in one part alone; the check names the line of the original file."""
    bad = VOC.format("b.jpg", "rare").replace("<xmax>9", "<xmax>1")
    make(
        tmp_path,
        {
            "train/a.xml": VOC.format("a.jpg", "cell"),
            "valid/b.xml": bad,
            **dict.fromkeys(["train/a.jpg", "valid/b.jpg"], ""),
        },
    )
    _, parts = find_parts(tmp_path)
    reports = [check_coco(part.labels, part.images) for part in parts]
    assert [list(report.categories.values()) for report in reports] == [["cell", "rare"]] * 2
    refusal = reports[1].refusal()
    assert f"{tmp_path / 'valid' / 'b.xml'}, line 2" in refusal
    assert refusal.startswith(parts[1].source) and parts[1].source == str(tmp_path / "valid")


@pytest.mark.parametrize(
    "value", ["[day1/images, ../day2/images]", "lists/all.txt", "[day1/images, lists/second.txt]"]
)
def test_yolo_images_of_several_folders_and_of_lists_elsewhere(value, tmp_path):
    """A list has whole paths, or ones from its own folder or from that of data.yaml."""
    box = "0 0.5 0.5 0.5 0.5\n"
    second = tmp_path / "day2" / "images" / "b.png"
    make(
        tmp_path,
        {
            "set/data.yaml": f"{YAML}train: {value}\nval: day1/images\n",
            "set/lists/all.txt": f"../day1/images/a.png\n\n# more\n{second}\n",
            "set/lists/second.txt": "../day2/images/b.png",
            "set/day1/labels/a.txt": box,
            "day2/labels/b.txt": box + box,
            **dict.fromkeys(["set/day1/images/a.png", "day2/images/b.png"], ""),
        },
    )
    if "../day2" not in value:  # a list names the others alone
        make(tmp_path, {"day2/images/left.png": ""})
    kind, (train, val) = find_parts(tmp_path / "set")
    assert kind == "YOLO" and val.images == tmp_path / "set" / "day1" / "images"
    content = read_json(str(train.labels))
    counts = [
        sum(a["image_id"] == i["id"] for a in content["annotations"]) for i in content["images"]
    ]
    names = [str(train.images / image["file_name"]) for image in content["images"]]
    assert dict(zip(names, counts, strict=True)) == {
        str(second): 2,
        str(tmp_path / "set" / "day1" / "images" / "a.png"): 1,
    }
    assert str(tmp_path / "day2" / "labels" / "b.txt") in content["annotations"][0]["source"]
    assert content["categories"] == read_json(str(val.labels))["categories"]


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("kind", ["COCO", "Pascal VOC", "YOLO"])
def test_images_that_are_elsewhere_are_named_for_all_parts(kind, parts, tmp_path):
    folders = ("train/", "val/") if parts else ("",)
    labels = {
        "COCO": {f"{folder or 'all'}a.json": coco("a.png") for folder in folders},
        "Pascal VOC": {f"{folder}a.xml": VOC.format("a.png", "a") for folder in folders},
        "YOLO": {"data.yaml": YAML, **{f"{folder}a.txt": LINE for folder in folders}},
    }
    make(tmp_path / "labels", labels[kind])
    make(tmp_path / "pictures", {f"{folder}a.png": "" for folder in folders})
    found, places = find_parts(tmp_path / "labels", tmp_path / "pictures")
    images = [[f"{folder}a.png"] for folder in folders]
    assert found == kind and images_of(places, tmp_path / "pictures") == images
    for place in places:
        report = check_coco(place.labels, str(place.images))
        assert not report.refusal() and report.annotations == (kind != "COCO")


def test_converted_labels_are_called_by_the_folder_that_dots_mean(tmp_path, monkeypatch):
    make(tmp_path / "mine", {"a.xml": VOC.format("a.png", "a"), "a.png": "", "below/note.txt": ""})
    monkeypatch.chdir(tmp_path / "mine" / "below")
    _, (part,) = find_parts("..")
    assert part.labels.name == "mine_train.json"


def test_labels_that_were_converted_are_not_read_beside_the_old_ones(tmp_path, caplog):
    """Else what is corrected in the old ones would change nothing. Named themselves, they are."""
    caplog.set_level("INFO")
    make(tmp_path, {"a.xml": VOC.format("a.png", "cell"), "a.png": ""})
    new = tmp_path / "labels"
    assert command_line.convert_main([str(tmp_path), str(new), "--format", "yolo"]) == 0
    assert find_parts(tmp_path)[0] == "Pascal VOC" and f"wrote them: {new}" in caplog.text
    assert command_line.main([str(new), str(tmp_path)]) == 0
    (tmp_path / "a.xml").unlink()
    with pytest.raises(DataError, match=f"{new}, which this program wrote, is read only where"):
        find_parts(tmp_path)


def test_a_file_of_coco_s_format_may_have_the_ending_of_a_list(tmp_path):
    file = tmp_path / "train.txt"
    file.write_text('{"images": [], "annotations": [], "categories": []}')
    assert as_coco((str(file), str(tmp_path)), folder=tmp_path) == [str(file)]


@pytest.mark.parametrize(("sound", "status"), [(200, 0), (2, 2)])
def test_bad_boxes_are_named_by_line_as_they_are_converted(sound, status, tmp_path, caplog, capsys):
    """A few are left to the training, as those of COCO's own files; many are refused."""
    box = BOX.format("cell") + "</bndbox></object>\n"
    text = "<annotation>\n" + box * sound + box.replace("<xmax>9", "<xmax>900") + "</annotation>"
    make(tmp_path, {"a.xml": text, "a.png": ""})
    assert command_line.convert_main([str(tmp_path), str(tmp_path / "out.json")]) == status
    line = f"{tmp_path / 'a.xml'}, line {sound + 2}"
    assert line in (capsys.readouterr().err if status else caplog.text)
    assert (tmp_path / "out.json").exists() is not bool(status)


POLYGONS = [[3, 3, 9, 3, 9, 9], [20, 20, 24, 20, 24, 26, 20, 26]]


@pytest.fixture
def shapes(tmp_path):
    """A name with a space and letters of another alphabet, an empty image, a crowd."""
    make(tmp_path, {"pictures/größe 1.png": "", "pictures/sub/empty.png": ""})
    annotation = {"image_id": 1, "category_id": 7, "area": 1, "iscrowd": 0}
    box = {"id": 1, "bbox": [1, 2, 10, 5], **annotation}
    parts = {"id": 2, "bbox": [3, 3, 21, 23], **annotation, "segmentation": POLYGONS}
    crowd = {"id": 3, "bbox": [0, 0, 9, 9], **annotation, "iscrowd": 1}
    names = {1: "größe 1.png", 2: "sub/empty.png"}
    return coco_content(names, [box, parts, crowd], {7: "красная клетка"}, size=(40, 30))


@pytest.mark.parametrize("kind", WITH_MASKS)
def test_the_command_writes_other_formats_and_reads_them_back(kind, shapes, tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(shapes))
    images = ["--images", str(tmp_path / "pictures")]
    words = [str(tmp_path / "a.json"), str(tmp_path / "labels"), *images, "--format", kind]
    assert command_line.convert_main(words) == 0
    back = [str(tmp_path / "labels"), str(tmp_path / "b.json"), *images]
    assert command_line.convert_main(back) == 0, capsys.readouterr().err
    content = json.loads((tmp_path / "b.json").read_text())
    assert [image["file_name"] for image in content["images"]] == ["größe 1.png", "sub/empty.png"]
    assert content["categories"] == [{"id": 1, "name": "красная клетка"}]
    box, parts = content["annotations"]
    assert np.allclose(box["bbox"], [1, 2, 10, 5], atol=1e-6)
    assert np.allclose(parts["bbox"], [3, 3, 21, 23], atol=1e-6)
    assert "segmentation" not in box and not {"source", READER} & {*box, *content}
    mask = parts["segmentation"]
    assert len(mask) == (1 if WRITTEN[kind].masks == "one outline" else 2)
    areas = [area(merge(frPyObjects(polygons, 30, 40))) for polygons in (mask, POLYGONS)]
    assert areas[0] == areas[1] > 30


@pytest.mark.parametrize("kind", WITH_MASKS)
def test_runs_come_back_as_polygons_of_the_same_pixels(kind, shapes, tmp_path):
    """Some pixels and a ring; a box of runs comes back as it was."""
    masks = np.zeros((2, 30, 40), np.uint8, order="F")
    masks[0, 10:14, 20:24] = 1
    masks[1, 5:25, 5:25] = 1
    masks[1, 12:15, 12:20] = 0
    things = []
    for number, mask in enumerate(masks, 1):
        runs = encode(np.asfortranarray(mask))
        entry = {"id": number, "image_id": 1, "category_id": 7, "area": 1, "iscrowd": 0}
        things.append({**entry, "bbox": toBbox(runs).tolist(), "segmentation": runs})
    shapes["annotations"] = things
    write_labels(shapes, kind, tmp_path / "labels", tmp_path / "pictures")
    back = read_labels(tmp_path / "labels", tmp_path / "pictures")["annotations"]
    for one, thing, mask in zip(back, things, masks, strict=True):
        assert np.allclose(one["bbox"], thing["bbox"], atol=1e-3)
        drawn = decode(merge(frPyObjects(one["segmentation"], 30, 40)))
        np.testing.assert_array_equal(drawn, mask)


def test_an_image_on_another_drive_has_its_whole_path(shapes, tmp_path, monkeypatch):
    """Windows has no relative path to it."""

    def other_drive(*_):
        raise ValueError("path is on mount 'C:', start on mount 'D:'")

    monkeypatch.setattr("os.path.relpath", other_drive)
    write_labels(shapes, "labelme", tmp_path / "labels", tmp_path / "pictures")
    content = json.loads((tmp_path / "labels" / "größe 1.json").read_text("utf-8"))
    assert content["imagePath"] == str(tmp_path / "pictures" / "größe 1.png")


def test_labels_stay_in_their_folder_and_apart(shapes, tmp_path):
    shapes["images"][0]["file_name"] = "../../away.png"
    write_labels(shapes, "labelme", tmp_path / "labels", tmp_path)
    assert (tmp_path / "labels" / "away.json").is_file()
    shapes["images"][1]["file_name"] = "away.jpg"
    with pytest.raises(DataError, match=r"away\.jpg and .*away\.png"):
        write_labels(shapes, "labelme", tmp_path / "labels", tmp_path)


def test_labels_of_an_earlier_call_do_not_get_other_classes(shapes, tmp_path):
    """With --overwrite they would stay under a new data.yaml, whose numbers are of its classes."""
    labels = tmp_path / "labels"
    for kind in ("yolo", "labelme"):
        write_labels(shapes, kind, labels, tmp_path / "pictures")
        write_labels(shapes, kind, labels, tmp_path / "pictures")

    def content():
        return {file: file.read_bytes() for file in labels.rglob("*.*")}

    before = content()
    dropped = shapes["images"].pop()
    shapes["annotations"] = [
        one for one in shapes["annotations"] if one["image_id"] != dropped["id"]
    ]
    shapes["categories"][0]["name"] = "another"
    with pytest.raises(DataError, match=rf"data\.yaml.*{Path(dropped['file_name']).stem}\.txt"):
        write_labels(shapes, "yolo", labels, tmp_path / "pictures")
    assert content() == before


corners = st.tuples(st.integers(0, 39), st.integers(0, 29), st.integers(1, 9), st.integers(1, 9))
signs = st.characters(categories=["L", "N"], include_characters="&<>'\"/")
names = st.text(signs, min_size=1, max_size=5)


@given(data=st.lists(st.tuples(names, corners), max_size=4))
@pytest.mark.parametrize("kind", FOLDERS)
def test_boxes_come_back_from_each_format(kind, data, tmp_path_factory):
    folder = make(tmp_path_factory.mktemp("set"), {"a b.png": ""})
    boxes = [(name, [x, y, min(w, 40 - x), min(h, 30 - y)]) for name, (x, y, w, h) in data]
    ids = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in boxes))}
    entries = [{"image_id": 5, "category_id": ids[name], "bbox": box} for name, box in boxes]
    classes = {number: name for name, number in ids.items()}
    content = coco_content({5: "a b.png"}, entries, classes, size=(40, 30))
    write_labels(content, kind, folder / "labels", folder)
    if not boxes and WRITTEN[kind].classes_file:
        return  # there is no class to name
    assert recognise(folder / "labels")[0] == WRITTEN[kind].title or not boxes
    back = read_labels(folder / "labels", folder)
    found = {category["id"]: category["name"] for category in back["categories"]}
    assert [found[a["category_id"]] for a in back["annotations"]] == [name for name, _ in boxes]
    got = np.array([a["bbox"] for a in back["annotations"]]).reshape(-1, 4)
    assert np.allclose(got, np.reshape([box for _, box in boxes], (-1, 4)), atol=1e-6)
