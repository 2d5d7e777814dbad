"""The images with the worst results: predictions beside the ground truth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pycocotools.mask as mask_util
import torch
from detectron2.data import MetadataCatalog
from detectron2.data.catalog import Metadata
from detectron2.structures import Boxes, BoxMode, Instances

from lambda_det.detection.data.records import read_image
from lambda_det.detection.data.registration import load_records
from lambda_det.detection.data.tile_records import seen_in
from lambda_det.detection.data.truth import around, corners
from lambda_det.detection.drawing import draw_ground_truth, draw_predictions, fullest_crop
from lambda_det.detection.matches import FALSE, evaluation_of, objects_found
from lambda_det.detection.merging import runs
from lambda_det.detection.run_masks import RunMasks
from lambda_det.detection.tiles import Tile
from lambda_det.errors import printable
from lambda_det.own_data.report.evaluated import Evaluated

_SIDE = 512  # pixels of the longer side of a picture, so that labels are legible
# The side of a crop, as a multiple of the longer side of an object that is wrong, and in pixels
_CROP, _LEAST_CROP = 12, 64


class Pair(NamedTuple):
    """An image with its predictions, and with its ground truth.

    Attributes:
        name: of the image.
        counts: of found and missed objects, and of false predictions, in words; then whether a part
            of the image is drawn.
        predicted, truth: pictures [H, W, 3] of uint8, BGR.
    """

    name: str
    counts: str
    predicted: np.ndarray
    truth: np.ndarray


class _Judged(NamedTuple):
    """An image with its predictions, and what they find at an IoU of 0.5.

    Attributes:
        record: of the image.
        entries: predictions in COCO's format, with the numbers of their classes as categories;
            where they are drawn, with corners as boxes.
        found: of each prediction, as :func:`lambda_det.detection.matches.objects_found` says.
        missed: annotations in COCO's format that no prediction finds.
    """

    record: dict[str, Any]
    entries: list[dict[str, Any]]
    found: list[int]
    missed: list[dict[str, Any]]

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of found objects, of missed ones, and of false predictions."""
        hits = sum(number > 0 for number in self.found)
        return hits, len(self.missed), self.found.count(FALSE)

    @property
    def order(self) -> tuple[float, int]:
        """The worst first, of those with an error: found objects as a share of all objects and
        false predictions; then the number of errors.
        """
        hits, missed, false = self.counts
        return hits / (hits + missed + false), -missed - false


def draw_worst(evaluated: Evaluated, limit: int) -> Iterator[Pair]:
    """Yield the images with the worst results, ``limit`` at most: of those with an error, unless
    there is none.

    Of an image whose errors are small in it the crop is drawn in which most of them lie. The counts
    are of the whole image, at the score of the evaluation and an IoU of 0.5 with objects of the
    same class: of masks where they decide that score, else of boxes.

    Raises:
        DataError: an image cannot be read.
    """
    judged = list(_judged(evaluated))
    wrong = [one for one in judged if any(one.counts[1:])]
    for one in (sorted(wrong, key=lambda one: one.order) or judged)[:limit]:
        yield _pair(one, MetadataCatalog.get(evaluated.dataset))


def _judged(evaluated: Evaluated) -> Iterator[_Judged]:
    """Each image of a data set, with its predictions of the score of the evaluation or more."""
    ground_truth, entries = evaluated.ground_truth, evaluated.entries
    records = load_records(evaluated.dataset)
    class_of = MetadataCatalog.get(evaluated.dataset).thing_dataset_id_to_contiguous_id
    predictions, found, hit = defaultdict(list), defaultdict(list), set()
    numbers = objects_found(evaluation_of(ground_truth, entries, evaluated.results[-1].iou_type))
    for entry, number in zip(entries, numbers, strict=True):
        if entry["score"] >= evaluated.score:
            place = class_of[entry["category_id"]]
            predictions[entry["image_id"]].append({**entry, "category_id": place})
            found[entry["image_id"]].append(number)
            hit.add(number)
    for record in records:
        image = record["image_id"]
        objects = ground_truth.loadAnns(ground_truth.getAnnIds(imgIds=[image], iscrowd=False))
        missed = [one for one in objects if one["id"] not in hit]
        yield _Judged(record, predictions[image], found[image], missed)


def _corners(entry: dict[str, Any]) -> list[float]:
    """Of the box, or of the mask, of an entry in COCO's format."""
    if "bbox" in entry:
        return corners({**entry, "bbox_mode": BoxMode.XYWH_ABS})
    return [*around(entry["segmentation"])]


def _instances(entries: list[dict[str, Any]], record: dict[str, Any]) -> Instances:
    instances = Instances((record["height"], record["width"]))
    instances.pred_boxes = Boxes([entry["bbox"] for entry in entries])
    instances.pred_classes = torch.tensor([e["category_id"] for e in entries], dtype=torch.int64)
    instances.scores = torch.tensor([float(entry["score"]) for entry in entries])
    if entries and all("segmentation" in entry for entry in entries):
        masks = [runs(mask_util.decode(entry["segmentation"]), 0, 0) for entry in entries]
        instances.pred_masks = RunMasks(masks, instances.image_size)
    if entries and all("keypoints" in entry for entry in entries):
        points = np.array([entry["keypoints"] for entry in entries], np.float32)
        instances.pred_keypoints = torch.from_numpy(points.reshape(len(entries), -1, 3))
    return instances


def _pair(judged: _Judged, metadata: Metadata) -> Pair:
    record, mode = judged.record, BoxMode.XYXY_ABS
    entries = [{**one, "bbox": _corners(one), "bbox_mode": mode} for one in judged.entries]
    judged = judged._replace(entries=entries)
    counts = "{} found, {} missed, {} false".format(*judged.counts)
    image = read_image(record)
    if crop := _worst_crop(judged):
        counts += "; this is the part with most errors"
        image = np.ascontiguousarray(image[crop.y0 : crop.y1, crop.x0 : crop.x1])
        record, entries = _cut(record, entries, crop)
    options = metadata.get("thing_classes"), _SIDE / max(image.shape[:2]), metadata
    return Pair(
        printable(Path(record["file_name"]).name),
        counts,
        draw_predictions(image, _instances(entries, record), *options),
        draw_ground_truth(image, record.get("annotations", []), *options),
    )


def _worst_crop(judged: _Judged) -> Tile | None:
    """The crop with most errors; None for the whole image, where they are large enough to be seen
    in it, or there is none.
    """
    record, entries = judged.record, judged.entries
    height, width = record["height"], record["width"]
    annotations = record.get("annotations", [])
    # what keypoints would be in a crop is decided nowhere
    has_points = any("keypoints" in one for one in (*annotations, *entries))
    boxes = [e["bbox"] for e, found in zip(entries, judged.found, strict=True) if found == FALSE]
    boxes += [_corners(one) for one in judged.missed]
    if has_points or not boxes:
        return None
    wrong = np.array(boxes)
    side = max(_LEAST_CROP, int(_CROP * np.median((wrong[:, 2:] - wrong[:, :2]).max(1))))
    # one that is little smaller than the image would leave out errors and show none better
    return None if 2 * side > max(height, width) else fullest_crop(wrong, (height, width), side)


def _cut(
    record: dict[str, Any], entries: list[dict[str, Any]], crop: Tile
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record and the predictions of a crop of an image."""

    def seen(one: dict[str, Any]) -> dict[str, Any] | None:
        mask = one.get("segmentation")
        # an empty one is in no crop, and its box is drawn nevertheless
        is_empty = isinstance(mask, dict) and not mask_util.area(mask)
        return seen_in({**one, "segmentation": None} if is_empty else one, crop)

    annotations, predicted = (
        [{**one, **cut} for one in objects if (cut := seen(one))]
        for objects in (record.get("annotations", []), entries)
    )
    size = {"height": crop.y1 - crop.y0, "width": crop.x1 - crop.x0}
    return {**record, **size, "annotations": annotations}, predicted
