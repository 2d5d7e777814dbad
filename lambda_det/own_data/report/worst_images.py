"""The images with the worst results: predictions beside the ground truth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import torch
from detectron2.data import MetadataCatalog
from detectron2.data.catalog import Metadata
from detectron2.structures import Boxes, BoxMode, Instances

from lambda_det.detection.data.records import read_image
from lambda_det.detection.data.registration import load_records
from lambda_det.detection.data.tile_records import seen_in
from lambda_det.detection.data.truth import corners
from lambda_det.detection.drawing import fullest_crop, side_by_side
from lambda_det.detection.run_masks import RunMasks
from lambda_det.detection.tiles import Tile
from lambda_det.own_data.report.matching import FALSE, assign, overlaps

__all__ = ["Match", "draw_worst", "match"]

# Of an image with a longer side than this, the crop with most errors is drawn: in the page each
# half has some 500 pixels, in which a whole photograph and its names cannot be seen
_CROP = 640


def draw_worst(
    entries: Iterable[dict[str, Any]],
    dataset: str,
    *,
    score: float,
    limit: int,
    start: float = 0.0,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the images with the worst results: predictions at the left, ground truth at the right.

    Of a large image the crop is drawn in which most of its errors lie. The captions count the
    errors of the whole image at an IoU of 0.5. The order is by :attr:`Match.quality`, then by
    the number of errors.

    Args:
        entries: of :func:`lambda_det.own_data.report.evaluated.read_predictions`, on images of the
            data set.
        dataset: name of the registered data set that was evaluated.
        score: lowest score of the predictions to draw.
        limit: largest number of images.
        start: the share of the images that are worse than the first; 0.5 begins in the middle.

    Yields:
        The name of an image, with the place of its crop, and a picture [H, W, 3] of uint8, RGB.

    Raises:
        DataError: an image cannot be read.
    """
    records, metadata = load_records(dataset), MetadataCatalog.get(dataset)
    class_of = metadata.thing_dataset_id_to_contiguous_id
    grouped = defaultdict(list)
    for entry in entries:
        if entry["score"] >= score:
            place = class_of[entry["category_id"]]
            grouped[entry["image_id"]].append({**entry, "category_id": place})
    drawn = []
    for record in records:
        own = grouped[record["image_id"]]
        counts = match(_instances(own, record), record.get("annotations", []))
        drawn.append((counts, own, record))
    drawn.sort(key=lambda row: (row[0].quality, -row[0].errors))
    first = int(start * len(drawn))
    for counts, own, record in drawn[first : first + limit]:
        yield _pair(record, own, counts, metadata)


def _corners(entry: dict[str, Any]) -> list[float]:
    box = entry["bbox"] if "bbox" in entry else mask_util.toBbox(entry["segmentation"]).tolist()
    return BoxMode.convert(list(map(float, box)), BoxMode.XYWH_ABS, BoxMode.XYXY_ABS)


def _instances(entries: list[dict[str, Any]], record: dict[str, Any]) -> Instances:
    instances = Instances((record["height"], record["width"]))
    boxes = torch.tensor([_corners(entry) for entry in entries])
    instances.pred_boxes = Boxes(boxes.reshape(-1, 4))
    instances.pred_classes = torch.tensor([e["category_id"] for e in entries], dtype=torch.int64)
    instances.scores = torch.tensor([float(entry["score"]) for entry in entries])
    if entries and all("segmentation" in entry for entry in entries):
        masks = [entry["segmentation"] for entry in entries]
        instances.pred_masks = RunMasks.of_coco(masks, instances.image_size)
    if entries and all("keypoints" in entry for entry in entries):
        points = np.array([entry["keypoints"] for entry in entries], np.float32)
        instances.pred_keypoints = torch.from_numpy(points.reshape(len(entries), -1, 3))
    return instances


def _pair(
    record: dict[str, Any], entries: list[dict[str, Any]], counts: Match, metadata: Metadata
) -> tuple[str, np.ndarray]:
    names = metadata.get("thing_classes")
    name = title = Path(record["file_name"]).name
    captions = (
        f"predicted: {counts.found} found, {counts.missed} missed, {counts.false} false",
        f"ground truth: {name}",
    )
    image = read_image(record)
    crop = _worst_crop(record, entries)
    if crop is not None:
        title += (
            f": {crop.x1 - crop.x0} x {crop.y1 - crop.y0} of {record['width']} x "
            f"{record['height']} pixels, from {crop.x0}, {crop.y0} on"
        )
        image = np.ascontiguousarray(image[crop.y0 : crop.y1, crop.x0 : crop.x1])
        record, entries = _cut(record, entries, crop)
    drawn = side_by_side(
        image,
        _instances(entries, record),
        record.get("annotations", []),
        *(names, names),
        captions=captions,
        name=name,
        metadata=metadata,
        is_reduced=True,
    )
    return title, drawn[:, :, ::-1]


def _worst_crop(record: dict[str, Any], entries: list[dict[str, Any]]) -> Tile | None:
    """The crop of a large image in which most errors lie; None for all of an image.

    It is around one of the errors, and shows twice its box at least. Without an error, it is
    around a prediction or an object.
    """
    height, width = record["height"], record["width"]
    annotations = record.get("annotations", [])
    # what keypoints and turned boxes would be in a crop is decided nowhere
    is_simple = all(
        a["bbox_mode"] in (BoxMode.XYWH_ABS, BoxMode.XYXY_ABS) and "keypoints" not in a
        for a in annotations
    ) and not any("keypoints" in entry for entry in entries)
    found = _instances(entries, record)
    order, chosen = _assigned(found, annotations)
    predicted = found.pred_boxes.tensor[order].numpy().reshape(-1, 4)
    true = np.array([corners(a) for a in annotations] if is_simple else [], float).reshape(-1, 4)
    if max(height, width) <= _CROP or not is_simple or not len(predicted) + len(true):
        return None
    is_false = np.array([index == FALSE for index in chosen], bool)
    is_missed = [
        not a.get("iscrowd") and index not in chosen for index, a in enumerate(annotations)
    ]
    errors = np.concatenate([predicted[is_false], true[np.array(is_missed, bool)]])
    boxes = errors if len(errors) else np.concatenate([predicted, true])
    return fullest_crop(boxes, (height, width), _CROP, margin=2)


def _cut(
    record: dict[str, Any], entries: list[dict[str, Any]], crop: Tile
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record and the predictions of a crop of an image."""
    annotations = [
        {**annotation, **cut}
        for annotation in record.get("annotations", [])
        if (cut := seen_in(annotation, crop))
    ]
    predicted = []
    for entry in entries:
        x0, y0, x1, y1 = _corners(entry)
        box = {"bbox": [x0, y0, x1, y1], "bbox_mode": BoxMode.XYXY_ABS}
        if cut := seen_in({**entry, **box}, crop):
            cut["bbox"] = BoxMode.convert(cut["bbox"], BoxMode.XYXY_ABS, BoxMode.XYWH_ABS)
            predicted.append({**entry, **cut})
    size = {"height": crop.y1 - crop.y0, "width": crop.x1 - crop.x0}
    return {**record, **size, "annotations": annotations}, predicted


@dataclass(frozen=True)
class Match:
    """Counts of one image: objects found and missed, and false predictions."""

    found: int
    missed: int
    false: int

    @property
    def errors(self) -> int:
        """The number of missed objects and false predictions."""
        return self.missed + self.false

    @property
    def quality(self) -> float:
        """Found objects as a share of all objects and false predictions; 1 if there are none."""
        everything = self.found + self.errors
        return self.found / everything if everything else 1.0


def match(instances: Instances, annotations: Sequence[dict[str, Any]]) -> Match:
    """Match boxes of the same class in the order of their scores.

    Args:
        instances: with ``pred_boxes``, ``pred_classes`` and ``scores``.
        annotations: of a Detectron2 dataset dict.
    """
    _, chosen = _assigned(instances, annotations)
    found = sum(index >= 0 for index in chosen)
    objects = sum(not a.get("iscrowd") for a in annotations)
    return Match(found, objects - found, chosen.count(FALSE))


def _assigned(
    instances: Instances, annotations: Sequence[dict[str, Any]]
) -> tuple[torch.Tensor, list[int]]:
    """The order of the predictions by their scores, and in it what each of them finds, as
    :func:`lambda_det.own_data.report.matching.assign` says.
    """
    order = instances.scores.argsort(descending=True, stable=True)
    boxes = BoxMode.convert(
        instances.pred_boxes.tensor[order], BoxMode.XYXY_ABS, BoxMode.XYWH_ABS
    ).double()
    truth = [
        BoxMode.convert(list(map(float, a["bbox"])), a["bbox_mode"], BoxMode.XYWH_ABS)
        for a in annotations
    ]
    crowds = [bool(a.get("iscrowd")) for a in annotations]
    classes = np.array([a["category_id"] for a in annotations], int)
    same = instances.pred_classes[order].numpy()[:, None] == classes[None]
    return order, assign(overlaps(boxes.tolist(), truth, crowds), crowds, same)
