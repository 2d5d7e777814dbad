"""Training, evaluation and prediction of detectors."""

from lambda_det.detection.command_line import lazy_parser, parser
from lambda_det.detection.config import load_config
from lambda_det.detection.heads import LambdaRes5ROIHeads
from lambda_det.detection.lazy import load_lazy_config
from lambda_det.detection.task import DetectionTask, load_any_config
from lambda_det.training.command_line import run

__all__ = [
    "DetectionTask",
    "LambdaRes5ROIHeads",
    "lazy_parser",
    "load_any_config",
    "load_config",
    "load_lazy_config",
    "parser",
    "run",
]
