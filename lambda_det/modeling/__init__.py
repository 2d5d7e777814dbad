"""LambdaResNet and its relatives as Detectron2 backbones."""

from lambda_det.modeling.build import (
    Classifier,
    LambdaRes5ROIHeads,
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
    "LambdaRes5ROIHeads",
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
