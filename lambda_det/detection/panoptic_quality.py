"""Panoptic quality (Kirillov et al. 2019, Panoptic Segmentation, section 4)."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add
from typing import Any

import numpy as np
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm
from detectron2.utils.file_io import PathManager
from PIL import Image

from lambda_det.detection.data.coco_format import check_segments_mode, read_panoptic
from lambda_det.errors import DataError, listed, printable, refused

VOID = 0  # id of pixels without a segment, in the ground truth and in predictions

logger = logging.getLogger(__name__)


@dataclass
class Matches:
    """The counts of one category: matched segments, the sum of their IoU, unmatched segments."""

    matched: int = 0
    iou: float = 0.0
    unmatched_predictions: int = 0
    unmatched_ground_truths: int = 0

    def __add__(self, other: Matches) -> Matches:
        return Matches(*map(add, astuple(self), astuple(other)))

    @property
    def weight(self) -> float:
        """The denominator of PQ, TP + FP / 2 + FN / 2; 0 if the category does not occur."""
        return self.matched + (self.unmatched_predictions + self.unmatched_ground_truths) / 2

    def quality(self) -> tuple[float, float, float]:
        """PQ, SQ (the mean IoU of matched segments) and RQ (the F1 score of matching)."""
        segmentation = self.iou / self.matched if self.matched else 0.0
        return self.iou / self.weight, segmentation, self.matched / self.weight


def match_segments(
    ground_truth: np.ndarray,
    ground_truth_segments: Sequence[Mapping[str, Any]],
    predicted: np.ndarray,
    predicted_segments: Sequence[Mapping[str, Any]],
    counts: defaultdict[int, Matches],
) -> None:
    """Match the segments of one image, and add them to the counts, by category id.

    Two segments of a category match if their IoU is above 1/2, so each has at most one match. Void
    pixels of the ground truth are excluded from the IoU. Crowds do not count, and neither do
    unmatched predictions with more than half of their pixels on void or on crowds of their category
    (section 4.2).

    Args:
        ground_truth: segment ids [H, W], 0 for void.
        ground_truth_segments: with "id", "category_id" and optionally "iscrowd".
        predicted: segment ids [H, W], 0 for void.
        predicted_segments: with "id" and "category_id".
        counts: of the images so far.
    """
    # Ids without a description are void
    columns, predicted = _numbered(predicted, predicted_segments)
    rows, ground_truth = _numbered(ground_truth, ground_truth_segments)
    overlap = np.zeros((len(rows) + 1, len(columns) + 1), dtype=np.int64)
    np.add.at(overlap, (ground_truth.reshape(-1), predicted.reshape(-1)), 1)
    # for all pairs: whether they are of one category, and their union without void pixels
    kinds = [np.array([VOID, *(s["category_id"] for s in each)]) for each in (rows, columns)]
    is_same = kinds[0][:, None] == kinds[1]
    is_crowd = np.array([False, *(bool(s.get("iscrowd", 0)) for s in rows)])[:, None]
    unions = overlap.sum(1)[:, None] + overlap.sum(0) - overlap - overlap[VOID]
    is_match = is_same & ~is_crowd & (2 * overlap > unions)
    is_match[VOID] = is_match[:, VOID] = False
    forgiven = overlap[VOID] + (overlap * (is_same & is_crowd)).sum(0)
    for i, segment in enumerate(rows, start=1):
        if is_crowd[i]:
            continue
        count = counts[segment["category_id"]]
        count.unmatched_ground_truths += not is_match[i].any()
        for j in np.flatnonzero(is_match[i]):  # one, or none
            count.matched += 1
            count.iou += overlap[i, j] / unions[i, j]
    for j, segment in enumerate(columns, start=1):
        if not is_match[:, j].any() and 2 * forgiven[j] <= overlap[:, j].sum():
            counts[segment["category_id"]].unmatched_predictions += 1


def _numbered(
    ids: np.ndarray, segments: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], np.ndarray]:
    """The segments that have pixels, and a map [H, W] of their numbers, counted from 1."""
    present, inverse = np.unique(ids, return_inverse=True)
    described = {segment["id"]: segment for segment in segments}
    is_kept = np.isin(present, list(described))
    kept = [described[i] for i in present[is_kept].tolist()]
    numbers = np.where(is_kept, np.cumsum(is_kept), VOID)
    return kept, numbers[inverse].reshape(ids.shape)


def _read_ids(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """The segment ids [H, W] that an image encodes in its colours."""
    what = f"The image of segments {printable(path)} cannot be read"
    # Pillow may raise anything for a broken file
    with refused(DataError, what, "make it again", Exception), PathManager.open(path, "rb") as file:
        image = Image.open(file)
        colours = np.asarray(image.convert("RGB"), dtype=np.int64)
    check_segments_mode(path, image.mode)
    if colours.shape[:2] != shape:
        raise DataError(
            f"The image of segments {printable(path)} has {colours.shape[:2]} rows and columns, "
            f"and its image {tuple(shape)}; fetch or make it again."
        )
    return colours @ np.array([1, 256, 256**2])


def _check_segments(path: str, ids: np.ndarray, segments: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ground truth [H, W] whose ids differ from the described ones."""
    # a segment without pixels or without a description would not count as missed, and raise PQ
    described = {segment["id"] for segment in segments}
    if differing := (set(np.unique(ids).tolist()) - {VOID}) ^ described:
        raise DataError(
            f"The image of segments {printable(path)} and its segments_info in the panoptic file "
            f"differ in the id(s) {listed(sorted(differing))}; fetch or make both again."
        )


class PanopticQualityEvaluator(DatasetEvaluator):
    """Evaluate PQ, SQ and RQ over all categories, over things and over stuff.

    Detectron2's ``COCOPanopticEvaluator`` gives the same results, except where an image has several
    crowds of one category: it excludes only the last one. It needs ``panopticapi``, which is not on
    PyPI.

    Args:
        dataset_name: a data set registered by ``register_coco_panoptic_separated``.

    Raises:
        DataError: its panoptic file is not in COCO's format; later, that an image of segments is
            missing, broken, not RGB, of another size than the predictions, or holds other ids than
            the file describes.
    """

    def __init__(self, dataset_name: str) -> None:
        metadata = MetadataCatalog.get(dataset_name)
        self._root = metadata.panoptic_root
        self._file = metadata.panoptic_json
        self._ground_truth, self._is_thing = read_panoptic(self._file)
        stuff = metadata.stuff_dataset_id_to_contiguous_id
        ids_of = (stuff, metadata.thing_dataset_id_to_contiguous_id)
        self._dataset_ids = [{number: i for i, number in ids.items()} for ids in ids_of]
        self.reset()

    def reset(self) -> None:
        self._counts = defaultdict(Matches)

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        for image, output in zip(inputs, outputs, strict=True):
            predicted, segments = output["panoptic_seg"]
            segments = [
                {
                    "id": s["id"],
                    "category_id": self._dataset_ids[bool(s["isthing"])][s["category_id"]],
                }
                for s in segments
            ]
            entry = self._ground_truth.get(image["image_id"])
            if entry is None:
                raise DataError(
                    f"{self._file} has no segments of image {image['image_id']!r}; add them, or "
                    "remove the image from the other annotations."
                )
            ids = predicted.cpu().numpy()
            path = os.path.join(self._root, entry["file_name"])
            ground_truth = _read_ids(path, ids.shape)
            _check_segments(path, ground_truth, entry["segments_info"])
            match_segments(ground_truth, entry["segments_info"], ids, segments, self._counts)

    def evaluate(self) -> dict[str, dict[str, float]] | None:
        """PQ, SQ and RQ in percent; suffix _th: things, _st: stuff. None on other processes."""
        everywhere = comm.gather(self._counts)
        if not comm.is_main_process():
            return None
        total = defaultdict(Matches)
        for counts in everywhere:
            for category, matches in counts.items():
                total[category] += matches
        results = {}
        for suffix, kinds in (("", (True, False)), ("_th", (True,)), ("_st", (False,))):
            qualities = [
                matches.quality()
                for category, matches in total.items()
                if self._is_thing[category] in kinds and matches.weight
            ]
            # NaN is the mean over no category, as in a data set without stuff or without things
            means = np.mean(qualities, axis=0) if qualities else [float("nan")] * 3
            for name, value in zip(("PQ", "SQ", "RQ"), means, strict=True):
                results[name + suffix] = 100 * float(value)
        logger.info("Panoptic quality: %s", {k: round(v, 2) for k, v in results.items()})
        return {"panoptic_seg": results}
