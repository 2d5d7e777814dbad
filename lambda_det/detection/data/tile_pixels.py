"""Read the pixels of tiles, so that a large image is not decoded again for each of its tiles."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from detectron2.data.detection_utils import SizeMismatchError
from PIL import Image

from lambda_det.detection.data.records import read_pixels
from lambda_det.detection.data.truth import pixels_of
from lambda_det.training.stream import Sources

# Bytes of decoded images that each process keeps: three of 100 million pixels, as three channels
KEPT = 2**30
_GREY = 128  # of pixels that belong to no image, as in the augmentations


# The decoded images that were used last, by path and format; one larger than KEPT is kept alone
_images: OrderedDict[tuple[str, str], np.ndarray] = OrderedDict()


def _decoded(path: str, image_format: str) -> np.ndarray:
    """As ``records.read_pixels`` does, from memory if it is kept; it is not to be changed."""
    key = path, image_format
    if key not in _images:
        with warnings.catch_warnings():
            # it is large on purpose
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            pixels = read_pixels(path, image_format)
        free = KEPT - pixels.nbytes
        while _images and sum(one.nbytes for one in _images.values()) > free:
            _images.popitem(last=False)
        _images[key] = pixels
    _images.move_to_end(key)
    return _images[key]


def read_tile(record: Mapping[str, Any], image_format: str) -> np.ndarray:
    """The pixels of a tile; parts of objects that are ignored are grey.

    The objects to learn keep their pixels where such a part overlaps their boxes.

    Args:
        record: of :func:`lambda_det.detection.data.tile_records.tile_records`.
        image_format: as in ``INPUT.FORMAT``.

    Returns:
        [H, W, C], which may be changed.

    Raises:
        SizeMismatchError: the image is of another size than its record says.
        Exception: of any kind, as Pillow raises it for a broken file.
    """
    image = _decoded(record["file_name"], image_format)
    if image.shape[:2] != tuple(record["image_size"]):
        raise SizeMismatchError(record["file_name"])
    x0, y0, x1, y1 = record["tile"]
    pixels = image[y0:y1, x0:x1].copy()
    if record["ignored"]:
        is_ignored = np.zeros(pixels.shape[:2], bool)
        for box in record["ignored"]:
            is_ignored[pixels_of(box)] = True
        for annotation in record["annotations"]:
            if not annotation["iscrowd"]:
                is_ignored[pixels_of(annotation["bbox"])] = False
        pixels[is_ignored] = _GREY
    return pixels


def sources_of(records: Sequence[Mapping[str, Any]]) -> Sources | None:
    """The images of records of tiles, for an order that reads each image once; None where none
    is of a tile.
    """
    if not any("tile" in record for record in records):
        return None
    sizes: dict[str, int] = {}
    for record in records:
        height, width = record.get("image_size", (0, 0))  # others are read once anyway
        sizes.setdefault(record["file_name"], 3 * height * width)
    numbers = {file: number for number, file in enumerate(sizes)}
    of_record = [numbers[record["file_name"]] for record in records]
    return Sources(np.array(of_record), np.array([*sizes.values()]), KEPT)
