"""Draw the predictions of a results file beside the ground truth."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.catalog import Metadata
from detectron2.structures import Boxes, BoxMode, Instances
from tqdm import tqdm

from lambda_det.detection.data.classes import renumbered
from lambda_det.detection.data.records import read_image
from lambda_det.detection.data.registration import is_coco, registered_files
from lambda_det.detection.drawing import side_by_side
from lambda_det.errors import ConfigError, DataError, listed, reason
from lambda_det.report.matching import FALSE, assign, overlaps

__all__ = [
    "Match",
    "Pictures",
    "belonging",
    "check_options",
    "draw_results",
    "match",
    "read_results",
]

logger = logging.getLogger(__name__)


class Pictures:
    """Keeps pictures in memory. A subclass may write them to files.

    Attributes:
        kept: names and pictures [H, W, 3] of uint8, RGB, in the order of drawing.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[str, np.ndarray]] = []

    def check(self, names: Iterable[str]) -> None:
        """Raise ConfigError if a picture of one of these names cannot be added."""

    def add(self, name: str, picture: np.ndarray) -> None:
        self.kept.append((name, picture))


def draw_results(
    results: str | Path,
    dataset: str,
    pictures: Pictures,
    *,
    score_threshold: float = 0.5,
    limit: int | None = 20,
    worst_first: bool = False,
) -> Match:
    """Draw predictions at the left and ground truth at the right, with counts at an IoU of 0.5.

    Args:
        results: a ``coco_instances_results.json``.
        dataset: name of the registered data set that was evaluated.
        pictures: get one of the name 0000_NAME, one of the name 0001_NAME, ...
        score_threshold: lowest score of the predictions to draw, from 0 to 1.
        limit: largest number of images; None for all.
        worst_first: order the images by :attr:`Match.quality`, then by the number of errors. False
            keeps the order of the data set.

    Returns:
        The sums of the counts of all pictures.

    Raises:
        DataError: the file or the data set is missing or damaged, or they do not belong together.
        ConfigError: there is no such data set, or a picture would be overwritten.
    """
    check_options(score_threshold, limit)
    records, metadata = _records(dataset), MetadataCatalog.get(dataset)
    predictions = _by_image(results, records, metadata, dataset)
    found = [_instances(predictions[r["image_id"]], r, score_threshold) for r in records]
    matches = [match(i, r.get("annotations", [])) for i, r in zip(found, records, strict=True)]
    order = list(range(len(records)))
    if worst_first:
        order.sort(key=lambda index: (matches[index].quality, -matches[index].errors))
    order = order[:limit]
    names = [
        f"{place:04d}_{Path(records[index]['file_name']).stem}" for place, index in enumerate(order)
    ]
    pictures.check(names)
    for name, index in zip(tqdm(names, unit="image"), order, strict=True):
        pictures.add(name, _pair(records[index], found[index], matches[index], metadata))
    counts = [matches[index] for index in order]
    return Match(*(sum(getattr(m, part) for m in counts) for part in ("found", "missed", "false")))


def check_options(score: float, images: int | None) -> None:
    """Raise ConfigError where a score or a number of images cannot be."""
    if not 0 <= score <= 1:
        raise ConfigError(f"The score threshold is {score}; give one from 0 to 1.")
    if images is not None and images < 1:
        raise ConfigError(f"The number of pictures is {images}; give at least 1.")


def read_results(path: str | Path, dataset: str) -> list[dict[str, Any]]:
    """Read a results file in COCO's format, with the ids that a data set has for its classes now.

    Raises:
        DataError: the file is missing or no JSON, or its entries are no predictions of instances.
    """
    try:
        entries = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"The results file {path} cannot be read ({reason(error)}); an evaluation writes it as "
            "inference/coco_instances_results.json into its OUTPUT_DIR."
        ) from error
    needed = {"image_id", "category_id", "score"}
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) and needed <= set(e) and ("bbox" in e or "segmentation" in e)
        for e in entries
    ):
        raise DataError(
            f"{path} is no list of predictions of instances; give a coco_instances_results.json of "
            "an evaluation."
        )
    if not entries:
        raise DataError(f"{path} holds no predictions: the detector found nothing in {dataset}.")
    return renumbered(entries, path, dataset)


def _records(dataset: str) -> list[dict[str, Any]]:
    if dataset not in DatasetCatalog or is_coco(dataset):
        registered_files(dataset)  # raises an error that explains an unknown name or missing files
    return DatasetCatalog.get(dataset)


def belonging(
    entries: list[dict[str, Any]],
    categories: Collection[Any],
    images: Collection[Any],
    results: str | Path,
    dataset: str,
) -> list[dict[str, Any]]:
    """The predictions on images that the data set has; the others are counted in a warning.

    Raises:
        DataError: the data set lacks a category of the predictions, or all of their images.
    """
    unknown = sorted({entry["category_id"] for entry in entries} - set(categories))
    kept = [entry for entry in entries if entry["image_id"] in images]
    if unknown or not kept:
        lacking = f"no category {listed(map(str, unknown))}" if unknown else "none of its images"
        raise DataError(
            f"{results} does not belong to the data set {dataset} as it is now, which has "
            f"{lacking}; give the data set that was evaluated, or evaluate again."
        )
    if len(kept) < len(entries):
        logger.warning(
            "%d of the %d predictions are of images that %s does not have; they are ignored.",
            len(entries) - len(kept),
            len(entries),
            dataset,
        )
    return kept


def _by_image(
    results: str | Path, records: list[dict[str, Any]], metadata: Metadata, dataset: str
) -> dict[Any, list[dict[str, Any]]]:
    """The predictions of each image, with the numbers of their classes in training."""
    entries = read_results(results, dataset)
    count = len(metadata.get("thing_classes") or ())
    class_of = metadata.get("thing_dataset_id_to_contiguous_id") or {i: i for i in range(count)}
    images = {record["image_id"] for record in records}
    grouped = defaultdict(list)
    for entry in belonging(entries, class_of, images, results, dataset):
        grouped[entry["image_id"]].append({**entry, "category_id": class_of[entry["category_id"]]})
    return grouped


def _corners(entry: dict[str, Any]) -> list[float]:
    box = entry["bbox"] if "bbox" in entry else mask_util.toBbox(entry["segmentation"]).tolist()
    return BoxMode.convert(list(map(float, box)), BoxMode.XYWH_ABS, BoxMode.XYXY_ABS)


def _instances(
    entries: list[dict[str, Any]], record: dict[str, Any], score_threshold: float
) -> Instances:
    entries = [entry for entry in entries if entry["score"] >= score_threshold]
    instances = Instances((record["height"], record["width"]))
    boxes = torch.tensor([_corners(entry) for entry in entries])
    instances.pred_boxes = Boxes(boxes.reshape(-1, 4))
    instances.pred_classes = torch.tensor([e["category_id"] for e in entries], dtype=torch.int64)
    instances.scores = torch.tensor([float(entry["score"]) for entry in entries])
    if entries and all("segmentation" in entry for entry in entries):
        masks = np.stack([mask_util.decode(entry["segmentation"]) for entry in entries])
        instances.pred_masks = torch.from_numpy(masks.astype(bool))
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
