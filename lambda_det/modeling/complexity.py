"""Parameters and multiply-adds of the networks, counted by PyTorch's FlopCounterMode."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lambda_det.layers import LambdaLayer
from lambda_det.modeling.build import create_classifier


@dataclass(frozen=True)
class Complexity:
    """Counts for one image.

    Attributes:
        params: parameters; shared parameters count once.
        multiply_adds: with the position lambdas built first, as the paper defines them.
    """

    params: int
    multiply_adds: int


def measure(model: nn.Module, image_size: int) -> Complexity:
    """Count a model's parameters, and its multiply-adds for one square image.

    Counted are the products of matrices, convolutions and lambda layers; norms, activations and
    pooling are not, as is usual. Nothing is computed.

    Args:
        model: takes images [B, 3, H, W].
        image_size: side of the image.
    """
    shapes = copy.deepcopy(model).to("meta").eval()
    for module in shapes.modules():
        if isinstance(module, LambdaLayer):
            module.implementation = "query_first"
        elif isinstance(module, nn.BatchNorm2d):
            module.forward = lambda x: x  # whose shapes alone would take half of the time
    images = torch.empty(1, 3, image_size, image_size, device="meta")

    def position_output(queries: Any, values: Any, embedding: Any, **_: Any) -> int:
        """Operations, of the shapes [b, H, W, h, k], [b, H, W, v, u] and [k, u, r_y, r_x].

        They are those of building the lambda of each position first, as the paper defines it.
        Offsets that lead out of the map count, as they do for a convolution.
        """
        *positions, heads, k = queries
        *_, v, u = values
        offsets = embedding[-2] * embedding[-1] * u
        return 2 * math.prod(positions) * k * v * (offsets + heads)

    operators = {torch.ops.lambda_det.query_first: position_output}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=operators) as counter:
        shapes(images)
    params = sum(parameter.numel() for parameter in model.parameters())
    return Complexity(params, counter.get_total_flops() // 2)


def measure_named(name: str, image_size: int) -> Complexity:
    """Count the classifier of that name with 1000 classes.

    Raises:
        ConfigError: there is no such network.
    """
    with torch.device("meta"):
        model = create_classifier(name)
    return measure(model, image_size)
