"""ImageNet training: recipes, data, and the loop that turns them into checkpoints."""

from lambda_det.classification.command_line import load_recipe, parser
from lambda_det.classification.config import get_classification_config
from lambda_det.classification.setup import run
from lambda_det.classification.trainer import ClassificationTrainer

__all__ = ["ClassificationTrainer", "get_classification_config", "load_recipe", "parser", "run"]
