"""One image in every format that Pillow and OpenCV read, with EXIF's orientations."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image, features

# What is stored so that EXIF's orientation makes the image of it
TURNS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
# Of formats that hold EXIF data: the ending, options, and the orientations that OpenCV 5 turns
_ALL = tuple(TURNS)
TURNED = {
    "JPEG": ("jpg", {"quality": 95}, _ALL),
    "MPO": ("mpo", {"quality": 95}, _ALL),
    "PNG": ("png", {}, _ALL),
    "WEBP": ("webp", {"lossless": True}, _ALL if cv2.__version__ >= "5" else ()),
    "TIFF": ("tif", {}, _ALL[:4]),
    "TIFF, packed": ("tif", {"compression": "tiff_lzw"}, _ALL[:4]),
    "AVIF": ("avif", {"quality": 100}, ()),
}
# The ending and options
UPRIGHT = {
    "BMP": ("bmp", {}),
    "GIF": ("gif", {}),
    "PPM": ("ppm", {}),
    "JPEG2000": ("jp2", {}),
    "TGA": ("tga", {}),
    # of a palette of more colours than the image, as many are half transparent
    "PNG, palette": ("png", {"transparency": bytes(range(0, 200, 20))}),
}


def made_image() -> np.ndarray:
    """RGB [48, 64, 3] that no turn leaves as it is."""
    small = np.random.default_rng(0).integers(0, 255, (3, 4, 3), dtype=np.uint8)
    return np.kron(small, np.ones((16, 16, 1), np.uint8))


def stored(folder: Path, picture: np.ndarray, kind: str, number: int = 1) -> Path:
    """The file of an image in a format, which its orientation turns upright."""
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    if kind in UPRIGHT:
        ending, options = UPRIGHT[kind]
        path, image = folder / f"plain.{ending}", Image.fromarray(picture)
        if "palette" in kind:
            image = image.quantize(12)
        image.save(path, kind.partition(",")[0], **options)
        return path
    ending, options, _ = TURNED[kind]
    path, exif = folder / f"turned.{ending}", Image.Exif()
    exif[274] = number
    image, turn = Image.fromarray(picture), TURNS[number]
    image = image if turn is None else image.transpose(turn)
    image.save(path, kind.partition(",")[0], exif=exif.tobytes(), **options)
    return path
