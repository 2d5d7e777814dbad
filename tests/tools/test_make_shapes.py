"""The generated data sets: reproducible, never overwritten, and as their annotations say."""

import hashlib
import json
import os

import numpy as np
import pytest
from PIL import Image

from tests.shapes import make_panoptic_shapes, make_shapes
from tests.tool import load_tool

TRAIN, VAL = 12, 3
USUAL = {"num_train": TRAIN, "num_val": VAL, "size": 96, "seed": 3}
KIND = {make_shapes: "shapes", make_panoptic_shapes: "shapes_panoptic"}
both = pytest.mark.parametrize("make", KIND, ids=KIND.values())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for make in KIND:
        make(root, **USUAL)
    return root


def _load(root, file):
    return json.loads((root / file).read_text())


def _pixels(path):
    return np.asarray(Image.open(path)).astype(int)


def _digests(folder):
    """The annotations to the byte, and the images to the pixel."""
    found = {}
    for path in sorted(folder.rglob("*.*")):
        data = _pixels(path).tobytes() if path.suffix == ".png" else path.read_bytes()
        found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


@pytest.mark.slow
@both
def test_same_arguments_same_data_and_an_image_does_not_depend_on_the_number(root, tmp_path, make):
    given = _digests(root / KIND[make])
    for name, changes in (("fewer", {"num_train": 5, "num_val": 9}), ("seed", {"seed": 4})):
        make(tmp_path / name, **{**USUAL, **changes})
    fewer, other = (_digests(tmp_path / name / KIND[make]) for name in ("fewer", "seed"))
    images = [name for name in fewer if name.endswith(".png") and name in given]
    assert len(images) == (5 + VAL) * (1 if make is make_shapes else 3)
    assert all(fewer[name] == given[name] for name in images)
    pictures = [n for n in given if n.split("/")[0] in ("train", "val")]
    assert len({d[n] for d in (given, other) for n in pictures}) == 2 * (TRAIN + VAL)


def test_all_classes_and_sizes_occur(root):
    """lambda-det check finds nothing wrong with them, in tests/own_data/test_command_line.py."""
    entries = _load(root, "shapes/annotations/instances_train.json")["annotations"]
    assert {entry["category_id"] for entry in entries} == {1, 2, 3}
    sides = [max(entry["bbox"][2:]) for entry in entries]
    assert min(sides) < 20 and max(sides) > 45


def test_other_data_are_not_overwritten_and_the_same_are_not_made_again(root, tmp_path):
    written = {file: file.stat().st_mtime_ns for file in root.rglob("*.*")}
    for make in KIND:
        make(root, **USUAL)
        with pytest.raises(FileExistsError, match=r"shapes.*'seed': 3"):
            make(root, **{**USUAL, "seed": 5})
    assert {file: file.stat().st_mtime_ns for file in root.rglob("*.*")} == written
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


def test_the_command(tmp_path, capsys):
    main = load_tool("make_shapes", "datasets").main
    small = ["--root", str(tmp_path), "--num-train", "2", "--num-val", "1", "--size", "64"]
    assert main([*small, "--panoptic"]) == main(small) == 0
    assert "shapes_panoptic" in capsys.readouterr().out
    assert main([*small, "--seed", "1"]) == 2
    assert "'seed': 0" in capsys.readouterr().err


# ------------------------------------------------------------------- keypoints, semantic, panoptic
def test_semantic_and_panoptic_masks_agree(root):
    folder = root / "shapes_panoptic"
    content = _load(folder, "annotations/panoptic_train.json")
    is_thing = {c["id"]: c["isthing"] for c in content["categories"]}
    seen = set()
    for entry in content["annotations"]:
        stuff = _pixels(folder / "stuff_train" / entry["file_name"])
        ids = _pixels(folder / "panoptic_train" / entry["file_name"]) @ [1, 256, 65536]
        assert set(np.unique(ids).tolist()) == {s["id"] for s in entry["segments_info"]}
        for segment in entry["segments_info"]:
            mask = ids == segment["id"]
            rows, columns = np.nonzero(mask)
            x, y, w, h = segment["bbox"]
            assert segment["area"] == mask.sum()
            assert (x, y) == (columns.min(), rows.min())
            assert (x + w, y + h) == (columns.max() + 1, rows.max() + 1)
            category = segment["category_id"]
            seen.add(category)
            assert (stuff[mask] == (0 if is_thing[category] else category - 3)).all()
    assert seen == {1, 2, 3, 4, 5, 6}
