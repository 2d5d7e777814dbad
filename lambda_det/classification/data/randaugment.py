"""RandAugment (arXiv:1909.13719) as EfficientNet's public code has it.

The paper cites Cubuk et al. and says no more; no code of its trainings is public. The reference
here is ``models/official/efficientnet/autoaugment.py`` of tensorflow/tpu, by authors of the same
company: 16 operations of equal probability, drawn with replacement and always applied; their
strengths grow beyond a magnitude of 10. timm and torchvision have other operations. Where the
reference claims to follow Pillow and does not, the operations here follow Pillow, computed by
OpenCV where that is much faster.

All operations take and return images, uint8 RGB [H, W, 3], and change none in place.
"""

from __future__ import annotations

from collections.abc import Callable

import cv2
import numpy as np
from PIL import Image, ImageOps

_GREY = (128, 128, 128)
_LEVELS = np.arange(256)  # of a pixel
# Pillow's ImageFilter.SMOOTH
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
# Of red, green and blue in Pillow's mode "L"
_GREY_SHARES = np.array([[19595, 38470, 7471]], np.float32) / 65536


def _by_pillow(operation: Callable[[Image.Image], Image.Image]) -> Callable[..., np.ndarray]:
    return lambda image: np.array(operation(Image.fromarray(image)))


def posterize(image: np.ndarray, bits: int) -> np.ndarray:
    """Keep the highest ``bits`` bits of each value: with 0 all is black, with 8 nothing changes."""
    return _look_up(image, _LEVELS & -(1 << max(8 - bits, 0)))


def solarize(image: np.ndarray, threshold: int) -> np.ndarray:
    """Invert the values from ``threshold`` on; a threshold of 256 changes nothing."""
    return _look_up(image, np.where(threshold > _LEVELS, _LEVELS, 255 - _LEVELS))


def solarize_add(image: np.ndarray, addition: int) -> np.ndarray:
    """Add to the values below 128, up to 255."""
    return _look_up(image, np.where(_LEVELS < 128, (_LEVELS + addition).clip(max=255), _LEVELS))


def color(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the grey image: less colour for a factor below 1, more above."""
    return _blend(cv2.cvtColor(_grey(image), cv2.COLOR_GRAY2RGB), image, factor)


def contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the mean grey.

    The reference uses the mean of the histogram's counts, which is the area over 256. Pillow, to
    which it claims to be equivalent, uses the mean of the pixels.
    """
    return _blend_with_grey(image, int(cv2.mean(_grey(image))[0] + 0.5), factor)


def brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with black."""
    return _blend_with_grey(image, 0, factor)


def sharpness(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the image smoothed over 3x3 pixels; the pixels at the border stay."""
    smooth = cv2.filter2D(image, -1, _SMOOTH)
    smooth[[0, -1]] = image[[0, -1]]
    smooth[:, [0, -1]] = image[:, [0, -1]]
    return _blend(smooth, image, factor)


def rotate(image: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate the image around its centre, anticlockwise."""
    height, width = image.shape[:2]
    centre = (width - 1) / 2, (height - 1) / 2
    # From a pixel to where it comes from, so it turns the other way
    return _warp(image, cv2.getRotationMatrix2D(centre, -degrees, 1))


def _moving(row: int, column: int) -> Callable[[np.ndarray, float], np.ndarray]:
    """The operation whose strength stands in one place of the matrix of :func:`_warp`."""

    def move(image: np.ndarray, by: float) -> np.ndarray:
        matrix = np.eye(2, 3)
        matrix[row, column] = by
        return _warp(image, matrix)

    return move


def cutout(image: np.ndarray, half: int, y: int, x: int) -> np.ndarray:
    """Grey out the square of side 2 * ``half`` around (y, x), as far as it lies in the image."""
    image = image.copy()
    image[max(y - half, 0) : y + half, max(x - half, 0) : x + half] = _GREY
    return image


# From magnitude / 10, the image's height and width, and the sample's generator to the arguments of
# an operation besides the image
_Draw = Callable[[float, tuple[int, int], np.random.Generator], tuple]


def _nothing(strength: float, size: tuple[int, int], rng: np.random.Generator) -> tuple:
    return ()


def _whole(nominal: int) -> _Draw:
    return lambda strength, size, rng: (int(strength * nominal),)


def _signed(nominal: float) -> _Draw:
    return lambda strength, size, rng: (strength * nominal * (1 if rng.random() < 0.5 else -1),)


def _factor(strength: float, size: tuple[int, int], rng: np.random.Generator) -> tuple[float]:
    return (strength * 1.8 + 0.1,)


def _square(nominal: int) -> _Draw:
    return lambda strength, size, rng: (int(strength * nominal), *rng.integers(size))


# What applies an operation, and what draws its arguments. The numbers are the strengths at a
# magnitude of 10: degrees, bits, values, pixels.
OPERATIONS: dict[str, tuple[Callable[..., np.ndarray], _Draw]] = {
    "AutoContrast": (_by_pillow(ImageOps.autocontrast), _nothing),
    "Equalize": (_by_pillow(ImageOps.equalize), _nothing),
    "Invert": (cv2.bitwise_not, _nothing),
    "Rotate": (rotate, _signed(30.0)),
    "Posterize": (posterize, _whole(4)),
    # From a magnitude of 10 on this changes nothing, as in Pillow. In the reference's graph, numpy
    # may have wrapped the threshold to uint8: 384, of a magnitude of 15, would be 128.
    "Solarize": (solarize, _whole(256)),
    "Color": (color, _factor),
    "Contrast": (contrast, _factor),
    "Brightness": (brightness, _factor),
    "Sharpness": (sharpness, _factor),
    # The top row stays, and the leftmost column
    "ShearX": (_moving(0, 1), _signed(0.3)),
    "ShearY": (_moving(1, 0), _signed(0.3)),
    "TranslateX": (_moving(0, 2), _signed(100.0)),
    "TranslateY": (_moving(1, 2), _signed(100.0)),
    "Cutout": (cutout, _square(40)),
    "SolarizeAdd": (solarize_add, _whole(110)),
}


class RandAugment:
    """Random operations on an image, one after the other.

    Args:
        layers: how many operations; 0 for none.
        magnitude: their strength, from 0 to 30; 10 is nominal.
    """

    def __init__(self, layers: int, magnitude: float) -> None:
        self._layers = layers
        self._strength = magnitude / 10

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """An image of the same shape; the given one if there are no layers."""
        operations = tuple(OPERATIONS.values())
        for number in rng.integers(len(operations), size=self._layers):
            apply, draw = operations[number]
            image = apply(image, *draw(self._strength, image.shape[:2], rng))
        return image


def _grey(image: np.ndarray) -> np.ndarray:
    """Pillow's grey, uint8 [H, W], except for one colour in 100,000, a tie that is rounded down."""
    return cv2.transform(image, _GREY_SHARES)


def _look_up(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Replace each value of an image by the one of ``values`` [256]."""
    return cv2.LUT(image, values.astype(np.uint8))


def _blend_with_grey(image: np.ndarray, grey: int, factor: float) -> np.ndarray:
    return cv2.LUT(image, _blend(np.full(256, grey, np.uint8), _LEVELS.astype(np.uint8), factor))


def _blend(other: np.ndarray, image: np.ndarray, factor: float) -> np.ndarray:
    """``other + factor * (image - other)``, clipped to 0..255 and truncated to integers."""
    # The reference and Pillow compute it in float32. OpenCV rounds, so half is subtracted; slightly
    # less than half, so an integer stays the same in spite of rounding errors.
    return cv2.addWeighted(image, factor, other, 1 - factor, 2**-10 - 0.5)


def _warp(image: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Take each pixel from the nearest to ``matrix`` [2, 3] times (x, y, 1); grey outside."""
    height, width = image.shape[:2]
    return cv2.warpAffine(
        image,
        matrix,
        (width, height),
        flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=_GREY,
    )
