from __future__ import annotations

import multiprocessing.reduction
import os
import pickle

import numpy as np
import pytest

from lambda_det.classification.data import names as names_module
from lambda_det.classification.data.folder import FolderSource
from lambda_det.classification.data.names import PackedNames
from lambda_det.classification.data.source import check_same_classes
from lambda_det.errors import DataError


def test_classes_labels_names_and_pixels(make_folder):
    source = FolderSource(make_folder({"owl": 2, "ant": 1, "Cat": 3}))
    assert source.classes == ["Cat", "ant", "owl"]
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == [0, 0, 0, 1, 2, 2]
    assert len(source) == 6
    names = ["Cat/000.png", "Cat/001.png", "Cat/002.png", "ant/000.png", "owl/000.png"]
    assert [source.name(index) for index in range(5)] == names
    for index in range(6):
        image = source.load(index)
        assert image.shape == (24, 20, 3) and image.dtype == np.uint8
        assert (image == (index, 100, 200)).all()


def test_images_are_told_by_their_extension_at_any_depth(tmp_path):
    wanted = ["a/x.JPEG", "a/x.jpg", "a/y.Png", "a/z/z/1.webp", "b/x.bmp", "b/ü \t.jpeg"]
    ignored = ["a/x.txt", "a/.x.jpg", "a/.hidden/x.jpg", ".c/x.jpg", "a/jpg", "README", "x.jpg"]
    for name in wanted + ignored:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    source = FolderSource(tmp_path)
    assert [source.name(index) for index in range(len(source))] == wanted
    assert source.labels.tolist() == [0, 0, 0, 0, 1, 1]


def test_names_that_are_not_utf8(tmp_path):
    (tmp_path / "a").mkdir()
    name = b"\xff.png"
    try:
        (tmp_path / "a" / os.fsdecode(name)).touch()
    except OSError:
        pytest.skip("the file system takes no such name")
    assert os.fsencode(FolderSource(tmp_path).name(0)) == b"a/" + name


def test_links_are_followed(make_folder, tmp_path):
    folder = make_folder({"ant": 2})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "bee").symlink_to(folder / "ant")
    assert len(FolderSource(tmp_path / "other")) == 2


def test_links_that_go_round_in_circles(make_folder):
    folder = make_folder({"ant": 2})
    (folder / "ant" / "loop").symlink_to(folder / "ant")
    with pytest.raises(DataError, match="symbolic links"):
        FolderSource(folder)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"nowhere cannot be read \(No such file.*check its path"):
        FolderSource(tmp_path / "nowhere")


def test_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="Not a directory"):
        FolderSource(tmp_path / "file")


@pytest.mark.parametrize(
    ("file", "text"), [("x.JPG", "holds images, but no class"), ("x.txt", "holds no class")]
)
def test_a_folder_without_class_folders(tmp_path, file, text):
    (tmp_path / file).touch()
    with pytest.raises(DataError, match=text):
        FolderSource(tmp_path)


def test_empty_class_folders_are_named(make_folder):
    folder = make_folder({"a": 1, "b": 0, "c": 0, "d": 0, "e": 1, "f": 0})
    with pytest.raises(DataError, match=r"4 of the 6 .*\(b, c, d and 1 more\)"):
        FolderSource(folder)


@pytest.mark.parametrize("change", [lambda p: p.unlink(), lambda p: p.write_bytes(b"broken")])
def test_an_image_that_cannot_be_read_is_named(make_folder, change):
    folder = make_folder({"ant": 2})
    source = FolderSource(folder)
    change(folder / "ant" / "001.png")
    with pytest.raises(DataError, match=str(folder / "ant" / "001.png")):
        source.load(1)
    assert source.load(0).shape == (24, 20, 3)


def test_a_copy_for_a_spawned_worker_is_small(tmp_path):
    """Its arrays go through shared memory, so that the size does not depend on the images."""
    (tmp_path / "a").mkdir()
    for number in range(2000):
        (tmp_path / "a" / f"{number:04d}_a_rather_long_name.jpg").touch()
    source = FolderSource(tmp_path)
    sent = multiprocessing.reduction.ForkingPickler.dumps(source)
    assert len(sent) < 2000
    copy = pickle.loads(sent)
    assert copy.name(1234) == source.name(1234) and copy.labels.sum() == 0 and len(copy) == 2000


@pytest.mark.parametrize("block", [1, 4, 100])
def test_packed_names(monkeypatch, block):
    monkeypatch.setattr(names_module, "_BLOCK", block)
    names = ["", "a", "ü\n", "", "long " * 100, "\udcff"]
    packed = PackedNames(names)
    assert list(packed) == names and len(packed) == 6
    for index in (-1, 6):
        with pytest.raises(IndexError):
            packed[index]
    assert packed.hashes().tolist() == [hash(os.fsencode(name)) for name in names]
    assert len(PackedNames()) == 0 and len(PackedNames().hashes()) == 0


@pytest.mark.parametrize(
    ("val", "text"),
    [
        (["ant", "bee"], "only the one has cat, dog, owl and 1 more; give"),
        (["ant", "bee", "cat", "dog", "owl", "pig", "rat"], "only the other has rat; give"),
        (["ant", "Bee"], "only the one has bee, cat, dog and 2 more and only the other has Bee;"),
        (["bee", "ant", "cat", "dog", "owl", "pig"], "they have another order"),
    ],
)
def test_classes_that_differ_are_named_on_both_sides(val, text):
    train = ["ant", "bee", "cat", "dog", "owl", "pig"]
    with pytest.raises(DataError, match=text):
        check_same_classes(train, val, "the one", "the other")
    check_same_classes(train, list(train), "the one", "the other")
