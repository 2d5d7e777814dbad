"""Exported detectors, which are called like models of Detectron2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.data.transforms import AugmentationList, ResizeTransform, Transform
from detectron2.modeling.postprocessing import detector_postprocess
from detectron2.structures import Boxes, Instances
from torch import Tensor

from lambda_det.detection.data.jitter import ResizeShortestEdgeAtLeastOnePixel
from lambda_det.detection.tiles import Tiling
from lambda_det.errors import ConfigError, DataError, WeightsError, listed, refused
from lambda_det.export import onnx_file


class ResizeInto(ResizeShortestEdgeAtLeastOnePixel):
    """As the parent class, but smaller where an image would not fit into a height and width."""

    def __init__(self, shortest: int, longest: int, fixed: Sequence[float]) -> None:
        super().__init__([shortest] * 2, longest)
        self.fixed = fixed

    def get_transform(self, image: np.ndarray) -> Transform:
        resize = super().get_transform(image)
        height, width = image.shape[:2]
        # with a size of 0 it does nothing
        sides = getattr(resize, "new_h", height), getattr(resize, "new_w", width)
        scale = min(1.0, *(most / side for most, side in zip(self.fixed, sides, strict=True)))
        new_height, new_width = (max(int(side * scale + 0.5), 1) for side in sides)
        return ResizeTransform(height, width, new_height, new_width)


class ExportedDetector:
    """The detector of an .onnx file of ``lambda-det export``, called as a model of Detectron2.

    Attributes:
        about: what the file says about itself.
        resize: the augmentation that an image needs before.
        channels: the order of the channels of the images, "RGB".
        batch: images that the file takes at once; 0 for any number.
        tiling: how images are cut into inputs of this size; None where they are not.
    """

    channels = "RGB"

    def __init__(self, path: Path, device: str | None = None) -> None:
        """
        Args:
            path: of the file; nothing else is read.
            device: "cpu" or None, which is the same.

        Raises:
            ConfigError: another device, or the file is no detector of ``lambda-det export``.
            WeightsError: it cannot be loaded.
        """
        if device not in (None, "cpu"):
            raise ConfigError(f"--device is {device}, and {path} is computed on the CPU here.")
        # ONNX Runtime has its own errors
        with refused(WeightsError, f"{path} cannot be loaded", "", Exception):
            about, self._run = onnx_file.read(path)
        if "boxes" not in (outputs := about.get("outputs", ())):
            raise ConfigError(
                f"{path} is no detector of lambda-det export: its metadata name the outputs "
                f"{listed(outputs)}."
            )
        self.about = about
        self._path = path
        self.batch, self._fixed = about["batch"], about["fixed"]
        self.tiling = Tiling.of_meta(about.get("tile"))
        # where an evaluation does more to images than resizing, no size is known
        shortest, longest = about.get("min_size_test", 0), about.get("max_size_test", 0)
        resize = ResizeInto(shortest, longest, self._fixed or (math.inf, math.inf))
        self.resize = AugmentationList([resize])

    def __call__(self, inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Instances]]:
        """The instances of each image, in its own pixels and with masks pasted.

        Args:
            inputs: ``image`` [3, H, W], resized, and ``height`` and ``width`` of the result.

        Raises:
            DataError: the file cannot compute an image of this size.
        """
        groups: dict[tuple[int, ...], list[int]] = {}  # one if the size is fixed
        for i, entry in enumerate(inputs):
            groups.setdefault(self._canvas(entry["image"]), []).append(i)
        results: list[dict[str, Instances]] = [{}] * len(inputs)
        for canvas, members in groups.items():
            what = f"{self._path} cannot compute an image of {'x'.join(map(str, canvas))} pixels"
            step = self.batch or len(members)
            for start in range(0, len(members), step):
                some = members[start : start + step]
                with refused(DataError, what, "", Exception):  # ONNX Runtime has its own
                    outputs = self._run(*self.fill([inputs[i]["image"] for i in some]))
                for place, i in enumerate(some):
                    values = {name: tensor[place] for name, tensor in outputs.items()}
                    results[i] = {"instances": _pasted(values, inputs[i])}
        return results

    def _canvas(self, image: Tensor) -> tuple[int, ...]:
        """Height and width of the canvas for an image [3, H, W]; a larger one changes results."""
        stride = self.about["stride"]
        return tuple(self._fixed or [side + -side % stride for side in image.shape[1:]])

    def fill(self, images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The inputs of the file for images [3, H, W] of one canvas: a batch, and the sizes."""
        batch = torch.zeros(self.batch or len(images), *self._canvas(images[0]), 3).byte()
        sizes = torch.ones(len(batch), 2, dtype=torch.int32)
        for i, image in enumerate(images):
            height, width = image.shape[1:]
            sizes[i] = torch.tensor([height, width])
            batch[i, :height, :width] = image.permute(1, 2, 0)
        return batch, sizes


def _pasted(values: Mapping[str, Tensor], entry: Mapping[str, Any]) -> Instances:
    """The detections of one image in its own pixels, with masks pasted."""
    found = {name: tensor[: values["count"]] for name, tensor in values.items() if tensor.dim()}
    instances = Instances(tuple(entry["image"].shape[1:]))
    instances.pred_boxes = Boxes(found["boxes"])
    instances.scores, instances.pred_classes = found["scores"], found["classes"]
    if "masks" in found:
        instances.pred_masks = found["masks"]
    return detector_postprocess(instances, entry["height"], entry["width"])
