"""Panoptic quality (Kirillov et al. 2019, Panoptic Segmentation, section 4)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm
from detectron2.utils.file_io import PathManager
from PIL import Image

from lambda_det.detection.data.coco_format import read_entries, read_json
from lambda_det.errors import DataError

__all__ = ["Matches", "PanopticQualityEvaluator", "match_segments"]

VOID = 0  # pixels that belong to no segment, in the truth and in predictions

logger = logging.getLogger(__name__)


@dataclass
class Matches:
    """What was counted for one category: matched segments, the sum of their IoU, and the rest."""

    matched: int = 0
    iou: float = 0.0
    unmatched_predictions: int = 0
    unmatched_truths: int = 0

    def __add__(self, other: Matches) -> Matches:
        return Matches(
            self.matched + other.matched,
            self.iou + other.iou,
            self.unmatched_predictions + other.unmatched_predictions,
            self.unmatched_truths + other.unmatched_truths,
        )

    @property
    def weight(self) -> float:
        """The divisor of quality; 0 for a category that occurs nowhere."""
        return self.matched + (self.unmatched_predictions + self.unmatched_truths) / 2

    def quality(self) -> tuple[float, float, float]:
        """PQ and its factors: the mean IoU of what is matched (SQ), and the F1 of matching (RQ)."""
        segmentation = self.iou / self.matched if self.matched else 0.0
        return self.iou / self.weight, segmentation, self.matched / self.weight


def match_segments(
    truth: np.ndarray,
    truth_segments: Sequence[Mapping[str, Any]],
    predicted: np.ndarray,
    predicted_segments: Sequence[Mapping[str, Any]],
) -> dict[int, Matches]:
    """Match the segments of one image and count, by category id.

    Segments of a category match where their IoU is above 1/2, so that none matches twice. Void
    pixels of the truth take no part in an IoU, and a prediction that lies by more than half on void
    or on a crowd of its category counts nowhere; nor does a crowd (section 4.2).

    Args:
        truth: segment ids [H, W], 0 for void.
        truth_segments: with "id", "category_id" and maybe "iscrowd".
        predicted: as ``truth``.
        predicted_segments: with "id" and "category_id".
    """
    # Segments that are described nowhere are void
    columns, predicted = _numbered(predicted, predicted_segments)
    rows, truth = _numbered(truth, truth_segments)
    overlap = np.zeros((len(rows) + 1, len(columns) + 1), dtype=np.int64)
    np.add.at(overlap, (truth.reshape(-1), predicted.reshape(-1)), 1)
    truth_areas, predicted_areas = overlap.sum(axis=1), overlap.sum(axis=0)
    result: dict[int, Matches] = {}
    matched_columns: set[int] = set()
    for i, segment in enumerate(rows, start=1):
        if segment.get("iscrowd", 0):
            continue
        count = result.setdefault(segment["category_id"], Matches())
        # A union without the prediction's void pixels
        unions = truth_areas[i] + predicted_areas - overlap[i] - overlap[VOID]
        for j, other in enumerate(columns, start=1):
            if other["category_id"] == segment["category_id"] and 2 * overlap[i, j] > unions[j]:
                count.matched += 1
                count.iou += overlap[i, j] / unions[j]
                matched_columns.add(j)
                break
        else:
            count.unmatched_truths += 1
    for j, segment in enumerate(columns, start=1):
        if j in matched_columns:
            continue
        crowds = [
            i
            for i, other in enumerate(rows, start=1)
            if other.get("iscrowd", 0) and other["category_id"] == segment["category_id"]
        ]
        if 2 * overlap[[VOID, *crowds], j].sum() <= predicted_areas[j]:
            result.setdefault(segment["category_id"], Matches()).unmatched_predictions += 1
    return result


def _numbered(
    ids: np.ndarray, segments: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], np.ndarray]:
    """The segments that have pixels, and for each pixel the number of its segment, from 1."""
    present, inverse = np.unique(ids, return_inverse=True)
    described = {segment["id"]: segment for segment in segments}
    kept = [described[i] for i in present.tolist() if i in described]
    numbers = {segment["id"]: number for number, segment in enumerate(kept, start=1)}
    table = np.array([numbers.get(i, VOID) for i in present.tolist()], dtype=np.int64)
    return kept, table[inverse].reshape(ids.shape)


class PanopticQualityEvaluator(DatasetEvaluator):
    """PQ, SQ and RQ over all categories, things and stuff, of truth in COCO's panoptic format.

    Detectron2's ``COCOPanopticEvaluator`` gives the same and needs ``panopticapi``, which no
    package registry has.

    Args:
        dataset_name: a data set with the metadata of ``register_coco_panoptic_separated``.
    """

    def __init__(self, dataset_name: str) -> None:
        metadata = MetadataCatalog.get(dataset_name)
        self._root = metadata.panoptic_root
        self._file = metadata.panoptic_json
        content = read_json(self._file)
        keys = ("image_id", "file_name", "segments_info")
        self._truth = {
            entry["image_id"]: entry
            for entry in read_entries(self._file, content, "annotations", keys)
        }
        self._is_thing = {
            entry["id"]: bool(entry["isthing"])
            for entry in read_entries(self._file, content, "categories", ("id", "isthing"))
        }
        self._dataset_ids = {
            isthing: {number: i for i, number in ids.items()}
            for isthing, ids in (
                (True, metadata.thing_dataset_id_to_contiguous_id),
                (False, metadata.stuff_dataset_id_to_contiguous_id),
            )
        }
        self.reset()

    def reset(self) -> None:
        self._counts: dict[int, Matches] = {}

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
            entry = self._truth.get(image["image_id"])
            if entry is None:
                raise DataError(
                    f"{self._file} has no segments of image {image['image_id']!r}; add them, or "
                    "take the image out of the other annotations."
                )
            with PathManager.open(os.path.join(self._root, entry["file_name"]), "rb") as file:
                colours = np.asarray(Image.open(file).convert("RGB"), dtype=np.int64)
            truth = colours @ np.array([1, 256, 256**2])
            found = match_segments(truth, entry["segments_info"], predicted.cpu().numpy(), segments)
            for category, matches in found.items():
                self._counts[category] = self._counts.get(category, Matches()) + matches

    def evaluate(self) -> dict[str, dict[str, float]] | None:
        """PQ, SQ and RQ in percent, of things with _th and of stuff with _st; on one process."""
        everywhere = comm.gather(self._counts)
        if not comm.is_main_process():
            return None
        total: dict[int, Matches] = {}
        for counts in everywhere:
            for category, matches in counts.items():
                total[category] = total.get(category, Matches()) + matches
        results = {}
        for suffix, kinds in (("", (True, False)), ("_th", (True,)), ("_st", (False,))):
            qualities = [
                matches.quality()
                for category, matches in total.items()
                if self._is_thing[category] in kinds and matches.weight
            ]
            # As the mean over no category, which a data set without stuff or without things has
            means = np.mean(qualities, axis=0) if qualities else [float("nan")] * 3
            for name, value in zip(("PQ", "SQ", "RQ"), means, strict=True):
                results[name + suffix] = 100 * float(value)
        logger.info("Panoptic quality: %s", {k: round(v, 2) for k, v in results.items()})
        return {"panoptic_seg": results}
