"""LambdaResNet and its relatives as backbones and classifiers."""

from lambda_det.first_use import names_of

__getattr__ = names_of(
    __name__,
    {
        "Classifier": "modeling.build",
        "create_backbone": "modeling.build",
        "create_classifier": "modeling.build",
        "MobileNetV2": "modeling.mobilenet",
        "LambdaResNet": "modeling.resnet",
        "list_models": "modeling.specs",
    },
)
