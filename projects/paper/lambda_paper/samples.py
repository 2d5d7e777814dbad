"""Draw training samples after augmentation, as the model sees them."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.data.catalog import Metadata
from detectron2.data.detection_utils import convert_image_to_rgb
from detectron2.structures import ImageList
from detectron2.utils.env import seed_all_rng
from omegaconf import DictConfig
from torch import nn
from tqdm import tqdm

from lambda_det.detection.drawing import captioned, draw_instances
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError
from lambda_paper.album import Album

__all__ = ["draw_sample", "draw_samples"]

# Small samples are enlarged until their longer side has this many pixels, to make labels legible
_SIDE = 640
_HATCH_DISTANCE = 12


def draw_samples(cfg: CfgNode | DictConfig, album: Album, *, limit: int = 8, seed: int = 0) -> None:
    """Draw the first samples of a training with this configuration and seed.

    The samples come from the loader of the training, one at a time and in this process. A training
    with loader workers or larger batches uses its random numbers in another order.

    Args:
        cfg: of the training, from YAML or a LazyConfig. It is not changed.
        album: receives the pictures sample_000, sample_001, ...
        limit: number of samples.
        seed: of the order of the images and of their augmentation.

    Raises:
        UserError: the configuration cannot be used for training.
    """
    if limit < 1:
        raise ConfigError(f"The number of samples is {limit}; ask for 1 or more.")
    names = [f"sample_{index:03d}" for index in range(limit)]
    album.check(names)
    task = DetectionTask(copy.deepcopy(cfg))
    task.register_data()
    task.settings = replace(task.settings, num_workers=0, images_per_step=1, accumulate=1)
    task.check_data(train=True)
    # There are no names if another project names its data in another way
    metadata = (
        MetadataCatalog.get(task.parts.train_names[0]) if task.parts.train_names else Metadata()
    )
    has_backbone = not isinstance(cfg, DictConfig) or "backbone" in cfg.model
    backbone = task.parts.make_backbone() if has_backbone else None
    image_format = task.pixels.format if task.pixels else "BGR"
    seed_all_rng(seed)
    samples = itertools.chain.from_iterable(task.build_train_loader())
    for name, sample in zip(tqdm(names, unit="sample"), samples, strict=False):
        album.add(name, draw_sample(sample, image_format, metadata, backbone))


def draw_sample(
    sample: dict[str, Any],
    image_format: str,
    metadata: Metadata,
    backbone: nn.Module | None = None,
) -> np.ndarray:
    """Draw the output of a mapper.

    Padding that the model adds at the right and the bottom is hatched. Padding by the augmentation
    is a part of the image.

    Args:
        sample: "image" [C, H, W], and optionally "instances", "sem_seg" [H, W] and "file_name".
        image_format: ``INPUT.FORMAT``.
        metadata: of the data set: names of classes, lines between keypoints.
        backbone: defines the padding of the model. None draws no padding.

    Returns:
        [height, width, 3] uint8, RGB.
    """
    image = sample["image"]
    height, width = image.shape[1:]
    padded = _pad(image, backbone)
    rgb = _to_rgb(padded.permute(1, 2, 0).numpy(), image_format)
    scale = max(1.0, _SIDE / max(rgb.shape[:2]))
    classes, labels, parts = [], [], {"boxes": np.zeros((0, 4))}
    if "instances" in sample:
        instances = sample["instances"]
        names = metadata.get("thing_classes")
        classes = instances.gt_classes.tolist()
        labels = [names[index] if names else str(index) for index in classes]
        parts = _parts(instances, padded.shape[1:])
    sem_seg = sample.get("sem_seg")
    if sem_seg is not None:
        parts["sem_seg"] = np.asarray(sem_seg)
        parts["sem_seg"] = _grown(parts["sem_seg"], padded.shape[1:], 255)
        if not metadata.get("stuff_classes"):
            metadata = _with_numbers_for_names(parts["sem_seg"])
    picture = draw_instances(
        np.ascontiguousarray(rgb[:, :, ::-1]),
        classes=classes,
        labels=labels,
        scale=scale,
        metadata=metadata,
        **parts,
    )
    picture = np.ascontiguousarray(picture[:, :, ::-1])
    _hatch(picture, round(height * scale), round(width * scale))
    return captioned(picture, _caption(sample, len(labels), padded))


def _caption(sample: dict[str, Any], objects: int, padded: torch.Tensor) -> str:
    height, width = sample["image"].shape[1:]
    words = [Path(sample["file_name"]).name] if "file_name" in sample else []
    before = f"{sample['width']}x{sample['height']} to " if "width" in sample else ""
    words.append(f"{before}{width}x{height}")
    if tuple(padded.shape[1:]) != (height, width):
        words.append(f"padded to {padded.shape[2]}x{padded.shape[1]}")
    words.append("1 object" if objects == 1 else f"{objects} objects")
    return ", ".join(words)


def _pad(image: torch.Tensor, backbone: nn.Module | None) -> torch.Tensor:
    """The image [C, H, W] with the padding of the model, in grey."""
    if backbone is None:
        return image
    return ImageList.from_tensors(
        [image],
        backbone.size_divisibility,
        pad_value=128,
        padding_constraints=backbone.padding_constraints,
    ).tensor[0]


def _to_rgb(image: np.ndarray, image_format: str) -> np.ndarray:
    """[H, W, C] in Detectron2's ``image_format`` as [H, W, 3] of uint8, RGB."""
    if image_format == "RGB":  # Detectron2's function passes a mode that new Pillow versions refuse
        return image
    if image_format == "L":
        return np.repeat(image[:, :, :1], 3, axis=2)
    return convert_image_to_rgb(image, image_format).clip(0, 255).astype(np.uint8)


def _parts(instances: Any, size: tuple[int, int]) -> dict[str, Any]:
    parts: dict[str, Any] = {"boxes": instances.gt_boxes.tensor.numpy()}
    if instances.has("gt_masks"):
        masks = instances.gt_masks
        polygons = getattr(masks, "polygons", None)
        if polygons is None:
            masks = [_grown(mask, size, 0) for mask in masks.tensor.numpy()]
        else:
            masks = polygons
        parts["masks"] = masks
    if instances.has("gt_keypoints"):
        parts["keypoints"] = instances.gt_keypoints.tensor.numpy()
    return parts


def _grown(area: np.ndarray, size: tuple[int, int], value: int) -> np.ndarray:
    """Pad [H, W] to ``size`` with ``value``."""
    missing = [(0, whole - part) for whole, part in zip(size, area.shape, strict=True)]
    return np.pad(area, missing, constant_values=value)


def _with_numbers_for_names(sem_seg: np.ndarray) -> Metadata:
    known = sem_seg[sem_seg < 255]
    return Metadata(stuff_classes=[str(index) for index in range(known.max(initial=-1) + 1)])


def _hatch(picture: np.ndarray, height: int, width: int) -> None:
    """Hatch the rows from ``height`` on and the columns from ``width`` on, in place."""
    rows, columns = picture.shape[:2]
    outside = np.ones((rows, columns), bool)
    outside[:height, :width] = False
    lines = np.add.outer(np.arange(rows), np.arange(columns)) % _HATCH_DISTANCE < 2
    picture[outside & lines] = (255, 0, 255)
    if outside.any():
        cv2.rectangle(picture, (0, 0), (width - 1, height - 1), (255, 0, 255), 1)
