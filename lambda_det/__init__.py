"""LambdaNetworks (Bello, ICLR 2021) for Detectron2.

Importing this package registers the backbones with Detectron2. The names in ``__all__`` are what
other projects use; docs/use_in_your_project.md has examples.
"""

import sys
import warnings

# The doctor must run where PyTorch or Detectron2 cannot be imported, and where Python is older than
# 3.10, which has no orig_argv.
_COMMAND = " ".join(getattr(sys, "orig_argv", ["-m lambda_det.doctor"]))
if "-m lambda_det.doctor" not in _COMMAND and "-mlambda_det.doctor" not in _COMMAND:
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
        from lambda_det.detection.config_files import detectron2_config, get_config
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
    "add_lambda_config",
    "convert_lambda_layers",
    "create_backbone",
    "create_classifier",
    "detectron2_config",
    "get_config",
    "list_models",
]
