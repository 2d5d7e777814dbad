"""Labelled images for classification: sources, augmentation, batches."""

from lambda_det.classification.data.build import Sources, build_sources
from lambda_det.classification.data.loader import (
    LabelledTrainLoader,
    build_eval_loader,
)
from lambda_det.classification.data.sources import FolderSource, Source, check_same_classes
from lambda_det.classification.data.subset import check_held_out, read_list, write_list

__all__ = [
    "FolderSource",
    "LabelledTrainLoader",
    "Source",
    "Sources",
    "build_eval_loader",
    "build_sources",
    "check_held_out",
    "check_same_classes",
    "read_list",
    "write_list",
]
