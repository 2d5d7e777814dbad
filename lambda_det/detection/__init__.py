"""Training, evaluation and what surrounds them."""

from lambda_det.detection.lazy_file import load_lazy_config
from lambda_det.detection.lazy_trainer import LazyTrainer, run_lazy
from lambda_det.detection.setup import evaluate, run, setup, train
from lambda_det.detection.trainer import DetectionTrainer
from lambda_det.distributed.launch import launch
from lambda_det.training.command_line import lazy_parser, parser
from lambda_det.training.config_file import load_config

__all__ = [
    "DetectionTrainer",
    "LazyTrainer",
    "evaluate",
    "launch",
    "lazy_parser",
    "load_config",
    "load_lazy_config",
    "parser",
    "run",
    "run_lazy",
    "setup",
    "train",
]
