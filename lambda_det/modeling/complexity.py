"""Parameters and multiply-adds of the networks, counted by PyTorch's FlopCounterMode."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

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


# Operations of the position output by the shapes of queries [b, H, W, h, k], values [b, H, W, v, u]
# and embedding [k, u, r_y, r_x]. Sums over offsets that lead out of the map are counted, as they
# are for a convolution.
def _lambda_first(queries: Any, values: Any, embedding: Any, **_: Any) -> int:
    *positions, heads, k = queries
    *_, v, u = values
    offsets = embedding[-2] * embedding[-1]
    return 2 * torch.Size(positions).numel() * k * v * (offsets * u + heads)


def _query_first(queries: Any, values: Any, embedding: Any, **_: Any) -> int:
    *positions, heads, k = queries
    *_, v, u = values
    offsets = embedding[-2] * embedding[-1]
    return 2 * torch.Size(positions).numel() * heads * offsets * u * (k + v)


def measure(
    model: nn.Module, image_size: int, repeats: Mapping[nn.Module, int] | None = None
) -> Complexity:
    """Count a model's parameters, and its multiply-adds for one square image.

    Counted are the products of matrices, convolutions and lambda layers; norms, activations and
    pooling are not, as is usual. Nothing is computed.

    Args:
        model: takes images [B, 3, H, W].
        image_size: side of the image.
        repeats: how often a module counts that stands for several; once if it is not in it.
    """
    repeats = repeats or {}
    times = dict.fromkeys(model.parameters(), 1)
    for module, number in repeats.items():
        times |= dict.fromkeys(module.parameters(), number)
    names = {name: repeats[module] for name, module in model.named_modules() if module in repeats}
    shapes = copy.deepcopy(model).to("meta").eval()
    for module in shapes.modules():
        if isinstance(module, LambdaLayer):
            module.implementation = "query_first"
    images = torch.empty(1, 3, image_size, image_size, device="meta")

    def count(formula: Callable[..., int]) -> int:
        operators = {torch.ops.lambda_det.query_first: formula}
        counter = FlopCounterMode(display=False, custom_mapping=operators)
        with torch.no_grad(), counter:
            shapes(images)
        by_module, root = counter.get_flop_counts(), type(shapes).__name__
        more = (
            (number - 1) * sum(by_module[f"{root}.{name}"].values())
            for name, number in names.items()
        )
        return (counter.get_total_flops() + sum(more)) // 2

    params = sum(parameter.numel() * number for parameter, number in times.items())
    return Complexity(params, count(_lambda_first), count(_query_first))


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
