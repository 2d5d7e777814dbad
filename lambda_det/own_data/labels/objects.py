"""The result of a reader of a label format: images with objects, made from the shapes in its
file.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple
from xml.parsers import expat

import numpy as np
import pycocotools.mask
import yaml
from PIL import Image

from lambda_det.detection.data.records import upright_size
from lambda_det.detection.data.truth import MAX_PIXELS, area_of, around, rectangle, turned_rectangle
from lambda_det.detection.merging import clipped, runs
from lambda_det.detection.run_masks import RunMasks
from lambda_det.errors import DataError, refused

_CIRCLE = 32  # number of corners of a polygon in place of a circle


class LabelledObject(NamedTuple):
    """An object in an image.

    Attributes:
        label: its class.
        box: x0, y0, x1, y1 in pixels.
        mask: polygons [[x0, y0, x1, y1, ...], ...], or run lengths; None where it has only a box.
        where: its place, for messages: a file, and the place in it.
    """

    label: str
    box: tuple[float, float, float, float]
    mask: list[list[float]] | dict[str, Any] | None = None
    where: str = ""


class LabelledImage(NamedTuple):
    """An image in a file of labels.

    Attributes:
        source: the file of labels.
        name: of the image, which may be a path of another machine.
        objects: in it.
        size: width and height that the file of labels states, to which its numbers refer; None
            where it states none.
        subset: the part of the data to which it belongs, where the format has parts.
    """

    source: Path
    name: str
    objects: list[LabelledObject]
    size: tuple[int, int] | None = None
    subset: str = ""


def reading(what: object, advice: str = "write it again") -> AbstractContextManager[None]:
    """Turn errors of libraries, and values that are missing, into one error that names the file."""
    return refused(DataError, f"{what} cannot be read", advice, *_ERRORS)


_ERRORS = (
    AttributeError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
    expat.ExpatError,
    yaml.YAMLError,
    Image.DecompressionBombError,
    MemoryError,
    RecursionError,
)


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height of an image, upright as training and annotation tools show it."""
    with reading(picture, "remove or fix it"), Image.open(picture) as image:
        return upright_size(image)


def area(thing: LabelledObject) -> float:
    """The area of the mask or the box, as in COCO's format."""
    if isinstance(thing.mask, dict):
        return float(pycocotools.mask.area(thing.mask))
    return sum(map(area_of, thing.mask or ())) or area_of(rectangle(*thing.box))


def polygon(label: str, points: Iterable[Iterable[float]]) -> LabelledObject:
    """The object of an outline [N, 2]."""
    outline = np.array(list(points), float).reshape(-1, 2).ravel().tolist()
    return LabelledObject(label, around([outline]), [outline])


def ellipse(centre: Iterable[float], rx: float, ry: float, angle: float = 0.0) -> np.ndarray:
    """The corners [_CIRCLE, 2] of an ellipse that is turned clockwise by an angle in radians."""
    turn = np.linspace(0, 2 * np.pi, _CIRCLE, endpoint=False)
    ring = (rx * np.cos(turn) + 1j * ry * np.sin(turn)) * np.exp(1j * angle)
    return np.c_[ring.real, ring.imag] + centre


def turned_box(
    label: str, box: tuple[float, float, float, float], degrees: float
) -> LabelledObject:
    """The object of a box that is turned clockwise about its middle; as a polygon, if it is."""
    if not degrees:
        return LabelledObject(label, box)
    return polygon(label, np.reshape(turned_rectangle(box, degrees), (-1, 2)))


def of_mask(
    label: str, pixels: np.ndarray, corner: tuple[int, int], size: tuple[int, int]
) -> LabelledObject | None:
    """The object of the mask of a part of an image; None if it is empty.

    Args:
        pixels: [h, w]; what is out of the image is cut.
        corner: x and y of its first pixel.
        size: width and height of the image.

    Raises:
        ValueError: the image has more pixels than can be read.
    """
    width, height = size
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width}x{height} are more pixels than can be read")
    # a corner beyond any image stays beyond it, in numbers that runs can have
    left, top = (min(max(place, -MAX_PIXELS), MAX_PIXELS) for place in corner)
    drawn = clipped(runs(pixels, left, top), (0, 0, width, height))
    if not len(drawn):
        return None
    mask = RunMasks([drawn], (height, width)).coco(0)
    return LabelledObject(label, around(mask), mask)
