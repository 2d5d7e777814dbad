"""Folders of usual tools, their parts, and one data set through every format that is written."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pycocotools.mask import area, frPyObjects, merge

from lambda_det.detection.data.annotations import check_coco
from lambda_det.detection.data.coco_format import read_json
from lambda_det.detection.data.label_files import WRITTEN, write_labels
from lambda_det.errors import DataError
from lambda_det.own_data import command_line
from lambda_det.own_data.labels import as_coco, read_labels
from lambda_det.own_data.layouts import find_parts
from tests.coco import coco_content

BOX = "<object><name>{}</name><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>9</xmax><ymax>8</ymax>"
VOC = "<annotation><filename>{}</filename>\n" + BOX + "</bndbox></object></annotation>"
YAML = "names: [cell]\n"
VIA = """{"a.png9": {"filename": "a.png", "file_attributes": {}, "regions": [{"region_attributes":
{"a": "b"}, "shape_attributes": {"name": "circle", "cx": 9, "cy": 9, "r": 5.5}}]}}"""
LABELME = json.dumps({"shapes": [], "imagePath": "a.png"})


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Converted files go to a folder of the tests."""
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path_factory.mktemp("cache")))


def coco(name: str) -> str:
    return json.dumps(coco_content({1: name}, [], {1: "cell"}, size=(40, 30)))


def make(root: Path, files: dict[str, str]) -> Path:
    """Files of a data set; those of pictures are named by their ending alone."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith((".png", ".jpg")):
            Image.new("RGB", (40, 30)).save(root / name)
        else:
            (root / name).write_text(text, "utf-8")
    return root


# Files, the format, labels and pictures to train on and to evaluate on; pictures that are found
LAYOUTS = {
    "Roboflow's YOLO, whose paths are one level too high": (
        {
            "data.yaml": YAML + "train: ../left/images\nval: ../right/images\n",
            **dict.fromkeys(["left/images/a.png", "right/images/b.png", "test/images/c.png"], ""),
            "left/labels/a.txt": "0 .5 .5 1 1\n",
        },
        ("YOLO", "data.yaml", "left/images", "data.yaml", "right/images", 1),
    ),
    "Ultralytics' YOLO, which is validated on its training images": (
        {
            "coco8.yaml": "path: ../nowhere\ntrain: images/train\nval: images/train\n" + YAML,
            "images/train/größe 1.png": "",
            "labels/train/größe 1.txt": "0 .5 .5 1 1\n",
        },
        ("YOLO", "coco8.yaml", "images/train", 1),
    ),
    "YOLO whose data.yaml names no parts": (
        {"data.yaml": YAML, **dict.fromkeys(["test cat/train/a.png", "test cat/val/a.png"], "")},
        ("YOLO", "data.yaml", "test cat/train", "data.yaml", "test cat/val", 1),
    ),
    "YOLO with lists of pictures of another machine": (
        {
            "data.yaml": YAML + "train: train.txt\nval: [val.txt]\n",
            "train.txt": "data/images/a.png\n\n./images/b.png\n",
            "val.txt": "/home/me/images/c.png\n",
            **dict.fromkeys([f"images/{name}.png" for name in "abcd"], ""),
        },
        ("YOLO", "train.txt", ".", "val.txt", ".", 2),
    ),
    "YOLO of CVAT": (
        {"obj.names": "cell\n\n", "obj_train_data/a.png": "", "obj_train_data/a.txt": ""},
        ("YOLO with a list of names", ".", ".", 1),
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
            *("VOC2007/ImageSets/Main/train.txt", "VOC2007/JPEGImages"),
            *("VOC2007/ImageSets/Main/val.txt", "VOC2007/JPEGImages", 2),
        ),
    ),
    "Roboflow's Pascal VOC": (
        {
            "train/a.xml": VOC.format("a.jpg", "cell"),
            "valid/b.xml": VOC.format("b.jpg", "cell"),
            **dict.fromkeys(["train/a.jpg", "valid/b.jpg"], ""),
        },
        ("Pascal VOC", "train", "train", "valid", "valid", 1),
    ),
    "COCO's own": (
        {
            "annotations/instances_train2017.json": coco("a.jpg"),
            "annotations/person_keypoints_train2017.json": coco("a.jpg"),
            "annotations/instances_val2017.json": coco("a.jpg"),
            **dict.fromkeys(["train2017/a.jpg", "val2017/a.jpg"], ""),
        },
        (
            *("COCO", "annotations/instances_train2017.json", "train2017"),
            *("annotations/instances_val2017.json", "val2017", 1),
        ),
    ),
    "Roboflow's COCO": (
        {
            "train/_annotations.coco.json": coco("a b.jpg"),
            "test/_annotations.coco.json": coco("c.jpg"),
            **dict.fromkeys(["train/a b.jpg", "test/c.jpg"], ""),
        },
        (
            *("COCO", "train/_annotations.coco.json", "train"),
            *("test/_annotations.coco.json", "test", 1),
        ),
    ),
    "LabelMe, a file a picture, and pictures of one name": (
        {"x/a.json": LABELME, "y/a.json": LABELME, "x/a.png": "", "y/a.png": ""},
        ("LabelMe", ".", ".", 2),
    ),
    "VIA, with a copy": (
        {
            **dict.fromkeys(["train/via_region_data.json", "train/copy.json", "val/b.json"], VIA),
            **dict.fromkeys(["train/a.png", "val/a.png"], ""),
        },
        ("VIA", "train", "train", "val", "val", 1),
    ),
    "COCO in one file": (
        {"config.yaml": "train:\n  a: 1\n", "labels.json": coco("a.png"), "pictures/a.png": ""},
        ("COCO", ".", "pictures", 1),
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_folders_of_usual_tools(case, tmp_path):
    files, (kind, *expected, pictures) = LAYOUTS[case]
    root = make(tmp_path / "my train data", files)
    named, parts = find_parts(root)
    assert named == kind
    found = [str(path.relative_to(root)) for part in parts for path in part]
    assert found == list(filter(None, expected))
    assert len(read_labels(*parts[0])["images"]) == pictures


REFUSED = {
    "two files of COCO's": ({"a.json": coco("a.png"), "b.json": coco("a.png")}, "a.json"),
    "a picture of COCO's that is nowhere": ({"a.json": coco("b.png")}, "--train "),
    "a class called train": (
        {f"{name}/b.xml": VOC.format("b.png", "a") for name in ("bus", "train")},
        "1 of 2 files",
    ),
    "a class of YOLO's called train": (
        {
            "data.yaml": YAML,
            **dict.fromkeys(["bus/b.png", "train/c.png", "bus/b.txt", "train/c.txt"], ""),
        },
        "1 of 2 files",
    ),
    "two data.yaml": ({f"{x}/data.yaml": YAML + "train: .\n" for x in "xy"}, "name one of them"),
    "a folder that is not there": ({"data.yaml": YAML + "train: [a, b]", "a/a.png": ""}, "'b']"),
    "an empty list": (
        {"ImageSets/Main/train.txt": "", "b.xml": VOC.format("a.png", "a")},
        "train.txt: of 0 pictures",
    ),
    "a list elsewhere of what is not there": (
        {"data.yaml": YAML + "train: lists/a.txt\n", "lists/a.txt": "../a.png\nb.png\n"},
        "a.txt, line 2",
    ),
    "a list of what is not there": (
        {"data.yaml": YAML + "train: a.txt\n", "a.txt": "a.png\nb.png\n"},
        "a.txt, line 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_clear_is_refused(case, tmp_path):
    files, words = REFUSED[case]
    make(tmp_path, {**files, "a.png": ""})
    with pytest.raises(DataError) as found:
        read_labels(*find_parts(tmp_path)[1][0])
    assert words in str(found.value)


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
        parts = [tuple(map(str, part)) for part in find_parts(root)[1]]
        for converted, (_, images) in zip(as_coco(*parts), parts, strict=True):
            if not check_coco(converted, images, files="none").refusal():
                for kind in WRITTEN:
                    write_labels(read_json(converted), kind, root / "out" / kind, images)


@pytest.mark.parametrize("inner", ["", "val/"])
def test_a_project_of_cvat_has_a_part_for_each_subset(inner, tmp_path):
    """In one file, which gives the pictures of all the same names, in folders that say nothing."""
    box = '<box label="a" xtl="1" ytl="2" xbr="9" ybr="7"/>'
    subsets = ("Validation", "Train", "Test")
    images = [f'<image name="{inner}a.png" subset="{name}">{box}</image>' for name in subsets]
    text = f"<annotations>{''.join(images)}</annotations>"
    pictures = {f"images/{name}/{inner}a.png": "" for name in subsets}
    home = make(tmp_path, {"annotations.xml": text, **pictures}) / "images"
    _, parts = find_parts(tmp_path, home)
    contents = [read_json(file) for file in as_coco(*(tuple(map(str, part)) for part in parts))]
    found = [[image["file_name"] for image in content["images"]] for content in contents]
    assert found == [[f"Train/{inner}a.png"], [f"Validation/{inner}a.png"]]
    assert [len(c["annotations"]) for c in contents] == [1, 1] and parts[1].images == home


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
    parts = [tuple(map(str, part)) for part in find_parts(tmp_path)[1]]
    files = as_coco(*parts)
    reports = [check_coco(file, images) for file, (_, images) in zip(files, parts, strict=True)]
    assert [list(report.categories.values()) for report in reports] == [["cell", "rare"]] * 2
    assert as_coco(*parts) == files
    refusal = reports[1].refusal()
    assert f"{tmp_path / 'valid' / 'b.xml'}, line 2" in refusal and refusal.startswith(parts[1][0])


@pytest.mark.parametrize(
    "value", ["[day1/images, ../day2/images]", "lists/all.txt", "[day1/images, lists/second.txt]"]
)
def test_yolo_pictures_of_several_folders_and_of_lists_elsewhere(value, tmp_path):
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
    files = as_coco(*(tuple(map(str, part)) for part in (train, val)))
    content = read_json(files[0])
    counts = [
        sum(a["image_id"] == i["id"] for a in content["annotations"]) for i in content["images"]
    ]
    names = [str(train.images / image["file_name"]) for image in content["images"]]
    assert dict(zip(names, counts, strict=True)) == {
        str(second): 2,
        str(tmp_path / "set" / "day1" / "images" / "a.png"): 1,
    }
    assert str(tmp_path / "day2" / "labels" / "b.txt") in content["annotations"][0]["source"]
    assert content["categories"] == read_json(files[1])["categories"]


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("kind", ["COCO", "Pascal VOC", "YOLO"])
def test_pictures_that_are_elsewhere_are_named_for_all_parts(kind, parts, tmp_path):
    folders = ("train/", "val/") if parts else ("",)
    labels = {
        "COCO": {f"{folder or 'all'}a.json": coco("a.png") for folder in folders},
        "Pascal VOC": {f"{folder}a.xml": VOC.format("a.png", "a") for folder in folders},
        "YOLO": {"data.yaml": YAML},
    }
    make(tmp_path / "labels", labels[kind])
    make(tmp_path / "pictures", {f"{folder}a.png": "" for folder in folders})
    found, places = find_parts(tmp_path / "labels", tmp_path / "pictures")
    assert found == kind and len(places) == len(folders)
    assert [place.images for place in places] == [tmp_path / "pictures" / f for f in folders]
    for place in places:
        (file,) = as_coco(tuple(map(str, place)))
        assert not check_coco(file, str(place.images)).refusal() or kind == "YOLO"


def test_a_file_of_coco_s_format_may_have_the_ending_of_a_list(tmp_path):
    file = tmp_path / "train.txt"
    file.write_text('{"images": [], "annotations": [], "categories": []}')
    assert as_coco((str(file), str(tmp_path))) == [str(file)]


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
    """A name with a space and letters of another alphabet, an empty picture, a crowd."""
    make(tmp_path, {"pictures/größe 1.png": "", "pictures/sub/empty.png": ""})
    annotation = {"image_id": 1, "category_id": 7, "area": 1, "iscrowd": 0}
    box = {"id": 1, "bbox": [1, 2, 10, 5], **annotation}
    parts = {"id": 2, "bbox": [3, 3, 21, 23], **annotation, "segmentation": POLYGONS}
    crowd = {"id": 3, "bbox": [0, 0, 9, 9], **annotation, "iscrowd": 1}
    names = {1: "größe 1.png", 2: "sub/empty.png"}
    return coco_content(names, [box, parts, crowd], {7: "красная клетка"}, size=(40, 30))


@pytest.mark.parametrize("kind", WRITTEN[1:])
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
    assert "segmentation" not in box and not {"source", "info"} & {*box, *content}
    mask = parts["segmentation"]
    assert len(mask) == {"yolo": 1, "labelme": 2}[kind]
    areas = [area(merge(frPyObjects(polygons, 30, 40))) for polygons in (mask, POLYGONS)]
    assert areas[0] == areas[1] > 30


def test_a_picture_on_another_drive_has_its_whole_path(shapes, tmp_path, monkeypatch):
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


corners = st.tuples(st.integers(0, 39), st.integers(0, 29), st.integers(1, 9), st.integers(1, 9))
names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5)


@given(data=st.lists(st.tuples(names, corners), max_size=4))
@pytest.mark.parametrize("kind", WRITTEN[1:])
def test_boxes_come_back_from_each_format(kind, data, tmp_path_factory):
    folder = make(tmp_path_factory.mktemp("set"), {"a b.png": ""})
    boxes = [(name, [x, y, min(w, 40 - x), min(h, 30 - y)]) for name, (x, y, w, h) in data]
    ids = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in boxes))}
    entries = [{"image_id": 5, "category_id": ids[name], "bbox": box} for name, box in boxes]
    classes = {number: name for name, number in ids.items()}
    content = coco_content({5: "a b.png"}, entries, classes, size=(40, 30))
    write_labels(content, kind, folder / "labels", folder)
    if not boxes and kind == "yolo":
        return  # no class, which data.yaml has to name
    back = read_labels(folder / "labels", folder)
    found = {category["id"]: category["name"] for category in back["categories"]}
    assert [found[a["category_id"]] for a in back["annotations"]] == [name for name, _ in boxes]
    got = np.array([a["bbox"] for a in back["annotations"]]).reshape(-1, 4)
    assert np.allclose(got, np.reshape([box for _, box in boxes], (-1, 4)), atol=1e-6)
