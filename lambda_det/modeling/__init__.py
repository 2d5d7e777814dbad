"""LambdaResNet and its relatives as Detectron2 backbones.

The names below are imported when they are asked for: the table of networks needs no PyTorch.
"""

import importlib

_HOMES = {
    "Classifier": "build",
    "LambdaRes5ROIHeads": "build",
    "LambdaResNet": "resnet",
    "MobileNetV2": "mobilenet",
    "build_lambda_resnet_backbone": "build",
    "build_lambda_resnet_deeplab_backbone": "build",
    "build_lambda_resnet_fpn_backbone": "build",
    "build_retinanet_lambda_resnet_fpn_backbone": "build",
    "create_backbone": "build",
    "create_classifier": "build",
    "list_models": "specs",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
