"""Parameters and multiply-adds of the networks, counted from shapes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lambda_det.layers import LambdaLayer
from lambda_det.modeling.build import Classifier, create_classifier
from lambda_det.modeling.resnet import LambdaResNet
from lambda_det.modeling.specs import STAGES, ResNetSpec, get_spec


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
    r = layer.position.offsets(height, width).shape[-2:].numel()
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
        repeats: how often parts of the model count, which stand for several; once if not named.
    """
    times = dict.fromkeys(model.modules(), 1)
    for part, number in (repeats or {}).items():
        times |= dict.fromkeys(part.modules(), number)
    counts = [0, 0]

    def count_conv(conv: nn.Conv2d, inputs: tuple[Tensor], output: Tensor) -> None:
        per_output = conv.in_channels // conv.groups * conv.kernel_size[0] * conv.kernel_size[1]
        for index in range(2):
            counts[index] += output.numel() * per_output * times[conv]

    def count_linear(linear: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> None:
        for index in range(2):
            counts[index] += output.numel() * linear.in_features * times[linear]

    def count_lambda(layer: LambdaLayer, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for index, count in enumerate(lambda_multiply_adds(layer, *output.shape[-2:])):
            counts[index] += count * times[layer]

    def count_other(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if hasattr(layer, "multiply_adds"):
            for index in range(2):
                counts[index] += layer.multiply_adds(*output.shape[-2:]) * times[layer]

    counters = {
        nn.Conv2d: count_conv,
        nn.Linear: count_linear,
        LambdaLayer: count_lambda,
        nn.Module: count_other,
    }
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
    holders = {p: module for module in model.modules() for p in module.parameters(recurse=False)}
    return Complexity(sum(p.numel() * times[m] for p, m in holders.items()), *counts)


def measure_named(name: str, image_size: int) -> Complexity:
    """The same of the classifier of that name with 1000 classes, in a fraction of the time.

    Of the equal blocks of a stage only one is built.

    Raises:
        ConfigError: there is no such network.
    """
    spec = get_spec(name)
    with _ShapesOnly(), torch.device("meta"):
        if not isinstance(spec, ResNetSpec):
            return measure(create_classifier(name), image_size)
        short, numbers = _without_repeats(spec)
        network = LambdaResNet(short, num_classes=1000)
        blocks = [block for stage in network.stages for block in stage]
        repeats = dict(zip(blocks, itertools.chain(*numbers), strict=True))
        return measure(Classifier(network), image_size, repeats)


def _without_repeats(spec: ResNetSpec) -> tuple[ResNetSpec, list[list[int]]]:
    """The network with one block of each kind in a stage, and how many each of them stands for."""
    numbers, lambda_blocks = [], {}
    for name, blocks in zip(STAGES, spec.blocks, strict=True):
        # The first block differs from the others by its stride and its shortcut
        kinds = [(b == 1, spec.has_lambda(name, b)) for b in range(1, blocks + 1)]
        distinct = sorted(set(kinds), reverse=True)
        numbers.append([kinds.count(kind) for kind in distinct])
        lambda_blocks[name] = tuple(i for i, (_, has) in enumerate(distinct, 1) if has)
    return replace(spec, blocks=tuple(map(len, numbers)), lambda_blocks=lambda_blocks), numbers


_LEFT_OUT = {"batch_norm", "kaiming_normal_", "kaiming_uniform_", "normal_", "uniform_"}
_LEFT_OUT |= {"add_", "relu", "relu_", "sigmoid", "silu", "zero_", "zeros_"}


class _ShapesOnly(TorchFunctionMode):
    """Leaves out what changes no shape, which takes most of the time on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _LEFT_OUT:
            return args[0] if args else kwargs["tensor"]  # as torch.nn.init calls it
        return func(*args, **kwargs)
