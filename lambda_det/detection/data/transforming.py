"""Images and polygons under transforms that are drawn before the image is read.

Detectron2 reads an image, resizes all of it, and crops. Here the augmentations are drawn first, by
the size in the head of the file. Then the file is decoded at the least size that suffices, and
nothing is computed for objects outside of the crop.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from detectron2.data import transforms as T
from detectron2.utils.file_io import PathManager
from PIL import Image
from torch import Tensor

from lambda_det.detection.data.jitter import (
    ResizeScaleAtLeastOnePixel,
    ResizeShortestEdgeAtLeastOnePixel,
)
from lambda_det.detection.data.records import upright, upright_size
from lambda_det.detection.data.truth import without_crossings

CHANNELS = {"BGR": (2, 1, 0), "RGB": (0, 1, 2)}  # places of INPUT.FORMAT's channels in RGB
# these need only the size of the image, and not its pixels
_BY_SIZE = {
    T.ResizeScale,
    T.ResizeShortestEdge,
    T.FixedSizeCrop,
    T.RandomFlip,
    ResizeScaleAtLeastOnePixel,
    ResizeShortestEdgeAtLeastOnePixel,
}
# The order in which a Placement applies them
_ORDER = (
    T.ResizeTransform,
    T.CropTransform,
    T.PadTransform,
    T.HFlipTransform,
    T.VFlipTransform,
)
_SMALLEST = 64  # files with a side below this are not decoded at a reduced size
_FINER = 2  # a file is decoded at least at this multiple of the resized image's size


def draws_by_size(augmentations: T.AugmentationList) -> bool:
    """Whether the augmentations can be drawn on an :class:`Outline`."""
    return all(type(augmentation) in _BY_SIZE for augmentation in augmentations.augs)


class Outline(T.AugInput):
    """An image with only a size, for the augmentations of :func:`draws_by_size`.

    Their transforms change the size by resizing, padding or cropping it.
    """

    def __init__(self, height: int, width: int) -> None:
        super().__init__(_blank(height, width))

    def transform(self, tfm: T.Transform) -> None:
        for step in T.TransformList([tfm]).transforms:
            height, width = self.image.shape[:2]
            if isinstance(step, T.ResizeTransform):
                self.image = _blank(step.new_h, step.new_w)
            elif isinstance(step, T.PadTransform):
                self.image = _blank(height + step.y0 + step.y1, width + step.x0 + step.x1)
            elif isinstance(step, T.CropTransform):
                self.image = step.apply_image(self.image)  # a view


def _blank(height: int, width: int) -> np.ndarray:
    return np.broadcast_to(np.uint8(0), (height, width, 3))  # takes no memory


@dataclass(frozen=True)
class Placement:
    """Where the pixels of an image go: resized, cropped, padded and flipped, in this order.

    Attributes:
        resized: height and width of the whole image.
        rows, columns: the rows and columns that the crop leaves.
        size: height and width of the training image.
        fill: value of the padding, at the right and the bottom before the flip.
        flip: cv2.flip's code, or None.
    """

    resized: tuple[int, int]
    rows: slice
    columns: slice
    size: tuple[int, int]
    fill: int
    flip: int | None

    @classmethod
    def of(cls, size: tuple[int, int], transforms: T.TransformList) -> Placement | None:
        """The placement of an image of a height and width, or None if it takes other transforms."""
        steps = [step for step in transforms.transforms if not isinstance(step, T.NoOpTransform)]
        kinds = [type(step) for step in steps]
        if kinds != [kind for kind in _ORDER if kind in kinds]:
            return None
        by_kind = dict(zip(kinds, steps, strict=True))
        resize, crop, pad, horizontal, vertical = map(by_kind.get, _ORDER)
        height, width = resized = (resize.new_h, resize.new_w) if resize else size
        crop = crop or T.CropTransform(0, 0, width, height)
        pad = pad or T.PadTransform(0, 0, 0, 0)
        if (resize and resize.interp != Image.BILINEAR) or pad.x0 or pad.y0:
            return None
        bottom, right = min(crop.y0 + crop.h, height), min(crop.x0 + crop.w, width)
        return cls(
            resized,
            slice(crop.y0, bottom),
            slice(crop.x0, right),
            (bottom - crop.y0 + pad.y1, right - crop.x0 + pad.x1),
            int(pad.pad_value),
            {(0, 0): None, (1, 0): 1, (0, 1): 0, (1, 1): -1}[bool(horizontal), bool(vertical)],
        )


class ImageFile:
    """An image whose head is read at once, and its pixels when it is known at which size.

    Attributes:
        size: height and width, after the turn that its EXIF data ask for.
    """

    def __init__(self, path: str) -> None:
        """
        Raises:
            OSError: it cannot be read; Pillow also raises other errors.
        """
        with PathManager.open(path, "rb") as file:
            self._head = Image.open(io.BytesIO(file.read()))
        self.size = upright_size(self._head)[::-1]

    def decode(self, resized: tuple[int, int]) -> tuple[np.ndarray, tuple[float, float]]:
        """The whole image, uint8 RGB [h, w, 3], and its height and width in those pixels, for the
        height and width to which it will be resized; call it once.
        """
        # libjpeg can decode at a half, a fourth or an eighth of the size. The last row and column
        # may then lie partly outside the image
        image, extent = upright(self._head), self.size
        # one that was turned has no format
        if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
            eighths = _eighths(self.size, resized)
            image.draft(None, tuple(side * eighths // 8 for side in image.size))
            extent = tuple(side * eighths / 8 for side in self.size)
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB")), extent


def placed(
    pixels: np.ndarray, extent: tuple[float, float], place: Placement, channels: Sequence[int]
) -> Tensor:
    """Resize, crop, pad and flip.

    Args:
        pixels: uint8 RGB [h, w, 3].
        extent: height and width of the image in them; the last row and column may lie partly
            outside of it.
        place: of the image.
        channels: of the result, as places in RGB.

    Returns:
        uint8 [3, H, W]
    """
    pixels = _resize(pixels, extent, place.resized)[place.rows, place.columns]
    height, width = pixels.shape[:2]
    image = np.empty((3, *place.size), np.uint8)
    for plane, channel in zip(image, channels, strict=True):
        plane[height:] = place.fill
        plane[:height, width:] = place.fill
        cv2.extractChannel(pixels, channel, plane[:height, :width])
        if place.flip is not None:
            cv2.flip(plane, place.flip, plane)
    return torch.from_numpy(image)


def _eighths(size: tuple[int, int], resized: tuple[int, int]) -> int:
    """The number of eighths of its size at which an image is decoded: 1, 2, 4 or 8."""
    if min(size) < _SMALLEST:
        return 8
    sides = list(zip(size, resized, strict=True))
    fits = (n for n in (1, 2, 4) if all(old * n / 8 >= new * _FINER for old, new in sides))
    return next(fits, 8)


def _resize(pixels: np.ndarray, extent: tuple[float, float], size: tuple[int, int]) -> np.ndarray:
    """An image that fills the height and width ``extent`` of ``pixels``, in another size."""
    shape, (height, width) = pixels.shape[:2], size
    if shape == extent and height >= shape[0] and width >= shape[1]:
        return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR)
    box = (0, 0, extent[1], extent[0])
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.BILINEAR, box))


def transform_polygons(
    objects: Sequence[Sequence[np.ndarray]], transforms: T.TransformList
) -> list[list[np.ndarray]]:
    """Transform the polygons of several objects, as ``transforms.apply_polygons`` does one by one.

    Args:
        objects: the polygons of each object, float64 [points, 2].
        transforms: a crop may drop a polygon, or split it into several.

    Returns:
        The polygons that are left of each object.
    """
    owners = [number for number, own in enumerate(objects) for _ in own]
    polygons = [polygon for own in objects for polygon in own]
    for step in transforms.transforms:
        if not polygons:
            break
        if type(step).apply_polygons is T.Transform.apply_polygons:
            ends = np.cumsum([len(polygon) for polygon in polygons])
            moved = step.apply_coords(np.concatenate(polygons))  # a copy, which may be changed
            polygons = np.split(moved, ends[:-1])
            continue
        is_crop = type(step) is T.CropTransform
        pieces = [cropped(step, p) if is_crop else step.apply_polygons([p]) for p in polygons]
        owners = [n for n, left in zip(owners, pieces, strict=True) for _ in left]
        polygons = [piece for left in pieces for piece in left]
    result: list[list[np.ndarray]] = [[] for _ in objects]
    for number, polygon in zip(owners, polygons, strict=True):
        result[number].append(polygon)
    return result


def cropped(crop: T.CropTransform, polygon: np.ndarray) -> list[np.ndarray]:
    """The pieces of a polygon [points, 2] within the crop."""
    start, end = np.array([crop.x0, crop.y0]), np.array([crop.x0 + crop.w, crop.y0 + crop.h])
    low, high = polygon.min(0), polygon.max(0)
    if (high <= start).any() or (low >= end).any():
        return []
    if (low >= start).all() and (high <= end).all():
        return [polygon - start]
    return crop.apply_polygons(without_crossings(polygon))
