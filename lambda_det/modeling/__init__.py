"""LambdaResNet and its relatives as backbones and classifiers."""

from lambda_det.modeling.build import Classifier, create_backbone, create_classifier
from lambda_det.modeling.mobilenet import MobileNetV2
from lambda_det.modeling.resnet import LambdaResNet
from lambda_det.modeling.specs import list_models

__all__ = [
    "Classifier",
    "LambdaResNet",
    "MobileNetV2",
    "create_backbone",
    "create_classifier",
    "list_models",
]
