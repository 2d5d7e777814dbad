"""Training, evaluation and what surrounds them."""

from lambda_det.engine.command_line import parser
from lambda_det.engine.config_file import load_config
from lambda_det.engine.launch import launch
from lambda_det.engine.setup import evaluate, run, setup, train
from lambda_det.engine.trainer import DetectionTrainer

__all__ = [
    "DetectionTrainer",
    "evaluate",
    "launch",
    "load_config",
    "parser",
    "run",
    "setup",
    "train",
]
