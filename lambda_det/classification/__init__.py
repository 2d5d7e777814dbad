"""ImageNet training: recipes, data, and the task that turns them into checkpoints."""

from lambda_det.first_use import names_of

__getattr__ = names_of(
    __name__,
    {
        "parser": "classification.command_line",
        "run": "training.command_line",
        "get_classification_config": "classification.config",
        "load_recipe": "classification.config",
        "ClassificationTask": "classification.task",
    },
)
