"""The generated data sets: never overwritten, whole or not there.

The golden runs of tests/reliability see a change of their images, and the checks of data, in
tests/detection/data/test_ground_truth.py, whether annotations and masks belong together.
"""

import os

import pytest
from PIL import Image

from tests.shapes import make_shapes
from tests.tool import load_tool


@pytest.mark.parametrize("kind", [[], ["--panoptic"]])
def test_other_data_are_not_overwritten_and_the_same_are_not_made_again(kind, tmp_path, capsys):
    """By the command."""
    main = load_tool("make_shapes", "datasets").main
    words = ["--root", str(tmp_path), "--num-train", "2", "--num-val", "1", "--size", "64", *kind]
    assert main(words) == 0
    written = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.*")}
    assert main(words) == 0
    assert f"shapes{'_panoptic' if kind else ''}" in capsys.readouterr().out
    assert main([*words, "--seed", "1"]) == 2
    assert "'seed': 0" in capsys.readouterr().err
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.*")} == written


def test_the_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes/mine.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="shapes"):
        make_shapes(tmp_path, num_train=2, num_val=2)


def test_a_making_that_breaks_off_or_cannot_begin_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="disk full"):
        make_shapes(tmp_path, num_train=2, num_val=2)
    for change in ({"num_train": 0}, {"num_val": -1}, {"size": 8}, {"seed": -1}):
        with pytest.raises(ValueError, match=next(iter(change))):
            make_shapes(tmp_path, **change)
    assert os.listdir(tmp_path) == []
