"""From an image of any size to the square that the network sees: uint8 [H, W, 3] to [S, S, 3].

What is random draws from the ``np.random.Generator`` that it is given, one for each sample:
torchvision's draw from a global state, with which a sample depends on all those before it.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
import torch
from detectron2.config import CfgNode
from PIL import Image
from torch.nn.functional import interpolate

from lambda_det.classification.data.randaugment import RandAugment
from lambda_det.errors import ConfigError

# Of Inception's crop: width by height, and how often to draw until the box lies inside the image
_NARROWEST = 3 / 4
_WIDEST = 4 / 3
_TRIES = 10


def random_box(
    height: int, width: int, min_area: float, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """A part of an image as Inception's crop draws it, and torchvision's ``RandomResizedCrop``.

    Its area is a share of the image's, even between ``min_area`` and 1, and its ratio of width to
    height between 3/4 and 4/3, even in the logarithm. If ten of these do not fit into the image, it
    is the largest in the centre whose ratio is between those two.

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
    """The part of the image in :func:`random_box`, resized to [size, size, 3]."""
    top, left, height, width = random_box(*image.shape[:2], min_area, rng)
    return resize(image[top : top + height, left : left + width], size)


def padded_crop(image: np.ndarray, size: int, padding: int, rng: np.random.Generator) -> np.ndarray:
    """A random square of ``size`` of the image with black on all sides, as is usual for CIFAR.

    Args:
        image: resized to that square first, if it has another size.
        size: in pixels.
        padding: on each side, in pixels; the image moves by up to as much.
        rng: of this sample.
    """
    if image.shape[:2] != (size, size):
        image = resize(image, size)
    padded = np.zeros((size + 2 * padding, size + 2 * padding, 3), np.uint8)
    padded[padding : padding + size, padding : padding + size] = image
    top, left = rng.integers(2 * padding + 1, size=2)
    return np.ascontiguousarray(padded[top : top + size, left : left + size])


def random_flip(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The image, or as often its mirror image, left to right."""
    return cv2.flip(image, 1) if rng.random() < 0.5 else image


def resize(image: np.ndarray, size: int) -> np.ndarray:
    """The image, stretched to [size, size, 3] by Pillow's bicubic filter, without aliasing.

    Values may differ from Pillow's by 1 or 2 where nothing is clipped: torch's weights have fewer
    bits, and it may begin with the other axis. It takes a fifth of Pillow's time for crops of
    photographs at 224, and half of that of OpenCV's ``INTER_AREA``, which is less like Pillow's.
    """
    # In this order torch sees that the channels are last, which makes it twice as fast.
    pixels = torch.from_numpy(np.ascontiguousarray(image))[None].permute(0, 3, 1, 2)
    resized = interpolate(pixels, (size, size), mode="bicubic", antialias=True)
    # Torch may choose either layout for its result.
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def centre_crop(image: np.ndarray, size: int, resized: int) -> np.ndarray:
    """The centre of the image, for evaluation; pixel for pixel what torchvision makes with Pillow.

    Args:
        image: whose shorter side is resized to
        size: of the square, in pixels.
        resized: the shorter side before, in pixels, from ``size``. Pillow's bicubic filter, which
            widens where it shrinks, so that nothing is aliased.
    """
    height, width = image.shape[:2]
    shorter = min(height, width)
    height, width = (int(resized * side / shorter) for side in (height, width))
    top, left = round((height - size) / 2), round((width - size) / 2)
    pixels = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
    return np.array(pixels.crop((left, top, left + size, top + size)))


# INPUT.CROP: the function, and the key of INPUT that it takes besides SIZE
_CROPS = {
    "resized": (random_resized_crop, "MIN_AREA"),
    "padded": (padded_crop, "PADDING"),
}


class TrainTransform:
    """Crop, flip and RandAugment, in this order, as ``INPUT`` says.

    Args:
        cfg: a configuration of :func:`get_classification_config`.

    Raises:
        ConfigError: a key of INPUT that cannot work.
    """

    def __init__(self, cfg: CfgNode) -> None:
        settings = cfg.INPUT
        _check_size("SIZE", settings.SIZE)
        if settings.CROP not in _CROPS:
            raise ConfigError(
                f"INPUT.CROP is {settings.CROP!r}; it must be one of {', '.join(_CROPS)}."
            )
        _check_share("MIN_AREA", settings.MIN_AREA)
        if settings.PADDING < 0:
            raise ConfigError(f"INPUT.PADDING is {settings.PADDING}; give 0 pixels or more.")
        self._size = settings.SIZE
        self._crop, key = _CROPS[settings.CROP]
        self._crop_by = settings[key]
        self._flip = settings.FLIP
        self._augment = RandAugment(settings.RANDAUGMENT.LAYERS, settings.RANDAUGMENT.MAGNITUDE)

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One training sample.

        Args:
            image: uint8 RGB [H, W, 3]; it is not changed.
            rng: the only source of randomness, of this sample alone.

        Returns:
            uint8 [SIZE, SIZE, 3], C-contiguous.
        """
        image = self._crop(image, self._size, self._crop_by, rng)
        if self._flip:
            image = random_flip(image, rng)
        return self._augment(image, rng)


class TestTransform:
    """The square in the centre, ``INPUT.TEST_CROP`` of the image's shorter side.

    Args:
        cfg: a configuration of :func:`get_classification_config`.

    Raises:
        ConfigError: a key of INPUT that cannot work.
    """

    def __init__(self, cfg: CfgNode) -> None:
        settings = cfg.INPUT
        key = "TEST_SIZE" if settings.TEST_SIZE else "SIZE"
        _check_size(key, settings[key])
        _check_share("TEST_CROP", settings.TEST_CROP)
        self._size = settings[key]
        self._resized = round(self._size / settings.TEST_CROP)

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """An image, uint8 RGB [H, W, 3], as [T, T, 3], C-contiguous; T is TEST_SIZE, or SIZE."""
        return centre_crop(image, self._size, self._resized)


def _check_size(key: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"INPUT.{key} is {value}; give 1 pixel or more.")


def _check_share(key: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"INPUT.{key} is {value}; give a share larger than 0, and at most 1.")
