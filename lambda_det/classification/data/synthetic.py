"""Noise in place of images, to measure everything but reading and decoding them."""

from __future__ import annotations

import numpy as np
import torch

_IMAGES_IN_MEMORY = 16


class SyntheticSource:
    """As many images as ImageNet has, all of them one of a few random ones made at the start.

    Args:
        size: side of the images in pixels.
        classes: how many classes; labels go round them.
        images: how many images; ImageNet has 1,281,167 to train on and 50,000 to validate.
    """

    def __init__(self, size: int, classes: int = 1000, images: int = 1281167) -> None:
        self.classes = [f"class {number:04d}" for number in range(classes)]
        self._labels = torch.arange(images) % classes
        shape = (_IMAGES_IN_MEMORY, size, size, 3)
        self._pixels = torch.from_numpy(
            np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        )

    @property
    def labels(self) -> np.ndarray:
        """int64 [images]"""
        return self._labels.numpy()

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        return f"noise {index}"

    def load(self, index: int) -> np.ndarray:
        """uint8 [size, size, 3]; not a copy"""
        return self._pixels[index % _IMAGES_IN_MEMORY].numpy()
