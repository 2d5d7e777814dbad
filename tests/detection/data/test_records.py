"""Every reader sees an image upright, in whatever format it is stored."""

import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lambda_det.detection.data import TolerantMapper
from lambda_det.detection.data.records import (
    decoding_fault,
    image_fault,
    pixels_of,
    read_image,
    size_fault,
    upright_size,
)
from lambda_det.detection.data.transforming import ImageFile
from tests.stored_images import TURNED, TURNS, UPRIGHT, made_image, stored


@pytest.fixture(scope="module")
def picture() -> np.ndarray:
    return made_image()


def readings(cfg, path) -> dict[str, np.ndarray]:
    """The image of a file in BGR, by who reads it."""
    record = {"file_name": str(path), "height": 48, "width": 64, "annotations": []}
    cfg.INPUT.LSJ.ENABLED, cfg.INPUT.RANDOM_FLIP = False, "none"
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MIN_SIZE_TEST = (48,), 48
    result = {"reader": read_image(record)}
    with Image.open(path) as image:
        about = dict(image.info)
        result["Pillow"] = pixels_of(image)
        assert about.items() <= image.info.items()  # the image is the caller's
    for is_train, exact in ((True, False), (True, True), (False, False)):
        cfg.INPUT.EXACT_PIXELS = exact
        image = TolerantMapper(cfg, is_train=is_train)(record)["image"]
        result[f"mapper, train {is_train}, exact {exact}"] = image.permute(1, 2, 0).numpy()
    return result


def assert_alike(image: np.ndarray, picture: np.ndarray, who: str) -> None:
    assert image.shape == picture.shape, who
    assert np.abs(image.astype(int) - picture[..., ::-1]).mean() < 8, who


@pytest.mark.parametrize("number", TURNS)
@pytest.mark.parametrize("kind", TURNED)
def test_an_image_is_turned_once(cfg, tmp_path, picture, kind, number):
    path = stored(tmp_path, picture, kind, number)
    with Image.open(path) as image:
        assert upright_size(image) == (64, 48)
    assert ImageFile(str(path)).size == (48, 64)
    images = readings(cfg, path)
    if number in TURNED[kind][2] and (image := cv2.imread(str(path))) is not None:
        images["OpenCV"] = image  # what a script hands to a Predictor
    for who, image in images.items():
        assert_alike(image, picture, who)


@pytest.mark.parametrize("kind", UPRIGHT)
@pytest.mark.filterwarnings("error:Palette images:UserWarning")  # it names no image
def test_formats_without_an_orientation(cfg, tmp_path, picture, kind):
    for who, image in readings(cfg, stored(tmp_path, picture, kind)).items():
        assert_alike(image, picture, who)


@pytest.mark.parametrize("place", [b"IDAT", b"IEND", b"XMP"])
def test_where_a_png_says_how_it_lies(tmp_path, picture, place):
    """Before its pixels, behind them, or in a text of Adobe's."""
    path, exif = tmp_path / "turned.png", Image.Exif()
    exif[274] = 6
    info = PngInfo()
    if place == b"XMP":
        info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    Image.fromarray(picture).transpose(TURNS[6]).save(path, pnginfo=info)
    if place != b"XMP":
        chunk = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
        chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        content = path.read_bytes()
        start = content.index(place) - 4
        path.write_bytes(content[:start] + chunk + content[start:])
    assert_alike(read_image({"file_name": str(path)}), picture, place)
    assert size_fault({"file_name": str(path), "height": 48, "width": 64}) is None


@pytest.mark.parametrize("ending", ["jpg", "png"])
def test_a_look_sees_the_damage_that_a_reading_sees(tmp_path, ending):
    path = tmp_path / f"photo.{ending}"
    noise = np.random.default_rng(0).integers(0, 255, (96, 160, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    whole, record = path.read_bytes(), {"file_name": str(path), "width": 160, "height": 96}
    assert decoding_fault(record) is None
    for share in (0, 0.01, 0.5, 0.98):
        path.write_bytes(whole[: int(len(whole) * share)])
        assert decoding_fault(record) == image_fault(record) is not None
    Image.fromarray(noise[..., 0].astype(np.uint16)).save(path, "PNG")
    assert "more than 8 bits" in decoding_fault(record)
    path.unlink()
    assert decoding_fault(record) == image_fault(record) is not None
