"""Parameters and multiply-adds of the networks, counted on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lambda_det.layers import LambdaLayer
from lambda_det.layers.functional import crop_offsets


@dataclass(frozen=True)
class Complexity:
    """Counts for one image.

    Attributes:
        params: parameters; shared ones once.
        multiply_adds: with the position lambdas as the paper defines them, lambda first.
        multiply_adds_query_first: the same with the query contracted first.
    """

    params: int
    multiply_adds: int
    multiply_adds_query_first: int


def lambda_multiply_adds(layer: LambdaLayer, height: int, width: int) -> tuple[int, int]:
    """Multiply-adds of a lambda layer on a map, without its projections.

    Sums over offsets that lead out of the map are counted, as they are for a convolution.

    Returns:
        The count with the lambda built first, and with the query contracted first.
    """
    k, h, u, v = layer.query_depth, layer.heads, layer.intra_depth, layer.value_depth
    groups = layer.heads if layer.multi_head else 1  # of heads that share a lambda
    positions = height * width
    content = 0
    if layer.content is not None:
        content = positions * (groups * k * u * v + h * k * v)
    if layer.position is None:
        return content, content
    r = crop_offsets(layer.position.embedding, height, width).shape[-2:].numel()
    lambda_first = groups * r * k * u * v + h * k * v
    query_first = h * r * u * (k + v)
    return content + positions * lambda_first, content + positions * query_first


def measure(model: nn.Module, image_size: int) -> Complexity:
    """Count a model's parameters, and its multiply-adds for one square image.

    Counted are convolutions, linear layers and lambda layers; norms, activations and pooling are
    not, as is usual. The model may be on the meta device, where nothing is computed.

    Args:
        model: takes images [B, 3, H, W].
        image_size: side of the image.
    """
    counts = [0, 0]

    def count_conv(conv: nn.Conv2d, inputs: tuple[Tensor], output: Tensor) -> None:
        per_output = conv.in_channels // conv.groups * conv.kernel_size[0] * conv.kernel_size[1]
        for index in range(2):
            counts[index] += output.numel() * per_output

    def count_linear(linear: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> None:
        for index in range(2):
            counts[index] += output.numel() * linear.in_features

    def count_lambda(layer: LambdaLayer, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for index, count in enumerate(lambda_multiply_adds(layer, *output.shape[-2:])):
            counts[index] += count

    counters = {nn.Conv2d: count_conv, nn.Linear: count_linear, LambdaLayer: count_lambda}
    hooks = [
        module.register_forward_hook(counter)
        for module in model.modules()
        for kind, counter in counters.items()
        if isinstance(module, kind)
    ]
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(
                torch.empty(1, 3, image_size, image_size, device=next(model.parameters()).device)
            )
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return Complexity(sum(p.numel() for p in model.parameters()), *counts)
