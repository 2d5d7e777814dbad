"""Looking a COCO-format data set over, before hours are spent on it."""

from lambda_det.detection.data.checks.coco import check_coco
from lambda_det.detection.data.checks.configuration import check_datasets, check_detector_data
from lambda_det.detection.data.checks.registered import registered_files
from lambda_det.detection.data.checks.report import BAD_BOX, KINDS, NOTED, REFUSED, Problem, Report

__all__ = [
    "BAD_BOX",
    "KINDS",
    "NOTED",
    "REFUSED",
    "Problem",
    "Report",
    "check_coco",
    "check_datasets",
    "check_detector_data",
    "registered_files",
]
