"""Parameters and multiply-adds of the networks, counted from shapes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lambda_det.layers import LambdaLayer
from lambda_det.modeling.build import Classifier, create_classifier, kind_of
from lambda_det.modeling.specs import get_spec


@dataclass(frozen=True)
class Complexity:
    """Counts for one image.

    Attributes:
        params: parameters; shared parameters count once.
        multiply_adds: with the position lambdas as the paper defines them, lambda first.
        multiply_adds_query_first: the same with the query contracted first.
    """

    params: int
    multiply_adds: int
    multiply_adds_query_first: int


def lambda_multiply_adds(layer: LambdaLayer, height: int, width: int) -> tuple[int, int]:
    """Multiply-adds of a lambda layer on a map, without its projections.

    Sums over offsets that lead out of the map are counted, as they are for a convolution.

    Args:
        layer: on maps.
        height, width: of the map, in positions.

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
    r = layer.position.count_offsets(height, width, layer.dilation)
    lambda_first = groups * r * k * u * v + h * k * v
    query_first = h * r * u * (k + v)
    return content + positions * lambda_first, content + positions * query_first


def measure(
    model: nn.Module, image_size: int, repeats: Mapping[nn.Module, int] | None = None
) -> Complexity:
    """Count a model's parameters, and its multiply-adds for one square image.

    Counted are convolutions, linear layers, lambda layers, and layers with a method
    ``multiply_adds``; norms, activations and pooling are not, as is usual. The model may be on the
    meta device, where nothing is computed.

    Args:
        model: takes images [B, 3, H, W].
        image_size: side of the image.
        repeats: how often a module counts that stands for several; once if it is not in it.
    """
    times = dict.fromkeys(model.modules(), 1)
    for module, number in (repeats or {}).items():
        times |= dict.fromkeys(module.modules(), number)
    counts = [0, 0]

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, LambdaLayer):
            numbers = lambda_multiply_adds(module, *output.shape[-2:])
        elif hasattr(module, "multiply_adds"):
            numbers = [module.multiply_adds(*output.shape[-2:])] * 2
        else:  # each output of a convolution or linear layer is a sum over a row of the weight
            numbers = [output.numel() * module.weight[0].numel()] * 2
        for index, number in enumerate(numbers):
            counts[index] += number * times[module]

    counted = [
        module.register_forward_hook(count)
        for module in model.modules()
        if isinstance(module, nn.Conv2d | nn.Linear | LambdaLayer)
        or hasattr(module, "multiply_adds")
    ]
    training = model.training
    images = torch.empty(1, 3, image_size, image_size, device=next(model.parameters()).device)
    try:
        with torch.no_grad():
            model.eval()(images)
    finally:
        model.train(training)
        for hook in counted:
            hook.remove()
    holders = {p: module for module in model.modules() for p in module.parameters(recurse=False)}
    return Complexity(sum(p.numel() * times[m] for p, m in holders.items()), *counts)


def measure_named(name: str, image_size: int) -> Complexity:
    """Count the classifier of that name with 1000 classes, in a fraction of the time of
    :func:`measure`.

    Of the equal blocks of a stage only one is built, where the kind of the network says which.

    Raises:
        ConfigError: there is no such network.
    """
    spec = get_spec(name)
    kind = kind_of(spec)
    with torch.device("meta"):
        if kind.count is None:
            return measure(create_classifier(name), image_size)
        short, numbers = kind.count(spec)
        network = kind.network(short, num_classes=1000)
        blocks = [block for stage in network.stages for block in stage]
        repeats = dict(zip(blocks, itertools.chain(*numbers), strict=True))
        return measure(Classifier(network), image_size, repeats)
