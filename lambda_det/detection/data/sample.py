"""A sample of a large test set, for the evaluations before the last one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.detection.data.registration import load_records

__all__ = ["sample_of"]

# metadata by which the ground truth and the names of a data set's instances are found
_KEPT = (
    "thing_classes",
    "thing_colors",
    "thing_dataset_id_to_contiguous_id",
    "keypoint_names",
    "keypoint_flip_map",
    "keypoint_connection_rules",
)


def sample_of(name: str, size: int) -> str:
    """Register a sample of ``size`` images of a data set, evenly spread, and return its name.

    Args:
        name: a registered data set.
        size: number of images; 0 for all.

    Returns:
        ``name`` itself where it has no more images, or is not of COCO's instances.
    """
    if size <= 0 or MetadataCatalog.get(name).get("evaluator_type") not in (None, "coco"):
        return name
    records = load_records(name)  # after this the metadata have the ids of the categories
    if not isinstance(records, Sequence) or len(records) <= size:
        return name
    sample = f"{name}_sample_{size}"
    if sample not in DatasetCatalog:
        DatasetCatalog.register(sample, partial(_spread, name, size))
        metadata = MetadataCatalog.get(name)
        kept = {key: metadata.get(key) for key in _KEPT}
        MetadataCatalog.get(sample).set(**{k: v for k, v in kept.items() if v is not None})
    return sample


def _spread(name: str, size: int) -> list[dict[str, Any]]:
    records = load_records(name)
    return [records[place * len(records) // size] for place in range(size)]
