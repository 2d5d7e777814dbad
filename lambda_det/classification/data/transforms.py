"""From an image of any size to the square that the network sees."""

from __future__ import annotations

import numpy as np
from detectron2.config import CfgNode

from lambda_det.classification.data.crops import (
    centre_crop,
    padded_crop,
    random_flip,
    random_resized_crop,
)
from lambda_det.classification.data.randaugment import RandAugment
from lambda_det.errors import ConfigError

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
