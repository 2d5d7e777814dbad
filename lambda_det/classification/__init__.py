"""ImageNet training: recipes, data, and the task that turns them into checkpoints."""

from lambda_det.classification.command_line import parser, run
from lambda_det.classification.config import get_classification_config, load_recipe
from lambda_det.classification.task import ClassificationTask

__all__ = [
    "ClassificationTask",
    "get_classification_config",
    "load_recipe",
    "parser",
    "run",
]
