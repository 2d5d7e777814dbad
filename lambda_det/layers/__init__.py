"""Lambda layers in pure PyTorch, without Detectron2."""

from lambda_det.layers.lambda_layer import LambdaLayer
from lambda_det.layers.local import IMPLEMENTATIONS, local_position_output
from lambda_det.layers.position import RelativePosition

__all__ = ["IMPLEMENTATIONS", "LambdaLayer", "RelativePosition", "local_position_output"]
