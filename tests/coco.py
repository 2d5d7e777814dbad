"""Small data sets in COCO's format, and what a model would find in them."""

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from detectron2.structures import Boxes, BoxMode, Instances
from pycocotools.coco import COCO

CLASSES = ("bolt", "nut", "<b>washer</b>")


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


def true_box(
    x: float, y: float, w: float, h: float, category: int = 0, **more: Any
) -> dict[str, Any]:
    """An object of a record of Detectron2."""
    box = {"bbox": [x, y, w, h], "bbox_mode": BoxMode.XYWH_ABS, "category_id": category}
    return {**box, "iscrowd": 0, **more}


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


def indexed(content: dict[str, list]) -> COCO:
    """Ground truth of the content of a file."""
    ground_truth = COCO()
    ground_truth.dataset = content
    with contextlib.redirect_stdout(io.StringIO()):
        ground_truth.createIndex()
    return ground_truth


def found(
    size: tuple[int, int],
    boxes: Sequence[Sequence[float]],
    classes: Iterable[int] | None = None,
    scores: Iterable[float] | None = None,
    masks: bool = False,
) -> Instances:
    """Predictions in an image of (height, width); at first of class 0, and certain.

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


def make_ground_truth(images: int = 6, seed: int = 0) -> COCO:
    """Four squares in each image, of three classes."""
    rng = np.random.default_rng(seed)
    annotations = []
    for image in range(images):
        for place in range(4):
            x, y, side = 20 + 100 * (place % 2), 20 + 100 * (place // 2), int(rng.integers(20, 60))
            category = 10 * (1 + int(rng.integers(3)))
            number, box = len(annotations) + 1, [x, y, side, side]
            annotations.append(annotation(number, image, box, category_id=category))
    names = {i: f"{i}.png" for i in range(images)}
    classes = {10 * number: name for number, name in enumerate(CLASSES, 1)}
    return indexed(coco_content(names, annotations, classes, size=(220, 220)))


def predicted(
    category: int, box: Sequence[float], score: float = 0.9, image: int = 0
) -> dict[str, Any]:
    """An entry of a file of results; the box is in COCO's form."""
    return {"image_id": image, "category_id": category, "bbox": list(box), "score": score}


def noisy_results(ground_truth: COCO, seed: int = 1) -> list[dict]:
    """Most objects, moved a little, some of a wrong class, and some of nothing."""
    rng = np.random.default_rng(seed)
    results = []
    for entry in ground_truth.dataset["annotations"]:
        if rng.random() < 0.2:
            continue
        x, y, w, h = entry["bbox"]
        box = [float(value) for value in (x + rng.integers(0, 8), y + rng.integers(0, 8), w, h)]
        category = entry["category_id"] if rng.random() < 0.8 else 10
        results.append(predicted(category, box, float(rng.random()), entry["image_id"]))
    return results


def put(where: str, place: int = -1, **values: Any) -> Callable[[dict[str, Any]], None]:
    """A change of an entry of a list of the file; a value of None takes the key away."""

    def change(content: dict[str, Any]) -> None:
        entry = content[where][place]
        entry.update(values)
        for key in [key for key, value in values.items() if value is None]:
            del entry[key]

    return change
