"""Training, evaluation and prediction of detectors."""

from lambda_det.first_use import names_of

__getattr__ = names_of(
    __name__,
    {
        "lazy_parser": "detection.command_line",
        "parser": "detection.command_line",
        "run": "training.command_line",
        "load_config": "detection.config",
        "LambdaRes5ROIHeads": "detection.heads",
        "load_lazy_config": "detection.lazy",
        "DetectionTask": "detection.task",
    },
)
