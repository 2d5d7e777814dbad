"""decode_image: pixel for pixel Pillow's ``Image.open(file).convert("RGB")``, or one sentence."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
from PIL import Image, ImageFile

from lambda_det.classification.data import decode
from lambda_det.classification.data.decode import decode_image
from lambda_det.errors import DataError


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
    "PNG of 16 bits": file(sixteen_bits(), "PNG"),
    "PNG of 1 bit": file(RGB.convert("1"), "PNG"),
    "GIF": file(RGB, "GIF"),
    "BMP": file(RGB, "BMP"),
    "TIFF of floats": file(RGB.convert("F"), "TIFF"),
}


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("kind", [*SIMPLE, *ODD])
def test_pixels_are_pillows(kind):
    data = {**SIMPLE, **ODD}[kind]
    image = decode_image(data, "a.JPEG")
    assert image.dtype == np.uint8 and image.flags.c_contiguous and image.flags.writeable
    expected = by_pillow(data)
    assert image.shape == expected.shape
    np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize("kind", list(SIMPLE))
def test_plain_jpegs_do_not_need_pillow(kind, monkeypatch):
    monkeypatch.setattr(decode, "_decode_with_pillow", None)
    assert decode_image(SIMPLE[kind], "a.JPEG").ndim == 3


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
            with pytest.raises(DataError, match=r"some/a\.JPEG cannot be read"):
                decode_image(data, "some/a.JPEG")
        else:
            changed += data != whole
            np.testing.assert_array_equal(decode_image(data, "a.JPEG"), expected)
    assert refused > 100 and changed > 100


def test_files_cut_off_where_the_user_lets_pillow_read_them(monkeypatch):
    data = SIMPLE["4:2:0"][:-100]
    with pytest.raises(DataError, match="truncated"):
        decode_image(data, "a.JPEG")
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    np.testing.assert_array_equal(decode_image(data, "a.JPEG"), by_pillow(data))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"\xff\xd8\xff", b"<html>404</html>", ODD["PNG"][:-200], SIMPLE["grey"][:300]],
    ids=["empty", "one byte", "only a start", "a web page", "PNG cut off", "JPEG cut off"],
)
def test_a_broken_file_is_one_sentence_that_names_it(data):
    with pytest.raises(DataError) as caught:
        decode_image(data, "n01440764/a.JPEG")
    sentence = str(caught.value)
    assert sentence.startswith("The image n01440764/a.JPEG cannot be read (")
    assert "\n" not in sentence and "BytesIO" not in sentence and sentence.endswith(".")
    assert str(pickle.loads(pickle.dumps(DataError(sentence)))) == sentence


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError("two\n  lines"), "two lines"), (MemoryError(), "MemoryError")],
    ids=["two lines", "no text"],
)
def test_whatever_pillow_says_it_is_one_sentence(error, reason, monkeypatch):
    def fail(file):
        raise error

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(DataError, match=rf"^The image a\.png cannot be read \({reason}\);"):
        decode_image(ODD["PNG"], "a.png")


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
