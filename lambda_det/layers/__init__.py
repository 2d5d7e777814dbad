"""Lambda layers in pure PyTorch, without Detectron2."""

from lambda_det.layers.convert import convert_lambda_layers
from lambda_det.layers.lambda_layer import ContentLambda, LambdaLayer, RelativePosition
from lambda_det.layers.local import IMPLEMENTATIONS, local_position_output

__all__ = [
    "IMPLEMENTATIONS",
    "ContentLambda",
    "LambdaLayer",
    "RelativePosition",
    "convert_lambda_layers",
    "local_position_output",
]
