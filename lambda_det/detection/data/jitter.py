"""The augmentations of a configuration; large-scale jitter is the one of the paper's detectors.

It resizes by a random factor, then crops or pads to a fixed square: in Appendix F.3 jitter of
[0.1, 2.0] at 1024x1024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from fvcore.transforms.transform import Transform
from torchvision.transforms import v2

from lambda_det.errors import ConfigError


class _AtLeastOnePixel(T.Augmentation):
    """A resize of Detectron2 beside which this class stands rounds no side to 0 pixels."""

    def get_transform(self, image: np.ndarray) -> Transform:
        resize = super().get_transform(image)
        if isinstance(resize, T.ResizeTransform):  # a ResizeShortestEdge to 0 does nothing
            resize.new_h = max(int(resize.new_h), 1)
            resize.new_w = max(int(resize.new_w), 1)
        return resize


class ResizeScaleAtLeastOnePixel(_AtLeastOnePixel, T.ResizeScale):
    """Detectron2's ``ResizeScale``, except that no side is rounded to 0 pixels.

    A 3x1500 image at a tenth of 1024 would become 0 pixels high, which Pillow refuses to make.
    """


class ResizeShortestEdgeAtLeastOnePixel(_AtLeastOnePixel, T.ResizeShortestEdge):
    """Detectron2's ``ResizeShortestEdge``, except that no side is rounded to 0 pixels.

    A 1x2100 image whose longer side may be 1024 would become 0 pixels high.
    """


def large_scale_jitter(
    min_scale: float = 0.1, max_scale: float = 2.0, size: int = 1024, pad: bool = True
) -> list[T.Augmentation]:
    """Resize so that the image fits a square of ``size`` times a random scale, then crop to size.

    Args:
        min_scale, max_scale: the limits of the scale, which has a uniform distribution.
        size: side of the square, in pixels.
        pad: pad images smaller than the square with grey, at the right and the bottom. Without
            padding they stay smaller, for a model that must know which pixels are padding.

    Returns:
        Detectron2 augmentations, for any ``DatasetMapper``.

    Raises:
        ConfigError: a scale or the size cannot be; the message names their keys in a config.
    """
    if not (0 < min_scale <= max_scale < float("inf") and size >= 1):
        raise ConfigError(
            f"INPUT.LSJ.MIN_SCALE is {min_scale}, INPUT.LSJ.MAX_SCALE {max_scale} and "
            f"INPUT.LSJ.SIZE {size}; scales are above 0, the smallest at most the largest, and the "
            "size is 1 or more."
        )
    return [
        ResizeScaleAtLeastOnePixel(min_scale, max_scale, size, size),
        T.FixedSizeCrop((size, size), pad=pad),
    ]


def _crop(cfg: CfgNode) -> list[T.Augmentation]:
    if not cfg.INPUT.CROP.ENABLED:
        return []
    if cfg.INPUT.LSJ.ENABLED:
        raise ConfigError(
            "INPUT.LSJ.ENABLED and INPUT.CROP.ENABLED are both on, and the jitter crops already; "
            "set INPUT.CROP.ENABLED to False."
        )
    return [T.RandomCrop(cfg.INPUT.CROP.TYPE, cfg.INPUT.CROP.SIZE)]


def _resize(cfg: CfgNode) -> list[T.Augmentation]:
    inputs = cfg.INPUT
    if inputs.LSJ.ENABLED:
        return _jitter(cfg)[:1]
    return [
        ResizeShortestEdgeAtLeastOnePixel(
            inputs.MIN_SIZE_TRAIN, inputs.MAX_SIZE_TRAIN, inputs.MIN_SIZE_TRAIN_SAMPLING
        )
    ]


def _square(cfg: CfgNode) -> list[T.Augmentation]:
    return _jitter(cfg)[1:] if cfg.INPUT.LSJ.ENABLED else []


def _jitter(cfg: CfgNode) -> list[T.Augmentation]:
    keys, has_mask = cfg.INPUT.LSJ, cfg.MODEL.LAMBDA_RESNET.MASK_PADDING
    return large_scale_jitter(keys.MIN_SCALE, keys.MAX_SCALE, keys.SIZE, pad=not has_mask)


def _flip(cfg: CfgNode) -> list[T.Augmentation]:
    flips = {
        "horizontal": [T.RandomFlip()],
        "vertical": [T.RandomFlip(horizontal=False, vertical=True)],
        "none": [],
    }
    flip = cfg.INPUT.RANDOM_FLIP
    if flip not in flips:
        raise ConfigError(f"INPUT.RANDOM_FLIP is {flip!r}; it must be one of {', '.join(flips)}.")
    return flips[flip]


# The augmentations of training in their order, each made by a function of the configuration, or
# none where its keys leave it out. Augmentations that change the size of the image belong before
# the resize, and those that turn or move it before the square of the jitter: in the square a small
# image lies at the upper left, and would leave it.
AUGMENTATIONS: dict[str, Callable[[CfgNode], list[T.Augmentation]]] = {
    "crop": _crop,
    "resize": _resize,
    "square": _square,
    "flip": _flip,
}


def build_augmentation(cfg: CfgNode, is_train: bool) -> list[T.Augmentation]:
    """All augmentations of a config.

    In training these are ``AUGMENTATIONS``. With ``INPUT.LSJ.ENABLED`` they are large-scale jitter
    and the flip of ``INPUT.RANDOM_FLIP``. Otherwise they are Detectron2's for the same config,
    except that no side becomes 0 pixels long. With ``MODEL.LAMBDA_RESNET.MASK_PADDING`` the images
    are not padded here: the model pads them later, and its mask covers that padding.

    Raises:
        ConfigError: a value is invalid; the message names its key.
    """
    if not is_train:
        inputs = cfg.INPUT
        return [
            ResizeShortestEdgeAtLeastOnePixel(inputs.MIN_SIZE_TEST, inputs.MAX_SIZE_TEST, "choice")
        ]
    return [one for make in AUGMENTATIONS.values() for one in make(cfg)]


PixelAugmentation = Callable[[torch.Tensor], torch.Tensor]


class ColorJitter:
    """torchvision's ``v2.ColorJitter`` of an image as the model takes it.

    Args:
        strength: brightness, contrast and saturation change by up to this share, and hue by up to a
            fourth of it, in random order; SimCLR has 0.8 with these proportions.
        image_format: of the images, "BGR" or "RGB".

    Raises:
        ConfigError: the format is another one.
        ValueError: the strength is below 0 or above 2.
    """

    def __init__(self, strength: float, image_format: str) -> None:
        if image_format not in ("BGR", "RGB"):
            raise ConfigError(
                f"INPUT.COLOR {strength} needs images in BGR or RGB; INPUT.FORMAT is "
                f"{image_format}."
            )
        self.image_format = image_format
        self._jitter = v2.ColorJitter(strength, strength, strength, strength / 4)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Another image, uint8 [3, H, W], by draws from torch's global random numbers."""
        return self._turned(self._jitter(self._turned(image))).contiguous()

    def _turned(self, image: torch.Tensor) -> torch.Tensor:
        """Change an image [3, H, W] from the model's order of channels to RGB, or back."""
        return image.flip(0) if self.image_format == "BGR" else image


def _color(cfg: CfgNode) -> list[PixelAugmentation]:
    strength = cfg.INPUT.COLOR
    return [ColorJitter(strength, cfg.INPUT.FORMAT)] if strength else []


# What changes the pixels of a training image and moves none, in its order, made as AUGMENTATIONS
# are. Each is called on the finished image, uint8 [C, H, W] in the order of channels of
# INPUT.FORMAT, of which a side may be 1 pixel, and gives another one. It draws from torch's global
# random numbers, which are seeded by the place of the image.
PIXEL_AUGMENTATIONS: dict[str, Callable[[CfgNode], list[PixelAugmentation]]] = {"color": _color}


def build_pixel_augmentation(cfg: CfgNode) -> list[PixelAugmentation]:
    """All changes of the pixels of training images alone that a config has.

    Raises:
        ConfigError: a value is invalid; the message names its key.
    """
    return [one for make in PIXEL_AUGMENTATIONS.values() for one in make(cfg)]


def changes_outlines(augmentations: Iterable[T.Augmentation]) -> bool:
    """Whether a box of an object may be larger than the box around the rest of its mask.

    It is not after resizing and flips alone.
    """
    keeping = (T.ResizeShortestEdge, T.ResizeScale, T.RandomFlip)
    return not all(isinstance(one, keeping) for one in augmentations)
