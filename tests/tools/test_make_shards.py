import runpy
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lambda_det.classification.data.shards import ShardSource
from lambda_det.classification.data.sources import FolderSource

TOOL = Path(__file__).parents[2] / "datasets" / "make_shards.py"
tool = runpy.run_path(str(TOOL))
main = tool["main"]


@pytest.fixture
def folder(tmp_path):
    """23 images of 3 classes, each in a colour of its own."""
    number = 0
    for name, count in (("ant", 3), ("bee", 10), ("owl", 10)):
        (tmp_path / "images" / name / "deep").mkdir(parents=True)
        for index in range(count):
            path = tmp_path / "images" / name / ("deep" if index % 2 else "") / f"{index}.png"
            Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
            number += 1
    return tmp_path / "images"


def members(out):
    """Names in each shard."""
    names = []
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as shard:
            names.append(shard.getnames())
    return names


def test_the_shards_have_each_image_once_with_its_class(folder, tmp_path, capsys):
    out = tmp_path / "new" / "shards"
    assert main([str(folder), str(out), "--images-per-shard", "10"]) == 0
    assert [len(names) for names in members(out)] == [10, 10, 3]
    packed, plain = ShardSource(out), FolderSource(folder)
    assert packed.classes == plain.classes == (out / "classes.txt").read_text().split()
    assert len(packed) == 23
    labels = {plain.name(n): (plain.labels[n], plain.load(n)) for n in range(23)}
    for index in range(23):
        label, image = labels.pop(packed.name(index).partition("/")[2])
        assert packed.labels[index] == label
        np.testing.assert_array_equal(packed.load(index), image)
    printed = capsys.readouterr().out
    assert "shard 3 of 3" in printed and f"23 images of 3 classes in {out}" in printed


def test_the_images_are_shuffled_as_the_seed_says(folder, tmp_path):
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        main([str(folder), str(tmp_path / name), "--seed", seed])
    a, b, c = (members(tmp_path / name)[0] for name in "abc")
    assert a == b != c and sorted(a) == sorted(c) != a
    same = [(tmp_path / name / "000000.tar").read_bytes() for name in "ab"]
    assert same[0] == same[1]  # neither owner nor date is in there


def test_nothing_is_overwritten(folder, tmp_path, capsys):
    for name in ("out", "new.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    assert main([str(folder), str(tmp_path / "out")]) == 2
    assert "out exists already" in capsys.readouterr().err
    assert main([str(folder), str(tmp_path / "new")]) == 2
    assert "new.partial is being written" in capsys.readouterr().err
    for name in ("out", "new.partial"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["mine"]
    assert not (tmp_path / "new").exists()


@pytest.mark.posix
def test_a_run_that_fails_leaves_nothing(folder, tmp_path, capsys):
    (folder / "owl" / "gone.png").symlink_to("nowhere")
    assert main([str(folder), str(tmp_path / "out"), "--images-per-shard", "2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: The shard") and "gone.png" in error
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{folder}/owl", "{out}"], "error: {folder}/owl/deep"),
        (["{folder}/none", "{out}"], "error: The image folder {folder}/none cannot be read"),
        (["{folder}", "{out}", "--images-per-shard", "0"], "error: --images-per-shard is 0"),
        (["{folder}", "{out}", "--seed", "-1"], "error: --seed is -1"),
        (["{folder}", "{folder}/owl/0.png/out"], "error: {folder}/owl/0.png/out cannot be made"),
    ],
)
def test_what_cannot_work_is_one_sentence(folder, tmp_path, capsys, arguments, text):
    (folder / "owl" / "deep" / "deeper").mkdir()
    where = {"folder": folder, "out": tmp_path / "out"}
    if "/owl" in arguments[0]:
        for path in (folder / "owl" / "deep").glob("*.png"):
            path.unlink()
        text = "error: 1 of the 1 class folders of {folder}/owl hold no image (deep)"
    assert main([argument.format(**where) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(text.format(**where)) and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
