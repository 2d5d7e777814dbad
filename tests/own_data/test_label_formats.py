"""What holds for every row of the table of label formats, by a sample of each."""

import json
from pathlib import Path

import numpy as np
import pytest

from lambda_det.detection.data.box_form import BOX_FORMS
from lambda_det.errors import DataError
from lambda_det.own_data.command_line import main as check
from lambda_det.own_data.labels import FORMATS, as_coco, recognise
from tests.own_data.label_samples import HEIGHT, SAMPLES, WIDTH, write_sample
from tests.own_data.parts import find_parts

PAGE = Path(__file__).resolve().parents[2] / "datasets" / "README.md"
# In COCO's form. An image without an object has labels, too
OBJECTS = {
    "one.png": [("cup", [1, 2, 10, 5]), ("a key", [20.5, 10, 12, 18])],
    "none.png": [],
    "größe 3.png": [("cup", [0, 0, 40, 30])],
}


def written(name, objects):
    """The objects with the numbers that a format writes for their boxes."""
    to_numbers, size = BOX_FORMS[FORMATS[name].boxes].numbers, np.array([[WIDTH, HEIGHT]])
    return {
        image: [(label, to_numbers(np.array([box]), size)[0].tolist()) for label, box in things]
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
    assert SAMPLES.keys() == FORMATS.keys()
    page = PAGE.read_text("utf-8")
    assert [
        name for name in FORMATS if f"| {name.removesuffix(' with a list of names')}" not in page
    ] == []


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
