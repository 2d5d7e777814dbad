"""Augmentation of mapped training images: mosaic, copy-paste and colour.

They come after resizing, crop and flip, and get an image with its ground truth. Their random
numbers follow from the seed and the place of the image, like those of the mapper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data.detection_utils import filter_empty_instances
from detectron2.structures import BitMasks, Boxes, Instances, PolygonMasks, polygons_to_bitmask
from PIL import Image
from torchvision.transforms import v2

from lambda_det.detection.data.predictions import predictions
from lambda_det.errors import ConfigError

Sample = dict[str, Any]  # what a mapper returns
_GREY = 128  # the value where a mosaic has no image, as in the padding of large-scale jitter


class Mixing:
    """Changes a mapped image together with its objects.

    In this order:

    - a mosaic: four images meet at a point, and are made smaller by up to a half (YOLOv4);
    - copy-paste: some objects of another image are put on this one, and cover what is below them
      (Ghiasi et al., 2021: https://arxiv.org/abs/2012.07177);
    - colour: torchvision's ``v2.ColorJitter``.

    The first two make bitmaps of masks. If a part of an object remains visible, its box is the box
    of that part of its mask, or without masks that part of its box. Objects without a visible part
    are dropped.
    """

    def __init__(
        self,
        color: float = 0.0,
        copy_paste: float = 0.0,
        mosaic: float = 0.0,
        image_format: str = "BGR",
    ) -> None:
        """
        Args:
            color: brightness, contrast and saturation change by up to this part, and hue by up to
                a fourth of it, in random order; SimCLR has 0.8 with these proportions.
            copy_paste: probability that objects are put on an image; it needs masks.
            mosaic: probability of a mosaic.
            image_format: of the mapped images, "BGR" or "RGB".

        Raises:
            ConfigError: a probability is not from 0 to 1, or the format is another one.
        """
        for key, value in {"COLOR": color, "COPY_PASTE": copy_paste, "MOSAIC": mosaic}.items():
            if not 0 <= value <= 1:
                raise ConfigError(f"INPUT.{key} is {value}; it must be from 0 to 1.")
        if image_format not in ("BGR", "RGB"):
            raise ConfigError(
                f"INPUT.COLOR, COPY_PASTE and MOSAIC need images in BGR or RGB; "
                f"INPUT.FORMAT is {image_format}."
            )
        self.color, self.copy_paste, self.mosaic = color, copy_paste, mosaic
        self._is_bgr = image_format == "BGR"
        self._jitter = v2.ColorJitter(color, color, color, color / 4)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> Mixing | None:
        """The mixing of ``INPUT``, or None if all of it is off.

        Raises:
            ConfigError: a value is invalid, or the model learns what cannot be mixed.
        """
        given = cfg.INPUT
        if not (given.COLOR or given.COPY_PASTE or given.MOSAIC):
            return None
        made = cls(given.COLOR, given.COPY_PASTE, given.MOSAIC, given.FORMAT)
        learnt = {
            "keypoints (MODEL.KEYPOINT_ON)": cfg.MODEL.KEYPOINT_ON,
            "semantic masks": "semantic" in predictions(cfg.MODEL.META_ARCHITECTURE),
            "from proposals (MODEL.LOAD_PROPOSALS)": cfg.MODEL.LOAD_PROPOSALS,
        }
        made._refuse([name for name, learns in learnt.items() if learns], cfg.MODEL.MASK_ON)
        return made

    def _refuse(self, learnt: Sequence[str], has_masks: bool) -> None:
        """Refuse settings that would silently give wrong ground truth."""
        moving = {"INPUT.MOSAIC": self.mosaic > 0, "INPUT.COPY_PASTE": self.copy_paste > 0}
        named = ", ".join(key for key, on in moving.items() if on)
        if named and learnt:
            raise ConfigError(
                f"The model learns {' and '.join(learnt)}, which {named} cannot move; switch that "
                "off. INPUT.COLOR works."
            )
        if self.copy_paste and not has_masks:
            raise ConfigError(
                "INPUT.COPY_PASTE needs masks, and the model learns none (MODEL.MASK_ON); set it "
                "to 0, or train a model with masks on data with masks."
            )

    def __call__(self, sample: Sample, another: Callable[[], Sample]) -> Sample:
        """
        Args:
            sample: a mapped image with "image", uint8 [3, H, W], and "instances".
            another: maps a random image of the training data.

        Returns:
            A sample with another image of the same size and other instances.
        """
        instances = sample["instances"]
        others = {"sem_seg": "semantic masks", "proposals": "from proposals"}
        learnt = [name for key, name in others.items() if key in sample]
        if instances.has("gt_keypoints"):
            learnt.append("keypoints")
        self._refuse(learnt, instances.has("gt_masks"))
        sample = {**sample}
        if np.random.rand() < self.mosaic:
            _mosaic(sample, [another() for _ in range(3)])
        if np.random.rand() < self.copy_paste:
            _paste(sample, another())
        if self.color:
            image = self._jitter(self._turned(sample["image"]))
            sample["image"] = self._turned(image).contiguous()
        return sample

    def _turned(self, image: torch.Tensor) -> torch.Tensor:
        """Change an image [3, H, W] from the model's order of channels to RGB, or back."""
        return image.flip(0) if self._is_bgr else image


# ------------------------------------------------------------------------------ of several images


def _mosaic(sample: Sample, others: Sequence[Sample]) -> None:
    """Four images around a point of the middle half, each with a corner at this point."""
    size = tuple(sample["image"].shape[1:])
    canvas = torch.full((3, *size), _GREY, dtype=torch.uint8)
    scale = np.random.uniform(0.5, 1)
    point = [round(np.random.uniform(0.25, 0.75) * side) for side in size]
    parts = []
    for place, tile in enumerate((sample, *others)):
        new = [max(round(side * scale), 1) for side in tile["image"].shape[1:]]
        is_after = divmod(place, 2)  # the point, along each axis
        start = [p if after else p - n for p, n, after in zip(point, new, is_after, strict=True)]
        parts.append(_put(canvas, tile, new, start))
    sample["image"], sample["instances"] = canvas, Instances.cat(parts)


def _paste(sample: Sample, other: Sample) -> None:
    """Put a random half of the objects of another image on this one, in their size."""
    image, below = sample["image"], sample["instances"]
    chosen = torch.from_numpy(np.random.rand(len(other["instances"])) < 0.5)
    ends = [a - b for a, b in zip(image.shape[1:], other["image"].shape[1:], strict=True)]
    start = [int(np.random.randint(min(end, 0), max(end, 0) + 1)) for end in ends]
    pixels = torch.zeros_like(image)
    above = {**other, "instances": other["instances"][chosen]}
    pasted = _put(pixels, above, other["image"].shape[1:], start)
    hidden = pasted.gt_masks.tensor.any(0)
    sample["image"] = torch.where(hidden, pixels, image)
    masks = _bitmaps(below)
    left = BitMasks(masks & ~hidden)
    is_cut = (masks & hidden).flatten(1).any(1)
    boxes = torch.where(is_cut[:, None], left.get_bounding_boxes().tensor, below.gt_boxes.tensor)
    below = _instances(tuple(image.shape[1:]), boxes, below.gt_classes, left)
    sample["instances"] = Instances.cat([below, pasted])


def _put(canvas: torch.Tensor, tile: Sample, new: Sequence[int], start: Sequence[int]) -> Instances:
    """Draw an image on a canvas [3, H, W], which may be too small for all of it.

    Args:
        canvas: is changed.
        tile: a mapped image with its objects.
        new: height and width in which it is drawn.
        start: row and column of the canvas where it begins, also below 0.

    Returns:
        The visible parts of the objects, in the pixels of the canvas.
    """
    size, old = tuple(canvas.shape[1:]), tile["image"].shape[1:]
    there = [slice(max(s, 0), max(s + n, 0)) for s, n in zip(start, new, strict=True)]
    part = [slice(max(-s, 0), max(side - s, 0)) for s, side in zip(start, size, strict=True)]
    pixels = tile["image"].permute(1, 2, 0).numpy()
    pixels = np.asarray(Image.fromarray(pixels).resize((new[1], new[0]), Image.BILINEAR))
    canvas[:, there[0], there[1]] = torch.tensor(pixels[part[0], part[1]]).permute(2, 0, 1)

    objects = tile["instances"]
    zoom = np.array([new[1] / old[1], new[0] / old[0]])  # of x and y
    shift = np.array(start[::-1])
    first = np.array([there[1].start, there[0].start])
    last = np.array([min(there[1].stop, size[1]), min(there[0].stop, size[0])])
    moved = objects.gt_boxes.tensor.numpy().reshape(-1, 2, 2) * zoom + shift
    boxes = torch.from_numpy(moved.clip(first, last).reshape(-1, 4)).float()
    if not objects.has("gt_masks"):
        return _instances(size, boxes, objects.gt_classes)
    masks = torch.zeros(len(objects), *size, dtype=torch.bool)
    for mask, drawn in zip(objects.gt_masks, masks, strict=True):
        if isinstance(objects.gt_masks, PolygonMasks):
            polygons = [((p.reshape(-1, 2) * zoom) + shift).reshape(-1) for p in mask]
            whole = torch.from_numpy(polygons_to_bitmask(polygons, *size))
            drawn[there[0], there[1]] = whole[there[0], there[1]]
        else:
            whole = Image.fromarray(mask.numpy()).resize((new[1], new[0]), Image.NEAREST)
            drawn[there[0], there[1]] = torch.tensor(np.asarray(whole)[part[0], part[1]])
    is_cut = torch.from_numpy(((moved < first) | (moved > last)).any((1, 2)))
    masks = BitMasks(masks)
    boxes = torch.where(is_cut[:, None], masks.get_bounding_boxes().tensor, boxes)
    return _instances(size, boxes, objects.gt_classes, masks)


def _instances(
    size: tuple[int, int], boxes: Any, classes: torch.Tensor, masks: BitMasks | None = None
) -> Instances:
    """The instances that have a visible part."""
    result = Instances(size, gt_boxes=Boxes(boxes), gt_classes=classes)
    if masks is not None:
        result.gt_masks = masks
    return filter_empty_instances(result)


def _bitmaps(instances: Instances) -> torch.Tensor:
    """The masks, bool [objects, H, W]."""
    size, masks = instances.image_size, instances.gt_masks
    if isinstance(masks, BitMasks):
        return masks.tensor
    drawn = [polygons_to_bitmask(polygons, *size) for polygons in masks]
    return torch.from_numpy(np.array(drawn, dtype=bool).reshape(-1, *size))
