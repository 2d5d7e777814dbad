"""LambdaResNet and its relatives as Detectron2 backbones.

The names below are imported when they are asked for: the table of networks needs no PyTorch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lambda_det.modeling.build import (
        Classifier,
        build_lambda_resnet_backbone,
        build_lambda_resnet_deeplab_backbone,
        build_lambda_resnet_fpn_backbone,
        build_retinanet_lambda_resnet_fpn_backbone,
        create_backbone,
        create_classifier,
    )
    from lambda_det.modeling.mobilenet import MobileNetV2
    from lambda_det.modeling.resnet import LambdaResNet
    from lambda_det.modeling.specs import list_models

__all__ = [
    "Classifier",
    "LambdaResNet",
    "MobileNetV2",
    "build_lambda_resnet_backbone",
    "build_lambda_resnet_deeplab_backbone",
    "build_lambda_resnet_fpn_backbone",
    "build_retinanet_lambda_resnet_fpn_backbone",
    "create_backbone",
    "create_classifier",
    "list_models",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        for home in ("specs", "build", "resnet", "mobilenet"):
            module = importlib.import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
