"""From an image of any size to the square that the network sees: uint8 [H, W, 3] to [S, S, 3].

torchvision's random crops and flips are not used: they draw from torch's global generator, so a
sample would depend on all samples before it. Ours draw from a generator of the sample.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
import torch
from detectron2.config import CfgNode
from PIL import Image
from torch.nn.functional import interpolate
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from lambda_det.classification.data.randaugment import RandAugment

# Inception's crop: the ratio of width to height, and how often to draw a box that may not fit
_NARROWEST = 3 / 4
_WIDEST = 4 / 3
_TRIES = 10


def random_box(
    height: int, width: int, min_area: float, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draw the box of Inception's crop, as torchvision's ``RandomResizedCrop`` does.

    The share of the image's area is uniform between ``min_area`` and 1. The logarithm of the ratio
    of width to height is uniform between those of 3/4 and 4/3. If ten boxes do not fit into the
    image, the box is the largest one in the centre with such a ratio.

    Args:
        height: of the image, in pixels.
        width: of the image, in pixels.
        min_area: in (0, 1].
        rng: of this sample.

    Returns:
        Top, left, height and width, in pixels.
    """
    for _ in range(_TRIES):
        area = height * width * rng.uniform(min_area, 1)
        ratio = math.exp(rng.uniform(math.log(_NARROWEST), math.log(_WIDEST)))
        box_width = round(math.sqrt(area * ratio))
        box_height = round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = int(rng.integers(height - box_height + 1))
            left = int(rng.integers(width - box_width + 1))
            return top, left, box_height, box_width
    box_width = min(width, round(height * _WIDEST))
    box_height = min(height, round(width / _NARROWEST))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def random_resized_crop(
    image: np.ndarray, size: int, min_area: float, rng: np.random.Generator
) -> np.ndarray:
    """A random part of an image, resized to a square.

    Args:
        image: uint8 [H, W, 3].
        size: side of the result in pixels.
        min_area: the smallest share of the image's area, as in :func:`random_box`.
        rng: the source of the random numbers.

    Returns:
        uint8 [size, size, 3].
    """
    top, left, height, width = random_box(*image.shape[:2], min_area, rng)
    return resize(image[top : top + height, left : left + width], size)


def padded_crop(image: np.ndarray, size: int, padding: int, rng: np.random.Generator) -> np.ndarray:
    """A random square of the image with a black border, as is usual for CIFAR.

    Args:
        image: resized to the square first, if it has another size.
        size: of the square, in pixels.
        padding: width of the border, in pixels.
        rng: of this sample.
    """
    if image.shape[:2] != (size, size):
        image = resize(image, size)
    padded = cv2.copyMakeBorder(image, *[padding] * 4, cv2.BORDER_CONSTANT)
    top, left = rng.integers(2 * padding + 1, size=2)
    return np.ascontiguousarray(padded[top : top + size, left : left + size])


def resize(image: np.ndarray, size: int) -> np.ndarray:
    """Stretch the image to [size, size, 3] with Pillow's bicubic filter, without aliasing.

    Values may differ from Pillow's by 1 or 2 where nothing is clipped: torch's weights have fewer
    bits, and it may start with the other axis. For crops of photographs at 224, it takes a fifth of
    Pillow's time and half the time of OpenCV's ``INTER_AREA``, which is less like Pillow's.
    """
    # With this permutation torch finds the channels last, which makes it twice as fast.
    pixels = torch.from_numpy(np.ascontiguousarray(image))[None].permute(0, 3, 1, 2)
    resized = interpolate(pixels, (size, size), mode="bicubic", antialias=True)
    # torch may return either layout.
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


# INPUT.CROP: the function, and the key of INPUT that it takes besides SIZE
_CROPS = {
    "resized": (random_resized_crop, "MIN_AREA"),
    "padded": (padded_crop, "PADDING"),
}


class TrainTransform:
    """Crop, flip and RandAugment, in this order, with the settings of ``INPUT``.

    Args:
        cfg: a configuration of :func:`get_classification_config`.
    """

    def __init__(self, cfg: CfgNode) -> None:
        self._settings = settings = cfg.INPUT
        self._augment = RandAugment(settings.RANDAUGMENT.LAYERS, settings.RANDAUGMENT.MAGNITUDE)

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One training sample.

        Args:
            image: uint8 RGB [H, W, 3]; it is not changed.
            rng: of this sample, the only source of randomness.

        Returns:
            uint8 [SIZE, SIZE, 3], C-contiguous.
        """
        settings = self._settings
        crop, key = _CROPS[settings.CROP]
        image = crop(image, settings.SIZE, settings[key], rng)
        if settings.FLIP and rng.random() < 0.5:
            image = cv2.flip(image, 1)
        return self._augment(image, rng)


class TestTransform:
    """The square in the centre, ``INPUT.TEST_CROP`` of the image's shorter side, by Pillow.

    Args:
        cfg: a configuration of :func:`get_classification_config`.
    """

    def __init__(self, cfg: CfgNode) -> None:
        settings = cfg.INPUT
        self._size = settings.TEST_SIZE or settings.SIZE
        self._resized = round(self._size / settings.TEST_CROP)

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """An image, uint8 RGB [H, W, 3], as [T, T, 3], C-contiguous; T is TEST_SIZE, or SIZE."""
        pixels = functional.resize(
            Image.fromarray(image), [self._resized], InterpolationMode.BICUBIC
        )
        return np.array(functional.center_crop(pixels, [self._size]))
