"""Data sets, their checks, augmentation and loading."""

from lambda_det.detection.data.annotations import check_coco
from lambda_det.detection.data.checks import (
    check_datasets,
    check_detector_data,
    check_pixels,
    check_registered,
)
from lambda_det.detection.data.coco import GroundTruth, read_coco
from lambda_det.detection.data.jitter import build_augmentation, large_scale_jitter
from lambda_det.detection.data.loader import (
    TrainLoader,
    build_test_loader,
    build_train_loader,
    tolerant_test_loader,
    tolerant_train_loader,
)
from lambda_det.detection.data.mapper import TolerantMapper
from lambda_det.detection.data.registration import register_coco_files, register_json_datasets
from lambda_det.detection.data.report import Finding, Kind, Report
from lambda_det.detection.data.shapes import register_shapes

__all__ = [
    "Finding",
    "GroundTruth",
    "Kind",
    "Report",
    "TolerantMapper",
    "TrainLoader",
    "build_augmentation",
    "build_test_loader",
    "build_train_loader",
    "check_coco",
    "check_datasets",
    "check_detector_data",
    "check_pixels",
    "check_registered",
    "large_scale_jitter",
    "read_coco",
    "register_coco_files",
    "register_json_datasets",
    "register_shapes",
    "tolerant_test_loader",
    "tolerant_train_loader",
]
