"""Folders of usual tools, their parts, and one data set through every format that is written."""

import contextlib
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools.mask import area, decode, encode, frPyObjects, merge, toBbox

from lambda_det.detection.data.annotations import check_coco
from lambda_det.detection.data.coco_format import READER, read_json
from lambda_det.detection.data.label_files import write_labels
from lambda_det.detection.data.written_formats import WRITTEN
from lambda_det.errors import DataError
from lambda_det.own_data import command_line
from lambda_det.own_data.labels.conversion import read_labels
from lambda_det.own_data.labels.formats import recognise
from lambda_det.own_data.part_names import named_part
from tests.coco import annotation, coco_content
from tests.own_data.parts import (
    BOX,
    LINE,
    YAML,
    boxes,
    coco,
    cups,
    cvat,
    find_parts,
    labelme,
    make,
    shape,
    via,
    voc,
)

VOC, LABELME, VIA = voc("a.png", BOX), labelme("a.png"), via(cups("a.png"))
OF_COCO, OF_LIST = coco(cups("a.png")), "YOLO with a list of names"
OF_BUS = {"xml": voc("b.png", BOX), "png": ""}.items()
FOLDERS = [name for name, row in WRITTEN.items() if row.ending]  # with a file for each image


def images_of(parts: list, root: Path) -> list[list[str]]:
    """The images of each part by their paths."""
    contents = [read_json(part.labels) for part in parts]
    return [
        sorted(
            Path(part.images, image["file_name"]).relative_to(root).as_posix()
            for image in content["images"]
        )
        for part, content in zip(parts, contents, strict=True)
    ]


# Labels, with images that are in no part; the format, and the images of each part
LAYOUTS = {
    "Roboflow's YOLO, whose paths are one level too high": (
        {
            "data.yaml": YAML + "train: ../left/images\nval: ../right/images\ntest: ../no/images\n",
            "more/images/c.png": "",
            "left/labels/a.txt": LINE,
        },
        "YOLO",
        ["left/images/a.png"],
        ["right/images/b.png"],
    ),
    "Ultralytics' YOLO, which is validated on its training images": (
        {
            "coco8.yaml": "path: ../nowhere\ntrain: images/train\nval: images/train\n" + YAML,
            "labels/train/größe 1.txt": LINE,
        },
        "YOLO",
        ["images/train/größe 1.png"],
    ),
    "Ultralytics' YOLO beside the folder of its images, which is tested on those of val": (
        {
            "set.yaml": YAML
            + "path: ../datasets/set\ntrain: images/train\nval: images/val\ntest: images/val\n",
            "set/labels/train/a.txt": LINE,
        },
        "YOLO",
        ["set/images/train/a.png"],
        ["set/images/val/b.png"],
    ),
    "YOLO beside the folder of its images, from Windows": (
        {
            "set.yaml": YAML + "path: C:\\me\\set\ntrain: images/train\nval: images/val\n",
            "set/labels/train/a.txt": LINE,
        },
        "YOLO",
        ["set/images/train/a.png"],
        ["set/images/val/b.png"],
    ),
    "YOLO whose data.yaml names no parts": (
        {"data.yaml": YAML, "logo.png": ""},
        "YOLO",
        ["test cat/train/a.png"],
        ["test cat/val/a.png"],
    ),
    "YOLO with other words for the parts, of another machine": (
        {
            "data.yaml": YAML
            + "path: 'D:\\me\\set'\ntrain: 'D:\\me\\set\\train\\images'\n"
            + "valid: /content/set/valid/images\ntest: null\n",
        },
        "YOLO",
        ["train/images/a.png"],
        ["valid/images/a.png"],
    ),
    "YOLO with lists of images of another machine": (
        {
            "data.yaml": YAML + "train: train.txt\nval: [val.txt]\n",
            "train.txt": "data/images/a.png\n\n./images/b.png\n",
            "val.txt": "/home/me/images/c.png\n",
            "images/d.png": "",
        },
        "YOLO",
        ["images/a.png", "images/b.png"],
        ["images/c.png"],
    ),
    "YOLO with keys of other programs": (
        {
            "data.yaml": YAML
            + "train: train\nval: val\neval: bbox\nevaluation: {metric: ap}\ndev: 0.1\n"
            + "best: runs/best.pt\ntext: a/b\nlatest: runs/latest\nrest: a/b\n",
        },
        "YOLO",
        ["train/a.png"],
        ["val/b.png"],
    ),
    "YOLO of CVAT": (
        {"obj.names": "cell\n\n", "obj_train_data/a.txt": ""},
        OF_LIST,
        ["obj_train_data/a.png"],
    ),
    "YOLO of Darknet": (
        {
            "obj.names": "cell\n",
            "obj.data": "classes = 1\ntrain = data/train.txt\nvalid = data/valid.txt\n",
            "train.txt": "data/obj/a.png\n",
            "valid.txt": "data/obj/b.png\n",
            "obj/c.png": "",
        },
        OF_LIST,
        ["obj/a.png"],
        ["obj/b.png"],
    ),
    "YOLO with a list of names": (
        {
            "classes.txt": "cell\n",
            "labels/train/classes.txt": "cell\n",
            **{f"labels/{name}.txt": LINE for name in ("train/a", "val/a", "test/c")},
        },
        OF_LIST,
        ["images/train/a.png"],
        ["images/val/a.png"],
        ["images/test/c.png"],
    ),
    "YOLO with a part without a word": (
        {
            "classes.txt": "cup\n",
            **dict.fromkeys(["day/a.txt", "night/a.txt", "valid/c.txt"], LINE),
        },
        OF_LIST,
        ["day/a.png", "day/new/b.png", "night/a.png"],
        ["valid/c.png"],
    ),
    "Pascal VOC's lists": (
        {
            **{f"VOC2007/Annotations/{n}.xml": voc(f"{n}.jpg", BOX) for n in "abcd"},
            "VOC2007/ImageSets/Main/train.txt": "# mine\na\nb\n",
            "VOC2007/ImageSets/Main/val.txt": "c\n",
            "VOC2007/ImageSets/Main/cell_train.txt": "a 1\nb -1\n",
        },
        "Pascal VOC",
        ["VOC2007/JPEGImages/a.jpg", "VOC2007/JPEGImages/b.jpg"],
        ["VOC2007/JPEGImages/c.jpg"],
    ),
    "Pascal VOC's lists, where training and validation are one": (
        {
            **{f"Annotations/{n}.xml": voc(f"{n}.jpg", BOX) for n in "ab"},
            "ImageSets/Main/Train_val.txt": "a\n",
            "ImageSets/Main/val.txt": "a\n",
            "ImageSets/Main/test.txt": "b\n",
        },
        "Pascal VOC",
        ["JPEGImages/a.jpg"],
        ["JPEGImages/b.jpg"],
    ),
    "Pascal VOC with parts of each class": (
        dict.fromkeys([f"{x}/{y}/a.xml" for x in "xy" for y in ("train", "val")], VOC),
        "Pascal VOC",
        ["x/train/a.png", "y/train/a.png"],
        ["x/val/a.png", "y/val/a.png"],
    ),
    "Pascal VOC with folders of labels and of images": (
        {"Annotations/scans/a.xml": VOC, "Annotations/test/a.xml": VOC},
        "Pascal VOC",
        ["JPEGImages/scans/a.png"],
        ["JPEGImages/test/a.png"],
    ),
    "Pascal VOC with parts of the images alone": (
        {f"Annotations/{x}.xml": voc(f"{x}.jpg", BOX) for x in "abc"},
        "Pascal VOC",
        ["images/a.jpg", "images/b.jpg"],
        ["images/Validation/c.jpg"],
    ),
    "COCO's own": (
        {
            "annotations/instances_train2017.json": OF_COCO,
            "annotations/person_keypoints_train2017.json": OF_COCO,
            "annotations/instances_val2017.json": OF_COCO,
        },
        "COCO",
        ["train2017/a.png"],
        ["val2017/a.png"],
    ),
    "COCO with a part without a word": (
        {"scans.json": OF_COCO, "val.json": OF_COCO},
        "COCO",
        ["scans/a.png"],
        ["val/a.png"],
    ),
    "COCO in one file": (
        {"config.yaml": "train:\n  a: 1\n", "labels.json": OF_COCO},
        "COCO",
        ["pictures/a.png"],
    ),
    "LabelMe, a file an image, and images of one name": (
        {"x/a.json": LABELME, "y/a.json": LABELME},
        "LabelMe",
        ["x/a.png", "y/a.png"],
    ),
    "LabelMe, where one part is not to train on by its name": (
        {"test/a.json": LABELME},
        "LabelMe",
        ["test/a.png"],
    ),
    "VIA, with files that are called like the parts": (
        {"via_train.json": VIA, "via_val.json": via(cups("b.png"))},
        "VIA",
        ["images/a.png"],
        ["images/b.png"],
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_folders_of_usual_tools(case, tmp_path):
    labels, name, *expected = LAYOUTS[case]
    images = {image: "" for part in expected for image in part}
    root = make(tmp_path / "my train data", labels | images)
    found, parts = find_parts(root)
    assert (found, images_of(parts, root)) == (name, expected)


@pytest.mark.parametrize(
    ("folder", "is_file", "part"),
    [
        *((name, False, "train") for name in ("trn", "TrainImages", "train_1")),
        *((name, False, "val") for name in ("valset", "eval", "val-2017", "ValImages2017")),
        ("instances_ValImages2017", True, "val"),
        ("cells_of_the_test", True, "test"),
        # a class, a thing, a place
        ("TestTube", True, ""),
        *((name, False, "") for name in ("TestTube", "DevBoard", "VOCDevKit", "test_flight_2")),
        # of both, which is trained on
        *((f"{name}Images", False, "") for name in ("train_val", "Train Val", "TRAINVAL")),
        *((name, True, "") for name in ("instances_TrainVal", "val and train-images")),
    ],
)
def test_the_part_that_a_name_tells(folder, is_file, part):
    assert named_part(Path("train", folder), Path("train"), is_file=is_file) == part


REFUSED = {
    "two files of COCO's": ({"a.json": OF_COCO, "b.json": OF_COCO}, "a.json"),
    "an image of COCO's that is nowhere": ({"a.json": coco(cups("b.png"))}, "--train "),
    "a class called train": (
        {f"{name}/b.{end}": text for name in ("bus", "train") for end, text in OF_BUS},
        "1 of 2 labels",
    ),
    "an empty list": ({"ImageSets/Main/train.txt": "", "b.xml": VOC}, "train.txt: of 0 images"),
    "a list elsewhere of what is not there": (
        {"data.yaml": YAML + "train: lists/a.txt\n", "lists/a.txt": "../a.png\nb.png\n"},
        "a.txt, line 2",
    ),
}


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
    files = {f"{part}/_annotations.coco.json": OF_COCO for part in ("train", "valid")}
    labels = "test/_annotations.coco.json"
    files[labels] = json.dumps(json.loads(OF_COCO) | images)
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
    files = {"data.yaml": YAML, "a.png": "", "a.txt": LINE, "b.xml": VOC}
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
TURNED = cvat(cups("a.png")).replace("/>", ' rotation="9"/>')
MASK = '<mask label="b" left="3" top="2" width="2" height="2" rle="1,3"/></image>'
CIRCLE = shape("circle", ((9, 9), (9, 14)), "b")
SOUND = [
    *(
        labels | {image: "" for part in parts for image in part}
        for labels, _, *parts in LAYOUTS.values()
    ),
    {"annotations.xml": TURNED.replace("</image>", MASK), "a.png": ""},
    {"a.json": labelme("a.png", shape("polygon", ((1, 2), (9, 4), (5, 8))), CIRCLE), "a.png": ""},
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
                    write_labels(read_json(converted), kind, root / "out" / kind, images)


def test_labels_that_cannot_be_read_refuse_each_part(tmp_path):
    """An evaluation looks at one part, which may lack the objects of the broken file."""
    broken = voc("b.png", BOX)[:-9]
    files = {"train/a.xml": VOC, "val/c.xml": voc("c.png", BOX), "val/b.xml": broken}
    make(tmp_path, files | dict.fromkeys(("train/a.png", "val/b.png", "val/c.png"), ""))
    _, parts = find_parts(tmp_path)
    refusals = [check_coco(part.labels, part.images).refusal() for part in parts]
    assert len(refusals) == 2 and all(f"{tmp_path / 'val/b.xml'}" in one for one in refusals)


@pytest.mark.parametrize("inner", ["", "val/"])
def test_a_project_of_cvat_has_a_part_for_each_subset(inner, tmp_path):
    """In one file, which gives the images of all the same names, in folders that say nothing."""
    subsets = ("Train", "Validation", "Test")
    images = [f'<image name="{inner}a.png" subset="{name}"/>' for name in reversed(subsets)]
    pictures = {f"images/{name}/{inner}a.png": "" for name in subsets}
    text = cvat(cups("images/Train/b.png")).replace("</annotations>", "".join(images))
    make(tmp_path, pictures | {"annotations.xml": f"{text}</annotations>"})
    home = make(tmp_path, {"images/Train/b.png": ""}) / "images"
    _, parts = find_parts(tmp_path, home)
    train, *others = ([f"{name}/{inner}a.png"] for name in subsets)
    assert images_of(parts, home) == [sorted([*train, "Train/b.png"]), *others]
    assert parts[1].images == str(home)


def test_parts_have_the_classes_of_all_and_messages_their_lines(tmp_path):
    """The rarest class is in one part alone; the check names the line of the original file."""
    bad = voc("b.png", ("rare", (1, 2, 1, 7)))
    files = {"a.xml": VOC, "a.png": "", "b.xml": bad, "b.png": ""}
    make(tmp_path, files | {"ImageSets/Main/train.txt": "a", "ImageSets/Main/val.txt": "b"})
    _, parts = find_parts(tmp_path)
    reports = [check_coco(part.labels, part.images) for part in parts]
    assert [list(report.categories.values()) for report in reports] == [["cup", "rare"]] * 2
    refusal = reports[1].refusal()
    assert f"{tmp_path / 'b.xml'}, line 2" in refusal and refusal.startswith(parts[1].source)


@pytest.mark.parametrize(
    "value", ["[day1/images, ../day2/images]", "lists/all.txt", "[day1/images, lists/second.txt]"]
)
def test_yolo_images_of_several_folders_and_of_lists_elsewhere(value, tmp_path):
    """A list has whole paths, or ones from its own folder or from that of data.yaml."""
    second = tmp_path / "day2" / "images" / "b.png"
    make(
        tmp_path,
        {
            "set/data.yaml": f"{YAML}train: {value}\nval: day1/images\n",
            "set/lists/all.txt": f"../day1/images/a.png\n\n# more\n{second}\n",
            "set/lists/second.txt": "../day2/images/b.png",
            "set/day1/labels/a.txt": LINE,
            "day2/labels/b.txt": LINE + LINE,
            **dict.fromkeys(["set/day1/images/a.png", "day2/images/b.png"], ""),
        },
    )
    if "../day2" not in value:  # a list names the others alone
        make(tmp_path, {"day2/images/left.png": ""})
    kind, (train, val) = find_parts(tmp_path / "set")
    assert kind == "YOLO" and val.images == str(tmp_path / "set" / "day1" / "images")
    content = read_json(str(train.labels))
    names = [str(Path(train.images, image["file_name"])) for image in content["images"]]
    ids = [image["id"] for image in content["images"]]
    objects = Counter(names[ids.index(one["image_id"])] for one in content["annotations"])
    assert objects == {str(second): 2, str(tmp_path / "set/day1/images/a.png"): 1}
    assert str(tmp_path / "day2" / "labels" / "b.txt") in content["annotations"][0]["source"]
    assert content["categories"] == read_json(str(val.labels))["categories"]


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("COCO", {"all.json": OF_COCO}),
        ("Pascal VOC", {"train/a.xml": VOC, "val/a.xml": VOC}),
        ("YOLO", {"data.yaml": YAML, "train/a.txt": LINE, "val/a.txt": LINE}),
    ],
)
def test_images_that_are_elsewhere_are_named_for_all_parts(kind, labels, tmp_path):
    images = ["a.png"] if kind == "COCO" else ["train/a.png", "val/a.png"]
    make(tmp_path / "labels", labels)
    pictures = make(tmp_path / "pictures", dict.fromkeys(images, ""))
    found, places = find_parts(tmp_path / "labels", pictures)
    assert found == kind and images_of(places, pictures) == [[image] for image in images]
    for place in places:
        report = check_coco(place.labels, place.images)
        assert not report.refusal() and report.annotations == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", labelme("../a.png")),
        ("a.xml", voc("../a.png", BOX)),
        ("some.xml", cvat(cups("../a.png"))),
        ("some.json", via(cups("../a.png"))),
        ("_annotations.coco.json", coco(cups("pictures/a.png"))),
    ],
)
def test_a_folder_of_labels_alone_is_told_how_to_name_the_images(name, text, tmp_path, capsys):
    """Both forms that the message names work, with a path that leads to the image or not."""
    make(tmp_path, {f"labels/{name}": text, "pictures/a.png": "", "a.png": ""})
    labels, images = str(tmp_path / "labels"), str(tmp_path / "pictures")
    assert command_line.main([labels]) == 2
    error = capsys.readouterr().err
    assert "lambda-det check" in error and "--images DIR" in error and "format" not in error
    assert command_line.main([labels, images]) == 0
    output = str(tmp_path / "out.json")
    assert command_line.convert_main([labels, output, "--images", images]) == 0


def test_labels_that_were_converted_are_not_read_beside_the_old_ones(tmp_path, caplog):
    """Else what is corrected in the old ones would change nothing. Named themselves, they are."""
    caplog.set_level("INFO")
    make(tmp_path, {"a.xml": VOC, "a.png": ""})
    new = tmp_path / "labels"
    assert command_line.convert_main([str(tmp_path), str(new), "--format", "yolo"]) == 0
    assert find_parts(tmp_path)[0] == "Pascal VOC" and f"wrote them: {new}" in caplog.text
    assert command_line.main([str(new), str(tmp_path)]) == 0
    (tmp_path / "a.xml").unlink()
    with pytest.raises(DataError, match=f"{new}, which this program wrote, is read only where"):
        find_parts(tmp_path)


@pytest.mark.parametrize(("sound", "status"), [(200, 0), (2, 2)])
def test_bad_boxes_are_named_by_line_as_they_are_converted(sound, status, tmp_path, caplog, capsys):
    """A few are left to the training, as those of COCO's own files; many are refused."""
    text = voc("a.png", *[BOX] * sound, ("cup", (1, 2, 900, 7)))
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
    box = annotation(1, 1, [1, 2, 10, 5], category_id=7, segmentation=None)
    parts = annotation(2, 1, [3, 3, 21, 23], category_id=7, segmentation=POLYGONS)
    crowd = annotation(3, 1, [0, 0, 9, 9], category_id=7, iscrowd=1)
    names = {1: "größe 1.png", 2: "sub/empty.png"}
    return coco_content(names, [box, parts, crowd], {7: "красная клетка"}, size=(40, 30))


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_command_writes_other_formats_and_reads_them_back(
    kind, shapes, tmp_path, capsys, monkeypatch
):
    """Also to a folder that is there, in one that cannot be written to."""
    (tmp_path / "a.json").write_text(json.dumps(shapes))
    (tmp_path / "top/labels").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path / "top")
    first, labels, back = (str(tmp_path / name) for name in ("a.json", "top/labels", "b.json"))
    for words in ([first, labels, "--format", kind, "--overwrite"], [labels, back]):
        words += ["--images", str(tmp_path / "pictures")]
        assert command_line.convert_main(words) == 0, capsys.readouterr().err
    content = json.loads((tmp_path / "b.json").read_text())
    assert [image["file_name"] for image in content["images"]] == ["größe 1.png", "sub/empty.png"]
    assert content["categories"] == [{"id": 1, "name": "красная клетка"}]
    box, parts = content["annotations"]
    assert np.allclose(box["bbox"], [1, 2, 10, 5], atol=1e-6)
    assert np.allclose(parts["bbox"], [3, 3, 21, 23], atol=1e-6)
    assert ("segmentation" in box) is (kind == "yolo")  # whose lines have one form
    assert not {"source", READER} & {*box, *content}
    mask = parts["segmentation"]
    assert len(mask) == (1 if kind == "yolo" else 2)
    areas = [area(merge(frPyObjects(polygons, 30, 40))) for polygons in (mask, POLYGONS)]
    assert areas[0] == areas[1] > 30


@pytest.mark.parametrize("kind", FOLDERS)
def test_runs_come_back_as_polygons_of_the_same_pixels(kind, shapes, tmp_path):
    """Some pixels and a ring; a box of runs comes back as it was."""
    masks = np.zeros((2, 30, 40), np.uint8, order="F")
    masks[0, 10:14, 20:24] = 1
    masks[1, 5:25, 5:25] = 1
    masks[1, 12:15, 12:20] = 0
    things = []
    for number, mask in enumerate(masks, 1):
        runs = encode(np.asfortranarray(mask))
        box = toBbox(runs).tolist()
        things.append(annotation(number, 1, box, category_id=7, segmentation=runs))
    shapes["annotations"] = things
    write_labels(shapes, kind, tmp_path / "labels", tmp_path / "pictures")
    back = read_labels(tmp_path / "labels", tmp_path / "pictures")["annotations"]
    for one, thing, mask in zip(back, things, masks, strict=True):
        assert np.allclose(one["bbox"], thing["bbox"], atol=1e-3)
        drawn = decode(merge(frPyObjects(one["segmentation"], 30, 40)))
        np.testing.assert_array_equal(drawn, mask)
    write_labels(shapes, "coco", tmp_path / "all.json", tmp_path / "pictures")
    kept = json.loads((tmp_path / "all.json").read_text())["annotations"]
    for one, thing in zip(kept, things, strict=True):
        assert one["segmentation"]["counts"].encode() == thing["segmentation"]["counts"]


def test_yolo_s_lines_have_one_form_in_a_data_set(shapes, tmp_path, caplog):
    """Ultralytics reads no mix; a mask of a young detector may be empty."""
    box, parts, _ = shapes["annotations"]
    box["image_id"], box["segmentation"] = 2, encode(np.zeros((30, 40), np.uint8, order="F"))
    written = tmp_path / "labels/sub/empty.txt"
    for things, expected in (
        ([box], [0.15, 4.5 / 30, 0.25, 5 / 30]),
        ([box, parts], [0.025, 2 / 30, 0.275, 2 / 30, 0.275, 7 / 30, 0.025, 7 / 30]),
    ):
        write_labels({**shapes, "annotations": things}, "yolo", tmp_path / "labels", tmp_path)
        (line,) = written.read_text().splitlines()
        assert np.allclose([float(word) for word in line.split()], [0, *expected])
        assert ("1 of 2 objects have no outline" in caplog.text) is (len(things) > 1)


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
    for _ in range(2):
        write_labels(shapes, "yolo", labels, tmp_path / "pictures")
    before = {file: file.read_bytes() for file in labels.rglob("*.*")}
    shapes["images"].pop()  # which has no object
    shapes["categories"][0]["name"] = "another"
    with pytest.raises(DataError, match=r"data\.yaml.*empty\.txt"):
        write_labels(shapes, "yolo", labels, tmp_path / "pictures")
    assert {file: file.read_bytes() for file in labels.rglob("*.*")} == before


corners = st.tuples(st.integers(0, 39), st.integers(0, 29), st.integers(1, 9), st.integers(1, 9))
signs = st.characters(categories=["L", "N"], include_characters="&<>'\"/")
names = st.text(signs, min_size=1, max_size=5)


@given(data=st.lists(st.tuples(names, corners), max_size=4))
@pytest.mark.parametrize("kind", FOLDERS)
def test_boxes_come_back_from_each_format(kind, data, tmp_path_factory):
    folder = make(tmp_path_factory.mktemp("set"), {"a b.png": ""})
    things = [(name, [x, y, min(w, 40 - x), min(h, 30 - y)]) for name, (x, y, w, h) in data]
    write_labels(json.loads(coco({"a b.png": things})), kind, folder / "labels", folder)
    if not things and WRITTEN[kind].classes_file:
        return  # there is no class to name
    assert recognise(folder / "labels")[0] == WRITTEN[kind].title or not things
    back = boxes(read_labels(folder / "labels", folder))
    assert back == [(name, pytest.approx(box, abs=1e-6)) for name, box in things]
