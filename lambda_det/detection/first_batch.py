"""A picture of the first training images, with their objects, as the network gets them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from detectron2.engine import HookBase
from detectron2.utils import comm
from torch import nn

from lambda_det.errors import reason

logger = logging.getLogger(__name__)

FILE = "first_batch.jpg"
_PICTURES, _COLUMNS = 8, 4
# Pixels of the longer side of each: of a larger input a part is shown, in which an object has the
# size that it has for the network
_SIDE = 512
_GREY = 128
_IGNORED = "Grey in tiles: parts of objects that another tile shows better. They are not learned."


class FirstBatch(HookBase):
    """Draws the first batch of a run into its folder.

    It shows augmentation, boxes, masks and classes before hours of training, all in the pixels that
    the network gets. It draws no random number, and has no effect on the training.
    """

    def __init__(self, folder: str, image_format: str, class_names: list[str] | None) -> None:
        """
        Args:
            folder: of the run.
            image_format: order of the channels, "RGB" or "BGR".
            class_names: of all classes; None draws their numbers.
        """
        self._path = Path(folder, FILE)
        self._is_rgb, self._names = image_format == "RGB", class_names

    def before_train(self) -> None:
        if self.trainer.start_iter == 0 and comm.is_main_process():
            self._handle = self.trainer.model.register_forward_pre_hook(self._look)

    def _look(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._handle.remove()  # a copy of the model for an evaluation must not have it
        batch = inputs[0] if isinstance(inputs[0], list) else ()
        samples = [sample for sample in batch if {"image", "instances"} <= set(sample)]
        if not samples:  # the model is of another project, or learns no instances
            return
        try:
            self._path.write_bytes(self._picture(samples[:_PICTURES]))
            logger.info(f"{self._path} shows the first batch as the network gets it")
        # any error of matplotlib and the disk: nothing depends on the picture
        except Exception as error:
            logger.warning(f"{self._path} is not drawn: {reason(error)}")

    def _picture(self, samples: Sequence[Mapping[str, Any]]) -> bytes:
        """A JPEG of all images, with a legend below them."""
        # Matplotlib takes half a second to import
        from lambda_det.detection.drawing import captioned, draw_legend

        pictures = [self._drawn(sample) for sample in samples]
        height, width = np.max([picture.shape[:2] for picture in pictures], axis=0)
        columns = min(_COLUMNS, len(pictures))
        rows = -(-len(pictures) // columns)
        cells = np.full((rows * columns, height, width, 3), _GREY, np.uint8)
        for cell, picture in zip(cells, pictures, strict=False):
            cell[: picture.shape[0], : picture.shape[1]] = picture
        in_rows = cells.reshape(rows, columns, height, width, 3).swapaxes(1, 2)
        grid = in_rows.reshape(rows * height, columns * width, 3)
        classes = sorted({c for s in samples for c in s["instances"].gt_classes.tolist()})
        whole = np.vstack([grid, draw_legend(classes, self._names, columns * width)])
        if any(sample.get("ignored") for sample in samples):
            whole = captioned(whole, _IGNORED)
        return cv2.imencode(".jpg", whole)[1].tobytes()

    def _drawn(self, sample: Mapping[str, Any]) -> np.ndarray:
        """An image, or the part of it with most objects, with its caption: [H, W, 3] uint8, BGR."""
        from lambda_det.detection.drawing import captioned, draw_objects, fullest_crop

        image = sample["image"].to("cpu", torch.uint8).permute(1, 2, 0).numpy()
        image = image[:, :, ::-1] if self._is_rgb else image
        objects = sample["instances"].to("cpu")
        boxes = objects.gt_boxes.tensor.numpy()
        masks = objects.gt_masks if objects.has("gt_masks") else None
        drawn = draw_objects(image, boxes, objects.gt_classes.tolist(), masks=masks)
        height, width = image.shape[:2]
        name = Path(sample.get("file_name", "")).name
        # the ends of long names tell them apart
        caption = name if len(name) <= 32 else f"{name[:14]}...{name[-15:]}"
        if "tile" in sample:
            x0, y0, *_ = sample["tile"]
            caption += f", tile at {x0}, {y0}"
        crop = fullest_crop(boxes, (height, width), _SIDE)
        drawn = drawn[crop.y0 : crop.y1, crop.x0 : crop.x1]
        if drawn.shape != image.shape:
            caption += f", part of {width} x {height}"
        return captioned(drawn, caption)
