"""Sources of images, and how their files are decoded."""

import hashlib
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10

from lambda_det.classification.data.sources import (
    Cifar10Source,
    FolderSource,
    check_same_classes,
    decode_image,
)
from lambda_det.errors import DataError


def test_classes_labels_names_and_pixels(make_folder):
    source = FolderSource(make_folder({"owl": 2, "ant": 1, "Cat": 3}))
    assert source.classes == ["Cat", "ant", "owl"]
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == [0, 0, 0, 1, 2, 2] and len(source) == 6
    assert [source.name(index) for index in (2, 3)] == ["Cat/002.png", "ant/000.png"]
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


@pytest.mark.posix
def test_links_are_followed_and_may_not_go_round_in_circles(make_folder, tmp_path):
    folder = make_folder({"ant": 2})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "bee").symlink_to(folder / "ant")
    assert len(FolderSource(tmp_path / "other")) == 2
    (folder / "ant" / "loop").symlink_to(folder / "ant")
    with pytest.raises(DataError, match="ant/loop"):
        FolderSource(folder)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: None, r"images .*\(No such file"),
        (Path.touch, "images .*Not a directory"),
        (lambda path: (path / "x.JPG").mkdir(parents=True), r"1 of the 1 .*\(x\.JPG\)"),
        (Path.mkdir, "images holds no class folders"),
    ],
)
def test_folders_that_cannot_be(tmp_path, make, text):
    make(tmp_path / "images")
    with pytest.raises(DataError, match=text):
        FolderSource(tmp_path / "images")


@pytest.mark.parametrize("change", [lambda p: p.unlink(), lambda p: p.write_bytes(b"broken")])
def test_an_image_that_cannot_be_read_is_named(make_folder, change):
    folder = make_folder({"ant": 2})
    source = FolderSource(folder)
    change(folder / "ant" / "001.png")
    with pytest.raises(DataError, match=str(folder / "ant" / "001.png")):
        source.load(1)
    assert source.load(0).shape == (24, 20, 3)


@pytest.mark.parametrize(
    ("val", "text"),
    [
        (["ant", "bee"], "only one has cat, dog, owl and 1 more"),
        (["ant", "bee", "cat", "dog", "owl", "pig", "\udcff"], r"only one has \\udcff"),
        (["bee", "ant", "cat", "dog", "owl", "pig"], "order"),
    ],
)
def test_classes_that_differ_are_named(val, text):
    train = ["ant", "bee", "cat", "dog", "owl", "pig"]
    with pytest.raises(DataError, match=f"the one and the other differ: .*{text}"):
        check_same_classes(train, val, "the one", "the other")


NAMES = ["airplane", "automobile", "bird"]


@pytest.fixture
def downloaded(tmp_path, monkeypatch):
    """A folder like CIFAR-10's, of 5 batches of 4 training images, and 3 test images."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()

    def write(name, content):
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    def batch(name, first, count):
        pixels = np.arange(3072 * count).reshape(count, 3072) % 251 + first % 5
        labels = [index % 3 for index in range(first, first + count)]
        return write(name, {"data": pixels.astype(np.uint8), "labels": labels})

    lists = {
        "train_list": [batch(f"data_batch_{n}", 4 * n, 4) for n in range(5)],
        "test_list": [batch("test_batch", 20, 3)],
        "meta": {**CIFAR10.meta, "md5": write("batches.meta", {"label_names": NAMES})[1]},
    }
    for key, value in lists.items():
        monkeypatch.setattr(CIFAR10, key, value)
    return tmp_path


@pytest.mark.parametrize(("train", "count"), [(True, 20), (False, 3)])
def test_it_has_torchvisions_images_and_labels(downloaded, train, count):
    source, reference = Cifar10Source(downloaded, train), CIFAR10(downloaded, train)
    assert len(source) == count and source.classes == NAMES
    assert source.labels.dtype == np.int64
    for index, (image, label) in enumerate(reference):
        np.testing.assert_array_equal(source.load(index), image)
        assert source.labels[index] == label
    assert source.load(0).flags.c_contiguous and source.load(0).dtype == np.uint8
    assert source.name(2) == ("train/00002" if train else "test/00002")


@pytest.mark.parametrize("name", ["data_batch_3", "batches.meta"])
def test_files_that_are_missing_or_changed(downloaded, name):
    file = downloaded / "cifar-10-batches-py" / name
    for spoil in (lambda: file.write_bytes(file.read_bytes() + b"x"), file.unlink):
        spoil()
        with pytest.raises(DataError, match=str(downloaded)):
            Cifar10Source(downloaded, train=True)


def file(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


NOISE = np.random.default_rng(0).integers(0, 256, (45, 61, 3), dtype=np.uint8)
RGB = Image.fromarray(NOISE)
SIXTEEN_BITS = Image.fromarray(NOISE[:, :, 0].astype(np.uint16) * 21)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # "turn by 90 degrees to show it"


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1"])
def test_pixels_are_pillows_and_not_turned(mode):
    image = RGB.convert(mode)
    found = decode_image(io.BytesIO(file(image, "PNG", exif=TURNED)))
    assert found.dtype == np.uint8 and found.flags.c_contiguous and found.flags.writeable
    np.testing.assert_array_equal(found, image.convert("RGB"))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ""),
        (b"\xff\xd8\xff", ""),
        (b"<html>404</html>", ""),
        (file(RGB, "PNG")[:-200], ""),
        (file(RGB, "JPEG")[:300], ""),
        # they would become white or black
        (file(SIXTEEN_BITS, "PNG"), ".*8 bits"),
        (file(RGB.convert("F"), "TIFF"), ".*8 bits"),
    ],
)
def test_a_broken_file_is_one_sentence_that_names_it(tmp_path, data, words):
    (tmp_path / "a.JPEG").write_bytes(data)
    with pytest.raises(DataError, match=rf"^[^\n]*/a\.JPEG{words}[^\n]*$") as caught:
        decode_image(str(tmp_path / "a.JPEG"))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_decompression_bombs(monkeypatch):
    """Pillow warns of more pixels than it likes, and refuses twice as many."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 61 * 45 // 2 - 1)
    with pytest.raises(DataError, match="bomb"):
        decode_image(io.BytesIO(file(RGB, "PNG")))
