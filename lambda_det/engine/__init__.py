"""Training, evaluation and what surrounds them."""

from lambda_det.engine.command_line import lazy_parser, parser
from lambda_det.engine.config_file import load_config
from lambda_det.engine.lazy_file import load_lazy_config
from lambda_det.engine.lazy_trainer import LazyTrainer, run_lazy
from lambda_det.engine.setup import evaluate, run, setup, train
from lambda_det.engine.trainer import DetectionTrainer
from lambda_det.processes.launch import launch

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
