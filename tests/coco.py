"""Small data sets in COCO's format, and what a model would find in them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from detectron2.structures import Boxes, Instances


def annotation(number: int, image: int, box: list[float], **changes: Any) -> dict[str, Any]:
    """A sound annotation of category 1, with changes; a change to None takes the key away."""
    x, y, w, h = box
    entry = {
        "id": number,
        "image_id": image,
        "category_id": 1,
        "bbox": box,
        "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
        "area": w * h,
        "iscrowd": 0,
        **changes,
    }
    return {key: value for key, value in entry.items() if value is not None}


def coco_content(
    images: dict[int, str],
    annotations: list[dict],
    classes: dict[int, str],
    size: tuple[int, int] = (64, 48),
) -> dict[str, list]:
    """The content of a file, of file names and class names by id; all images have one size."""
    entry = {"width": size[0], "height": size[1]}
    return {
        "images": [{"id": i, "file_name": name, **entry} for i, name in images.items()],
        "annotations": annotations,
        "categories": [{"id": i, "name": name} for i, name in classes.items()],
    }


def found(
    size: tuple[int, int],
    boxes: Sequence[Sequence[float]],
    classes: Iterable[int] | None = None,
    scores: Iterable[float] | None = None,
    masks: bool = False,
) -> Instances:
    """Predictions in a picture of (height, width); at first of class 0, and certain.

    The corners of the boxes are in pixels; masks fill them.
    """
    result = Instances(size)
    result.pred_boxes = Boxes(torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4))
    result.pred_classes = torch.tensor([0] * len(boxes) if classes is None else [*classes]).long()
    result.scores = torch.tensor([1.0] * len(boxes) if scores is None else [*scores]).float()
    if masks:
        result.pred_masks = torch.zeros(len(boxes), *size, dtype=torch.bool)
        for mask, (x0, y0, x1, y1) in zip(result.pred_masks, boxes, strict=True):
            mask[int(y0) : int(y1), int(x0) : int(x1)] = True
    return result
