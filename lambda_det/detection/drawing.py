"""Draw predicted and annotated instances."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from detectron2.data.catalog import Metadata
from detectron2.structures import BoxMode, Instances
from detectron2.utils.video_visualizer import VideoVisualizer
from detectron2.utils.visualizer import Visualizer

# The caption above a picture: its height in pixels, and font and scale for OpenCV
_CAPTION_HEIGHT = 26
_CAPTION_FONT = (cv2.FONT_HERSHEY_SIMPLEX, 0.55)
# Pairs are enlarged until their longer side has this many pixels, to make labels legible
_PAIR_SIDE = 512


def draw_predictions(
    image: np.ndarray,
    instances: Instances,
    class_names: Sequence[str] | None = None,
    scale: float = 1.0,
    metadata: Metadata | None = None,
) -> np.ndarray:
    """Draw boxes, masks, keypoints, classes and scores.

    Args:
        image: [H, W, 3] uint8, BGR.
        instances: on the CPU, with ``pred_boxes``, ``pred_classes``, ``scores`` and maybe
            ``pred_masks`` [N, H, W] and ``pred_keypoints`` [N, K, 3].
        class_names: of all classes; None draws the indices.
        scale: size of the picture relative to the image.
        metadata: defines the lines between keypoints.

    Returns:
        [H * scale, W * scale, 3] uint8, BGR.
    """
    classes = instances.pred_classes.tolist()
    labels = [
        f"{_name(class_names, index)} {score:.0%}"
        for index, score in zip(classes, instances.scores.tolist(), strict=True)
    ]
    masks = list(instances.pred_masks.numpy()) if instances.has("pred_masks") else None
    keypoints = instances.pred_keypoints.numpy() if instances.has("pred_keypoints") else None
    boxes = instances.pred_boxes.tensor.numpy()
    return _draw(image, boxes, classes, labels, masks, keypoints, scale, metadata)


def draw_ground_truth(
    image: np.ndarray,
    annotations: Sequence[dict[str, Any]],
    class_names: Sequence[str] | None = None,
    scale: float = 1.0,
    metadata: Metadata | None = None,
) -> np.ndarray:
    """Draw the annotations of a Detectron2 dataset dict. Crowds are labelled as such.

    Where others have masks, the box of an annotation without one is drawn as its mask. The other
    arguments and the result are those of :func:`draw_predictions`.
    """
    boxes, masks, classes, labels, keypoints = [], [], [], [], []
    for annotation in annotations:
        box = BoxMode.convert(annotation["bbox"], annotation["bbox_mode"], BoxMode.XYXY_ABS)
        x0, y0, x1, y1 = box
        boxes.append(box)
        masks.append(annotation.get("segmentation") or [[x0, y0, x1, y0, x1, y1, x0, y1]])
        crowd = " (crowd)" if annotation.get("iscrowd") else ""
        classes.append(annotation["category_id"])
        labels.append(_name(class_names, annotation["category_id"]) + crowd)
        keypoints.append(np.reshape(annotation.get("keypoints") or [], (-1, 3)))
    known = max(map(len, keypoints), default=0)
    # Objects without keypoints get keypoints of visibility 0, which are not drawn
    points = [np.pad(p, ((0, known - len(p)), (0, 0))) for p in keypoints] if known else None
    boxes = np.array(boxes).reshape(-1, 4)
    points = None if points is None else np.stack(points)
    if not any(annotation.get("segmentation") for annotation in annotations):
        masks = None
    return _draw(image, boxes, classes, labels, masks, points, scale, metadata)


def side_by_side(
    image: np.ndarray,
    instances: Instances,
    annotations: Sequence[dict[str, Any]],
    class_names: Sequence[str] | None,
    true_class_names: Sequence[str] | None,
    *,
    captions: tuple[str, str] = ("predicted", "true"),
    metadata: Metadata | None = None,
) -> np.ndarray:
    """Draw the predictions at the left and the ground truth at the right, with captions.

    Small images are enlarged until the longer side of each half has 512 pixels. The other arguments
    are those of :func:`draw_predictions` and :func:`draw_ground_truth`.

    Returns:
        [height, width, 3] uint8, BGR.
    """
    scale = max(1.0, _PAIR_SIDE / max(image.shape[:2]))
    left = draw_predictions(image, instances, class_names, scale, metadata)
    right = draw_ground_truth(image, annotations, true_class_names, scale, metadata)
    gap = np.full((left.shape[0] + _CAPTION_HEIGHT, 4, 3), 255, np.uint8)
    return np.hstack([captioned(left, captions[0]), gap, captioned(right, captions[1])])


class VideoDrawer:
    """Draw predictions on the frames of a video. An object keeps its colour between frames."""

    def __init__(self, class_names: Sequence[str] | None = None) -> None:
        names = {"thing_classes": list(class_names)} if class_names else {}
        self._visualizer = VideoVisualizer(Metadata(**names))

    def __call__(self, frame: np.ndarray, instances: Instances) -> np.ndarray:
        """As :func:`draw_predictions`, in the size of the frame."""
        drawn = self._visualizer.draw_instance_predictions(frame[:, :, ::-1], instances)
        return np.ascontiguousarray(drawn.get_image()[:, :, ::-1])


def _name(class_names: Sequence[str] | None, index: int) -> str:
    return class_names[index] if class_names else str(index)


def _draw(
    image: np.ndarray,
    boxes: Any,
    classes: Sequence[int],
    labels: Sequence[str],
    masks: Any,
    keypoints: Any,
    scale: float,
    metadata: Metadata | None,
) -> np.ndarray:
    """Draw instances over their image. A class has one colour in every picture."""
    visualizer = Visualizer(image[:, :, ::-1], metadata or Metadata(), scale)
    visualizer.overlay_instances(
        boxes=boxes,
        labels=labels,
        masks=masks,
        keypoints=keypoints,
        assigned_colors=[_color(index) for index in classes],
    )
    return np.ascontiguousarray(visualizer.output.get_image()[:, :, ::-1])


def _color(index: int) -> tuple[float, float, float]:
    """The colour of a class, RGB from 0 to 1: bright, and far in hue from those beside it.

    Detectron2's palette has black, white and dark colours among its first 80.
    """
    return colorsys.hsv_to_rgb(0.618 * index % 1, (0.9, 0.6)[index % 2], 1.0)


def captioned(picture: np.ndarray, text: str) -> np.ndarray:
    """Add a white strip with a line of text above a picture [H, W, 3]."""
    (text_width, _), _ = cv2.getTextSize(text, *_CAPTION_FONT, 1)
    missing = max(0, text_width + 12 - picture.shape[1])
    picture = cv2.copyMakeBorder(
        picture, _CAPTION_HEIGHT, 0, 0, missing, cv2.BORDER_CONSTANT, value=(255, 255, 255)
    )
    return cv2.putText(picture, text, (6, 18), *_CAPTION_FONT, (0, 0, 0), 1, cv2.LINE_AA)
