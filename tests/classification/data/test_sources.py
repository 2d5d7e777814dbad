"""Sources of images, and decode_image beside Pillow's ``Image.open(file).convert("RGB")``."""

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
        (lambda path: path.mkdir() or (path / "x.JPG").touch(), "images holds no class folders"),
    ],
    ids=["missing", "a file", "an empty class", "no class"],
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
    check_same_classes(train, list(train), "the one", "the other")


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

    train = [batch(f"data_batch_{n}", 4 * n, 4) for n in range(5)]
    _, md5 = write("batches.meta", {"label_names": NAMES})
    monkeypatch.setattr(CIFAR10, "train_list", train)
    monkeypatch.setattr(CIFAR10, "test_list", [batch("test_batch", 20, 3)])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5})
    return tmp_path


@pytest.mark.parametrize(("train", "count"), [(True, 20), (False, 3)])
def test_it_has_torchvisions_images_and_labels(downloaded, train, count):
    source, reference = Cifar10Source(downloaded, train), CIFAR10(downloaded, train)
    assert len(source) == count and source.classes == NAMES
    assert source.labels.dtype == np.int64
    for index, (image, label) in enumerate(reference):
        np.testing.assert_array_equal(source.load(index), np.asarray(image))
        assert source.labels[index] == label
    assert source.load(0).flags.c_contiguous and source.load(0).dtype == np.uint8
    assert source.name(2) == ("train/00002" if train else "test/00002")


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_files_that_are_missing_or_changed(downloaded, name):
    file = downloaded / "cifar-10-batches-py" / name
    for spoil in (lambda: file.write_bytes(file.read_bytes() + b"x"), file.unlink):
        spoil()
        with pytest.raises(DataError, match=str(downloaded)):
            Cifar10Source(downloaded, train=True)


def photograph(width: int = 61, height: int = 45) -> Image.Image:
    """Something of every frequency, odd in both sides."""
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    noise = rng.integers(-20, 21, (height, width, 3))
    return Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8))


def file(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn by 90 degrees to show it"
    return exif


def sixteen_bits() -> Image.Image:
    return Image.fromarray(np.arange(60 * 50, dtype=np.uint16).reshape(60, 50) * 21)


def with_transparency() -> Image.Image:
    image = photograph().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


RGB = photograph()
SIMPLE = {
    "4:4:4": file(RGB, "JPEG", subsampling=0, quality=95),
    "4:2:2": file(RGB, "JPEG", subsampling=1),
    "4:2:0": file(RGB, "JPEG", subsampling=2, quality=30),
    "progressive": file(RGB, "JPEG", progressive=True),
    "RGB inside": file(RGB, "JPEG", keep_rgb=True),
    "grey": file(RGB.convert("L"), "JPEG"),
    "grey progressive": file(RGB.convert("L"), "JPEG", progressive=True),
    "EXIF rotation": file(RGB, "JPEG", exif=turned()),
    "one pixel": file(RGB.crop((0, 0, 1, 1)), "JPEG"),
    "one row": file(RGB.crop((0, 0, 61, 1)), "JPEG"),
    "bytes after the end": file(RGB, "JPEG") + b"more",
}
ODD = {
    "CMYK": file(RGB.convert("CMYK"), "JPEG"),
    "PNG": file(RGB, "PNG"),
    "PNG with EXIF rotation": file(RGB, "PNG", exif=turned()),
    "PNG with a palette": file(RGB.quantize(32), "PNG"),
    "PNG with a transparent colour": file(RGB.quantize(32), "PNG", transparency=3),
    "PNG with transparency": file(with_transparency(), "PNG"),
    "PNG of grey and transparency": file(with_transparency().convert("LA"), "PNG"),
    "PNG of 1 bit": file(RGB.convert("1"), "PNG"),
    "GIF": file(RGB, "GIF"),
    "BMP": file(RGB, "BMP"),
}
DEEP = {
    "PNG of 16 bits": file(sixteen_bits(), "PNG"),
    "TIFF of floats": file(RGB.convert("F"), "TIFF"),
}


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("kind", DEEP)
def test_images_that_would_become_white_or_black_are_refused(kind):
    with pytest.raises(DataError, match=r"some/a\.png .*8 bits"):
        decode_image(DEEP[kind], "some/a.png")


@pytest.mark.parametrize("kind", [*SIMPLE, *ODD])
def test_pixels_are_pillows(kind):
    data = {**SIMPLE, **ODD}[kind]
    image = decode_image(data, "a.JPEG")
    assert image.dtype == np.uint8 and image.flags.c_contiguous and image.flags.writeable
    expected = by_pillow(data)
    assert image.shape == expected.shape
    np.testing.assert_array_equal(image, expected)


@pytest.mark.slow
def test_what_pillow_makes_of_damaged_jpegs():
    """Cut off, or with bytes changed: refused if Pillow refuses, else the same pixels."""
    rng = np.random.default_rng(0)
    refused = changed = 0
    for trial in range(600):
        whole = list(SIMPLE.values())[trial % 7]
        data = bytearray(whole)
        if trial % 4 == 0:
            data[rng.integers(4)] = rng.integers(256)  # whether it is a JPEG at all
        elif trial % 4 < 3:
            data[rng.integers(len(data))] = rng.integers(256)
        else:
            del data[rng.integers(len(data)) :]
        data = bytes(data)
        try:
            expected = by_pillow(data)
        except Exception:
            refused += 1
            with pytest.raises(DataError, match=r"some/a\.JPEG"):
                decode_image(data, "some/a.JPEG")
        else:
            changed += data != whole
            np.testing.assert_array_equal(decode_image(data, "a.JPEG"), expected)
    assert refused > 100 and changed > 100


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xd8\xff", b"<html>404</html>", ODD["PNG"][:-200], SIMPLE["grey"][:300]],
    ids=["empty", "only a start", "a web page", "PNG cut off", "JPEG cut off"],
)
def test_a_broken_file_is_one_sentence_that_names_it(data):
    with pytest.raises(DataError, match=r"^[^\n]*n01440764/a\.JPEG[^\n]*$") as caught:
        decode_image(data, "n01440764/a.JPEG")
    assert "BytesIO" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("data", [SIMPLE["4:2:0"], ODD["PNG"]], ids=["JPEG", "PNG"])
def test_decompression_bombs(data, monkeypatch):
    """Pillow warns of more pixels than it likes, and refuses twice as many."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 61 * 45 // 2 - 1)
    with pytest.raises(DataError, match="bomb"):
        decode_image(data, "a.JPEG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 61 * 45 - 1)
    with pytest.warns(Image.DecompressionBombWarning):
        image = decode_image(data, "a.JPEG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    np.testing.assert_array_equal(image, decode_image(data, "a.JPEG"))
