"""Large-scale jitter: resize by a random factor, then crop or pad to a fixed square.

The training images of the paper's detectors (Appendix F.3): jitter of [0.1, 2.0] at 1024x1024.
"""

from __future__ import annotations

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import detection_utils
from detectron2.data import transforms as T
from fvcore.transforms.transform import Transform

from lambda_det.errors import ConfigError

_FLIPS = ("horizontal", "vertical", "none")


class ResizeScaleAtLeastOnePixel(T.ResizeScale):
    """Detectron2's ``ResizeScale``, except that no side is rounded to 0 pixels.

    A 3x1500 image at a tenth of 1024 would become 0 pixels high, which Pillow refuses to make.
    """

    def _get_resize(self, image: np.ndarray, scale: float) -> Transform:
        resize = super()._get_resize(image, scale)
        resize.new_h = max(int(resize.new_h), 1)
        resize.new_w = max(int(resize.new_w), 1)
        return resize


class ResizeShortestEdgeAtLeastOnePixel(T.ResizeShortestEdge):
    """Detectron2's ``ResizeShortestEdge``, except that no side is rounded to 0 pixels.

    A 1x2100 image whose longer side may be 1024 would become 0 pixels high.
    """

    def get_transform(self, image: np.ndarray) -> Transform:
        resize = super().get_transform(image)
        if isinstance(resize, T.ResizeTransform):  # with a size of 0 it does nothing
            resize.new_h = max(resize.new_h, 1)
            resize.new_w = max(resize.new_w, 1)
        return resize


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
        ConfigError: a scale or the size is invalid; the message names its key in a config.
    """
    for key, value in (("MIN_SCALE", min_scale), ("MAX_SCALE", max_scale), ("SIZE", size)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"INPUT.LSJ.{key} is {value}; it must be larger than 0.")
    if size != int(size):
        raise ConfigError(f"INPUT.LSJ.SIZE is {size}; it must be a whole number of pixels.")
    if min_scale > max_scale:
        raise ConfigError(
            f"INPUT.LSJ.MIN_SCALE is {min_scale}, larger than INPUT.LSJ.MAX_SCALE, {max_scale}; "
            "set it to at most that."
        )
    size = int(size)
    return [
        ResizeScaleAtLeastOnePixel(min_scale, max_scale, size, size),
        T.FixedSizeCrop((size, size), pad=pad),
    ]


def build_augmentation(cfg: CfgNode, is_train: bool) -> list[T.Augmentation]:
    """The augmentations of a config.

    In training with ``INPUT.LSJ.ENABLED``, they are large-scale jitter and the flip of
    ``INPUT.RANDOM_FLIP``. Otherwise they are Detectron2's for the same config, except that no side
    becomes 0 pixels long. With ``MODEL.LAMBDA_RESNET.MASK_PADDING`` the images are not padded here:
    the model pads them later, and its mask covers that padding.

    Raises:
        ConfigError: a value is invalid; the message names its key.
    """
    if cfg.INPUT.RANDOM_FLIP not in _FLIPS:
        raise ConfigError(
            f"INPUT.RANDOM_FLIP is {cfg.INPUT.RANDOM_FLIP!r}; it must be one of "
            f"{', '.join(_FLIPS)}."
        )
    sizes = cfg.INPUT.MIN_SIZE_TRAIN
    if is_train and cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING == "range" and len(sizes) != 2:
        raise ConfigError(
            f"INPUT.MIN_SIZE_TRAIN_SAMPLING range needs two sizes, and INPUT.MIN_SIZE_TRAIN is "
            f"{tuple(sizes)}; set it to the smallest and the largest."
        )
    if not (is_train and cfg.INPUT.LSJ.ENABLED):
        resize, *others = detection_utils.build_augmentation(cfg, is_train)
        resize = ResizeShortestEdgeAtLeastOnePixel(
            resize.short_edge_length, resize.max_size, resize.sample_style, resize.interp
        )
        return [resize, *others]
    if cfg.INPUT.CROP.ENABLED:
        raise ConfigError(
            "INPUT.LSJ.ENABLED and INPUT.CROP.ENABLED are both on, and the jitter crops already; "
            "set INPUT.CROP.ENABLED to False."
        )
    jitter = cfg.INPUT.LSJ
    augmentations = large_scale_jitter(
        jitter.MIN_SCALE,
        jitter.MAX_SCALE,
        jitter.SIZE,
        pad=not cfg.MODEL.LAMBDA_RESNET.MASK_PADDING,
    )
    if cfg.INPUT.RANDOM_FLIP != "none":
        vertical = cfg.INPUT.RANDOM_FLIP == "vertical"
        augmentations.append(T.RandomFlip(horizontal=not vertical, vertical=vertical))
    return augmentations
