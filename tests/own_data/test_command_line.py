import json
import logging
import sys
import zipfile

import pytest

from lambda_det.detection.data import register_shapes
from lambda_det.own_data import command_line
from tests.shapes import make_shapes


@pytest.fixture
def shapes(tmp_path):
    make_shapes(tmp_path, num_train=3, num_val=2, size=64)
    folder = tmp_path / "shapes"
    return folder / "annotations" / "instances_train.json", folder / "train"


def run(*arguments):
    return command_line.main([str(argument) for argument in arguments])


def test_a_clean_data_set(shapes, capsys, monkeypatch):
    assert run(*shapes) == 0
    output = capsys.readouterr()
    assert all(words in output.out for words in ("3 images", "circle", "No problem was found"))
    assert "refuse" not in output.out and not output.err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(*shapes) == 0
    bar = capsys.readouterr().err
    assert "images opened" in bar and bar.endswith("\r") and "\n" not in bar  # it goes at the end
    assert run("--data", shapes[1].parent) == 0 and capsys.readouterr().out.count("images in") == 2


def test_objects_of_one_class(shapes, capsys):
    assert run("--data", shapes[1].parent, "--single-class") == 0
    printed = capsys.readouterr().out
    assert printed.count("1 in the list of categories:") == 2 and "circle" not in printed
    assert run(*shapes, "--single-class") == 0
    assert capsys.readouterr().out.startswith(f"{shapes[0]}\n")


def test_names_do_not_command_the_terminal(shapes, tmp_path, capsys, monkeypatch):
    """Those of classes, files and folders, in tables, logs and errors."""
    hostile = "\x1b]0;title\x07 \u202e \x9b2J\r"
    folder = tmp_path / f"a{hostile}"
    shapes[1].parent.rename(folder)
    json_file, images = folder / "annotations" / shapes[0].name, folder / shapes[1].name
    content = json.loads(json_file.read_text())
    for number, category in enumerate(content["categories"]):
        category["name"] = f"{hostile}{number // 2}"
    json_file.write_text(json.dumps(content))
    # pytest's handler of logs would keep the command from adding its own
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    named = tmp_path / f"{hostile}.txt"
    for words, status in (
        ((json_file, images), 1),  # two classes of one name
        (("--data", folder), 1),
        ((tmp_path / f"{hostile}.json", images), 2),
        (("--data", named), 2),
    ):
        assert run(*words) == status
        printed = "".join(capsys.readouterr())
        assert r"\x1b" in printed and not set(printed) & set("\x1b\x07\u202e\x9b")


def test_problems_are_listed(shapes, capsys):
    json_file, images = shapes
    content = json.loads(json_file.read_text())
    content["annotations"][0]["bbox"] = [0, 0, 0, 5]
    json_file.write_text(json.dumps(content))
    (images / "000001.png").write_bytes(b"broken")
    assert run(json_file, images) == 1
    output = capsys.readouterr().out
    assert "1 x object without a usable box" in output and "annotation 1 of image 1" in output
    assert "1 x image that cannot be read" in output and "000001.png cannot be read" in output
    assert "Problems were found" in output and "refuse these labels" in output
    assert run(json_file, images, "--no-images") == 1
    assert "000001.png" not in capsys.readouterr().out
    json_file.write_text(json.dumps({**content, "annotations": []}))
    assert run(json_file, images, "--no-images") == 1 and "No obj" in capsys.readouterr().out


def test_unusable_input(shapes, capsys):
    json_file, images = shapes
    json_file.write_text("{")
    assert run(json_file, images) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "as JSON" in error and error.count("\n") == 1
    assert run("--dataset", "nothing_of_that_name") == 2
    assert "'nothing_of_that_name' is not registered" in capsys.readouterr().err


def test_a_path_that_is_not_there_is_compared_by_its_name(tmp_path, capsys):
    """The paths of all files of a long folder are alike."""
    for name in ("dataset", "setup.py", "setup.cfg"):
        (tmp_path / name).mkdir()
    assert run(tmp_path / "datset") == 2
    assert f"did you mean {tmp_path / 'dataset'}?" in capsys.readouterr().err


def test_a_registered_data_set(tmp_path, capsys):
    make_shapes(tmp_path, num_train=1, num_val=1, size=64)
    register_shapes(tmp_path)
    try:
        assert run("--dataset", "shapes_val") == 0
    finally:
        register_shapes("datasets")
    assert str(tmp_path) in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["a.json", "images", "--dataset", "shapes_val"]])
def test_arguments_that_do_not_go_together(arguments, capsys):
    assert run(*arguments) == 2
    assert "--dataset" in capsys.readouterr().err


def test_status_1_says_that_problems_were_found_and_nothing_else(shapes, monkeypatch, capsys):
    monkeypatch.setattr("lambda_det.own_data.check.print_report", lambda report: 1 / 0)
    assert run(*shapes) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["data.zip", "data.tar.gz"])
def test_an_archive_is_to_be_unpacked(tmp_path, name, capsys):
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("data/labels.json", "{}")
    assert run(tmp_path / name) == 2
    assert f"{tmp_path / name} is an archive; unpack it" in capsys.readouterr().err
