"""The self-attention baselines of tools/benchmark.py against loops over pairs, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lambda_det import LambdaLayer
from lambda_det.benchmarks import presets
from lambda_det.benchmarks.attention import AxialAttention, GlobalAttention, LocalAttention
from lambda_det.errors import ConfigError

HEADS = 2


def weights_of(layer, heads: int) -> list[Tensor]:
    """The projections of queries, keys and values, each [h, d, C]."""
    weight = layer.projection.weight[:, :, 0, 0]
    return [part.unflatten(0, (heads, -1)) for part in weight.chunk(3)]


def by_loops(x: Tensor, weights: list[Tensor], pairs, position) -> Tensor:
    """Attention one query at a time.

    pairs(y, x) names the context of a query; position(q, dy, dx) is its term of the logit.
    """
    batch, _, height, width = x.shape
    heads, depth, _ = weights[0].shape
    rows = []
    for b in range(batch):
        for h in range(heads):
            queries, keys, values = (torch.einsum("dc,cyx->yxd", w[h], x[b]) for w in weights)
            maps = []
            for y in range(height):
                for column in range(width):
                    q = queries[y, column] / depth**0.5
                    context = pairs(y, column)
                    logits = torch.stack(
                        [q @ keys[Y, X] + position(q, Y - y, X - column) for Y, X in context]
                    )
                    shares = logits.exp() / logits.exp().sum()
                    maps.append(
                        sum(s * values[Y, X] for s, (Y, X) in zip(shares, context, strict=True))
                    )
            output = torch.stack(maps).view(height, width, depth)
            rows.append(output.permute(2, 0, 1))
    return torch.stack(rows).view(batch, heads * depth, height, width)


def global_loops(layer: GlobalAttention, x: Tensor) -> Tensor:
    height, width = x.shape[2:]
    everything = [(Y, X) for Y in range(height) for X in range(width)]
    middle_y, middle_x = layer.rows.shape[0] // 2, layer.columns.shape[0] // 2
    return by_loops(
        x,
        weights_of(layer, HEADS),
        lambda y, column: everything,
        lambda q, dy, dx: q @ layer.rows[middle_y + dy] + q @ layer.columns[middle_x + dx],
    )


def row_loops(layer, x: Tensor) -> Tensor:
    middle = layer.columns.shape[0] // 2
    return by_loops(
        x,
        weights_of(layer, HEADS),
        lambda y, column: [(y, X) for X in range(x.shape[3])],
        lambda q, dy, dx: q @ layer.columns[middle + dx],
    )


def axial_loops(layer: AxialAttention, x: Tensor) -> Tensor:
    turned = row_loops(layer.along_column, x.transpose(2, 3)).transpose(2, 3)
    return row_loops(layer.along_row, turned)


def local_loops(layer: LocalAttention, x: Tensor) -> Tensor:
    height, width = x.shape[2:]
    reach = layer.scope // 2

    def near(y: int, column: int) -> list[tuple[int, int]]:
        rows = range(max(y - reach, 0), min(y + reach, height - 1) + 1)
        columns = range(max(column - reach, 0), min(column + reach, width - 1) + 1)
        return [(Y, X) for Y in rows for X in columns]

    def position(q: Tensor, dy: int, dx: int) -> Tensor:
        return q @ torch.cat([layer.rows[reach + dy], layer.columns[reach + dx]])

    return by_loops(x, weights_of(layer, HEADS), near, position)


KINDS = {
    "global": (lambda: GlobalAttention(8, HEADS, (4, 5)), global_loops),
    "axial": (lambda: AxialAttention(8, HEADS, (4, 5)), axial_loops),
    "local": (lambda: LocalAttention(8, HEADS, 3), local_loops),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(4, 5), (1, 3)])
def test_equals_the_sum_over_pairs(kind, size):
    make, loops = KINDS[kind]
    layer = make().double()
    x = torch.randn(2, 8, *size, dtype=torch.float64, requires_grad=True)
    learned = [x, *layer.parameters()]
    expected, found = loops(layer, x), layer(x)
    assert found.shape == x.shape
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(expected)
    for own, other in zip(
        torch.autograd.grad(found, learned, grad, allow_unused=True),
        torch.autograd.grad(expected, learned, grad, allow_unused=True),
        strict=True,
    ):
        if other is None:  # offsets that do not occur on a map of one row
            assert own is None or not own.any()
        else:
            torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GlobalAttention(6, 4, (3, 3)),
        lambda: LocalAttention(6, 2),
        lambda: LocalAttention(8, 2, 4),
    ],
)
def test_impossible_sizes_are_refused(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("name", presets.ATTENTION)
def test_attention_replaces_all_lambda_layers(name):
    layer, _, _ = presets.ATTENTION[name]
    model, (images,) = presets.make_attention(layer, 1, 64)
    kinds = [type(module) for module in model.modules()]
    assert LambdaLayer not in kinds
    assert (
        sum(kinds.count(kind) for kind in (GlobalAttention, AxialAttention, LocalAttention)) == 16
    )
    assert model.eval()(images).shape == (1, 1000)
