"""LambdaNetworks (Bello, ICLR 2021) for Detectron2.

Importing this package registers its backbones and heads with Detectron2, and nothing else: at once
where Detectron2's networks are imported already, or else as soon as somebody imports them. PyTorch
and Detectron2 are imported at the first use of a name, so the command line answers without them.
The names in ``__all__`` are for other projects; docs/use_in_your_project.md has examples. The
layers and the networks also work without Detectron2.
"""

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from lambda_det.errors import importing_detectron2, reason
from lambda_det.first_use import names_of
from lambda_det.process import settle_threads
from lambda_det.version import __version__

if TYPE_CHECKING:
    from lambda_det.config import add_lambda_config
    from lambda_det.cpu import accelerate
    from lambda_det.detection.config_files import detectron2_config, get_config
    from lambda_det.detection.prediction import Predictor
    from lambda_det.from_python import Run, check, train
    from lambda_det.layers import LambdaLayer, convert_lambda_layers
    from lambda_det.modeling.build import create_backbone, create_classifier
    from lambda_det.modeling.resnet import LambdaResNet
    from lambda_det.modeling.specs import list_models

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

_first_use = names_of(
    __name__,
    {
        "LambdaLayer": "layers",
        "convert_lambda_layers": "layers",
        "LambdaResNet": "modeling",
        "create_backbone": "modeling",
        "create_classifier": "modeling",
        "list_models": "modeling",
        "add_lambda_config": "config",
        "accelerate": "cpu",
        "detectron2_config": "detection.config_files",
        "get_config": "detection.config_files",
        "Predictor": "detection.prediction",
        "Run": "from_python",
        "check": "from_python",
        "train": "from_python",
    },
)
_NETWORKS = "detectron2.modeling"  # which has the registries
_refusals: list[Exception] = []  # of these registries


def __getattr__(name: str) -> object:
    """Import a name, or a module of this package, at its first use.

    The import of this package must not fail: the networks work without Detectron2, and the doctor,
    which must run where nothing else does, is a part of it.
    """
    if name not in __all__:
        return _first_use(name)
    try:
        if _refusals:
            raise _refusals[0]
        return _first_use(name)
    except Exception as error:  # a broken PyTorch or Detectron2 raises any
        raise ImportError(
            f"lambda_det.{name} cannot be imported here: {reason(error).rstrip('.!')}. "
            "`python -m lambda_det.doctor` lists what is missing and how to install it. Detectron2 "
            "is not on PyPI; `lambda-det doctor --install` installs it."
        ) from error


class _WithDetectron2(MetaPathFinder):
    """Finds Detectron2's networks as others do, and registers our parts behind their import."""

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _NETWORKS:
            return None
        # Of the others: it stays in its place, since who asks for a module may not import it
        others = (one for one in sys.meta_path if one is not self and hasattr(one, "find_spec"))
        specs = (one.find_spec(name, path, target) for one in others)
        spec = next(filter(None, specs), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _register()

        spec.loader.exec_module = execute_and_register
        return spec


def _register() -> None:
    """Import what is registered; where that fails, the first use of a name says why."""
    try:
        with importing_detectron2():
            importlib.import_module(f"{__name__}.modeling.backbones")
            importlib.import_module(f"{__name__}.detection.heads")
    except Exception as error:  # such as another project's part of the same name
        _refusals.append(error)


settle_threads()
if _NETWORKS in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _WithDetectron2())
