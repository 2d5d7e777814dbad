"""LambdaNetworks (Bello, ICLR 2021) for Detectron2.

Importing this package registers the backbones with Detectron2. The names in ``__all__`` are what
other projects use; docs/use_in_your_project.md has examples. Those of detectors are imported when
they are asked for, so that the import takes no longer than Detectron2's own.
"""

import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lambda_det.detection.config_files import detectron2_config, get_config
    from lambda_det.prediction import Predictor

_HOMES = {
    "Predictor": "prediction",
    "detectron2_config": "detection.config_files",
    "get_config": "detection.config_files",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def _must_be_light() -> bool:
    """Whether this process must do without PyTorch and Detectron2.

    The doctor must run where they cannot be imported, and where Python is older than 3.10, which
    has no orig_argv. The tools of this repository must answer --help without seconds of imports,
    and model_info.py prints figures that are counted already.
    """
    command = getattr(sys, "orig_argv", ["-m", "lambda_det.doctor"])
    if "-m lambda_det.doctor" in " ".join(command) or "-mlambda_det.doctor" in command:
        return True
    if command[-3:-1] == ["-m", "lambda_det.run"] and command[-1] in ("-h", "--help"):
        return True
    tools = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tools")
    folder, tool = os.path.split(os.path.abspath(sys.argv[0] if sys.argv else ""))
    asks_for_help = not {"-h", "--help"}.isdisjoint(sys.argv)
    return folder == tools and (asks_for_help or tool == "model_info.py")


if not _must_be_light():
    try:
        import detectron2  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "lambda_det needs Detectron2, which is not on PyPI; in the lambda_det repository "
            "`python tools/install_detectron2.py` installs it, and `python -m lambda_det.doctor` "
            "lists what else is missing."
        ) from error

    with warnings.catch_warnings():
        # Detectron2 scripts some functions when it is imported, which PyTorch has deprecated.
        warnings.filterwarnings("ignore", r".*torch\.jit\.script", FutureWarning)
        from lambda_det.config import add_lambda_config
        from lambda_det.detection import heads as _heads  # noqa: F401
        from lambda_det.export.public import register_public_weights
        from lambda_det.layers import LambdaLayer, convert_lambda_layers
        from lambda_det.modeling import (
            LambdaResNet,
            create_backbone,
            create_classifier,
            list_models,
        )

    register_public_weights()

__version__ = "0.1.0"
__all__ = [
    "LambdaLayer",
    "LambdaResNet",
    "Predictor",
    "add_lambda_config",
    "convert_lambda_layers",
    "create_backbone",
    "create_classifier",
    "detectron2_config",
    "get_config",
    "list_models",
]
