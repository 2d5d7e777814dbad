"""LambdaNetworks (Bello, ICLR 2021) for Detectron2.

Importing this package registers its backbones and heads with Detectron2, and nothing else. The
names in ``__all__`` are for other projects; docs/use_in_your_project.md has examples. The layers
and the networks also work without Detectron2.
"""

import contextlib
import importlib
import warnings
from typing import TYPE_CHECKING

from lambda_det.errors import reason
from lambda_det.threads import settle_threads
from lambda_det.version import __version__

__all__ = [
    "LambdaLayer",
    "LambdaResNet",
    "Predictor",
    "Run",
    "__version__",
    "accelerate",
    "add_lambda_config",
    "check",
    "convert_lambda_layers",
    "create_backbone",
    "create_classifier",
    "detectron2_config",
    "get_config",
    "list_models",
    "train",
]

if TYPE_CHECKING:
    from lambda_det.from_python import Run, check, train

settle_threads()
try:
    with warnings.catch_warnings():
        # Detectron2 scripts some functions when it is imported, which PyTorch has deprecated.
        warnings.filterwarnings("ignore", r".*torch\.jit\.script", FutureWarning)
        with contextlib.suppress(ImportError):
            # This comes before our modules, because the module of DETECTRON2_ENV_MODULE, which is
            # called here, may import them.
            import detectron2  # noqa: F401
        from lambda_det.layers import LambdaLayer, convert_lambda_layers
        from lambda_det.modeling import (
            LambdaResNet,
            create_backbone,
            create_classifier,
            list_models,
        )
    # These need Detectron2
    from lambda_det.config import add_lambda_config
    from lambda_det.cpu import accelerate
    from lambda_det.detection.config_files import detectron2_config, get_config
    from lambda_det.detection.prediction import Predictor
except Exception as error:  # a broken PyTorch or Detectron2 raises any
    _error = error
else:
    _error = None


def __getattr__(name: str) -> object:
    """Import rarely used names at their first use; raise the reason for names that cannot be
    imported.

    The import of this package must not fail: the networks work without Detectron2, and the doctor,
    which must run where nothing else does, is a part of it.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _error is None:
        return getattr(importlib.import_module("lambda_det.from_python"), name)
    raise ImportError(
        f"lambda_det.{name} cannot be imported here: {reason(_error).rstrip('.!')}. "
        f"{_advice(_error)}"
    ) from _error


def _advice(error: Exception) -> str:
    """What to do about an error of the import."""
    if "already registered" in str(error):  # as Detectron2's registries put it
        return (
            "Either lambda_det was imported before in this process and its modules were removed "
            "from sys.modules since: start Python, or the notebook's kernel, anew. Or another "
            "project has a part of this name: rename it there."
        )
    return (
        "`python -m lambda_det.doctor` lists what is missing and how to install it. Detectron2 is "
        "not on PyPI; `lambda-det doctor --install` installs it."
    )
