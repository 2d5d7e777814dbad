"""Pictures of instances, predicted and true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from detectron2.data.catalog import Metadata
from detectron2.structures import BoxMode, Instances
from detectron2.utils.colormap import colormap
from detectron2.utils.video_visualizer import VideoVisualizer
from detectron2.utils.visualizer import Visualizer

__all__ = ["VideoDrawer", "draw_predictions", "draw_truth", "side_by_side"]

# Of the strip above a picture: its height in pixels, and the size of OpenCV's font
_CAPTION_HEIGHT = 26
_CAPTION_FONT = (cv2.FONT_HERSHEY_SIMPLEX, 0.55)
# Pairs are enlarged until their longer side has this many pixels, so that labels can be read
_PAIR_SIDE = 512


def draw_predictions(
    image: np.ndarray,
    instances: Instances,
    class_names: Sequence[str] | None = None,
    scale: float = 1.0,
) -> np.ndarray:
    """Draw boxes, masks, classes and scores.

    Args:
        image: [H, W, 3] uint8, BGR.
        instances: on the CPU, with ``pred_boxes``, ``pred_classes``, ``scores`` and maybe
            ``pred_masks`` [N, H, W].
        class_names: of all classes; without them the numbers are drawn.
        scale: the picture is this many times larger than the image.

    Returns:
        [H * scale, W * scale, 3] uint8, BGR.
    """
    classes = instances.pred_classes.tolist()
    labels = [
        f"{_name(class_names, index)} {score:.0%}"
        for index, score in zip(classes, instances.scores.tolist(), strict=True)
    ]
    masks = list(instances.pred_masks.numpy()) if instances.has("pred_masks") else None
    return _overlay(image, instances.pred_boxes.tensor.numpy(), masks, labels, scale)


def draw_truth(
    image: np.ndarray,
    annotations: Sequence[dict[str, Any]],
    class_names: Sequence[str] | None = None,
    scale: float = 1.0,
) -> np.ndarray:
    """Draw the annotations of a Detectron2 dataset dict; crowds are marked as such.

    An annotation without a mask gets its box for one. Arguments and result are otherwise those of
    :func:`draw_predictions`.
    """
    boxes, masks, labels = [], [], []
    for annotation in annotations:
        box = BoxMode.convert(annotation["bbox"], annotation["bbox_mode"], BoxMode.XYXY_ABS)
        x0, y0, x1, y1 = box
        boxes.append(box)
        masks.append(annotation.get("segmentation") or [[x0, y0, x1, y0, x1, y1, x0, y1]])
        crowd = " (crowd)" if annotation.get("iscrowd") else ""
        labels.append(_name(class_names, annotation["category_id"]) + crowd)
    return _overlay(image, np.array(boxes).reshape(-1, 4), masks, labels, scale)


def side_by_side(
    image: np.ndarray,
    instances: Instances,
    annotations: Sequence[dict[str, Any]],
    class_names: Sequence[str] | None,
    true_class_names: Sequence[str] | None,
) -> np.ndarray:
    """The predictions on the left and the truth on the right, each under a caption.

    Small images are enlarged until the longer side of each half has 512 pixels.

    Returns:
        [height, width, 3] uint8, BGR.
    """
    scale = max(1.0, _PAIR_SIDE / max(image.shape[:2]))
    left = draw_predictions(image, instances, class_names, scale)
    right = draw_truth(image, annotations, true_class_names, scale)
    gap = np.full((left.shape[0] + _CAPTION_HEIGHT, 4, 3), 255, np.uint8)
    return np.hstack([_captioned(left, "predicted"), gap, _captioned(right, "true")])


class VideoDrawer:
    """Draws the predictions on the frames of one video, with colours that stay with an object."""

    def __init__(self, class_names: Sequence[str] | None = None) -> None:
        self._visualizer = VideoVisualizer(_metadata(class_names))

    def __call__(self, frame: np.ndarray, instances: Instances) -> np.ndarray:
        """As :func:`draw_predictions`, at the size of the frame."""
        drawn = self._visualizer.draw_instance_predictions(frame[:, :, ::-1], instances)
        return np.ascontiguousarray(drawn.get_image()[:, :, ::-1])


def _metadata(class_names: Sequence[str] | None) -> Metadata:
    return Metadata(thing_classes=list(class_names)) if class_names else Metadata()


def _name(class_names: Sequence[str] | None, index: int) -> str:
    return class_names[index] if class_names else str(index)


def _overlay(
    image: np.ndarray, boxes: np.ndarray, masks: list | None, labels: list[str], scale: float
) -> np.ndarray:
    visualizer = Visualizer(image[:, :, ::-1], _metadata(None), scale)
    # A fixed order of colours: the visualiser's own are random, and differ from run to run
    palette = colormap(rgb=True, maximum=1)
    colors = [palette[i % len(palette)] for i in range(len(labels))]
    drawn = visualizer.overlay_instances(
        boxes=boxes, masks=masks, labels=labels, assigned_colors=colors
    )
    return np.ascontiguousarray(drawn.get_image()[:, :, ::-1])


def _captioned(picture: np.ndarray, text: str) -> np.ndarray:
    (text_width, _), _ = cv2.getTextSize(text, *_CAPTION_FONT, 1)
    missing = max(0, text_width + 12 - picture.shape[1])
    picture = cv2.copyMakeBorder(
        picture, _CAPTION_HEIGHT, 0, 0, missing, cv2.BORDER_CONSTANT, value=(255, 255, 255)
    )
    return cv2.putText(picture, text, (6, 18), *_CAPTION_FONT, (0, 0, 0), 1, cv2.LINE_AA)
