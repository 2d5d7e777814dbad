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
from lambda_det.detection.drawing import side_by_side
from lambda_det.detection.run_masks import RunMasks
from lambda_det.own_data.report.matching import FALSE, assign, overlaps

__all__ = ["Match", "draw_worst", "match"]


def draw_worst(
    entries: Iterable[dict[str, Any]],
    dataset: str,
    *,
    score: float,
    limit: int,
    start: float = 0.0,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the images with the worst results: predictions at the left, ground truth at the right.

    The captions count them at an IoU of 0.5. The order is that of :attr:`Match.quality`, then of
    the number of errors.

    Args:
        entries: of :func:`lambda_det.own_data.report.evaluated.read_predictions`, on images of the
            data set.
        dataset: name of the registered data set that was evaluated.
        score: lowest score of the predictions to draw.
        limit: largest number of images.
        start: the share of the images that are worse than the first; 0.5 begins in the middle.

    Yields:
        The name of an image, and a picture [H, W, 3] of uint8, RGB.

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
        found = _instances(grouped[record["image_id"]], record)
        drawn.append((match(found, record.get("annotations", [])), found, record))
    drawn.sort(key=lambda row: (row[0].quality, -row[0].errors))
    first = int(start * len(drawn))
    for counts, found, record in drawn[first : first + limit]:
        yield Path(record["file_name"]).name, _pair(record, found, counts, metadata)


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
    record: dict[str, Any], instances: Instances, counts: Match, metadata: Metadata
) -> np.ndarray:
    names = metadata.get("thing_classes")
    captions = (
        f"predicted: {counts.found} found, {counts.missed} missed, {counts.false} false",
        f"ground truth: {Path(record['file_name']).name}",
    )
    drawn = side_by_side(
        read_image(record),
        instances,
        record.get("annotations", []),
        *(names, names),
        captions=captions,
        metadata=metadata,
    )
    return drawn[:, :, ::-1]


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
    chosen = assign(overlaps(boxes.tolist(), truth, crowds), crowds, same)
    found = sum(index >= 0 for index in chosen)
    return Match(found, crowds.count(False) - found, chosen.count(FALSE))
