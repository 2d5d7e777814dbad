"""The CIFAR-10 reproduction's layer against a float64 loop, each difference alone; its networks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lambda_det
from lambda_det.errors import ConfigError
from lambda_det.modeling.command_line import rows
from lambda_paper.reproduction import DIFFERENCES, DelftLambda

HEADS, DEPTH, SIZE = 4, 16, (2, 3)


def normalised(x: Tensor, axes: tuple[int, ...], norm: nn.Module) -> Tensor:
    """A batch norm in training whose weights belong to the axis that is left."""
    (kept,) = set(range(x.dim())) - set(axes)
    mean = x.mean(axes, keepdim=True)
    variance = (x - mean).square().mean(axes, keepdim=True)
    shape = [-1 if axis == kept else 1 for axis in range(x.dim())]
    scaled = (x - mean) / (variance + norm.eps).sqrt()
    return scaled * norm.weight.view(shape) + norm.bias.view(shape)


def by_loops(layer: DelftLambda, x: Tensor, differences: set[str]) -> Tensor:
    """One position, and one context position of it, at a time."""
    batch, dim, height, width = x.shape
    number = height * width
    tokens = torch.empty(batch, number, dim, dtype=x.dtype)
    for n in range(number):
        if "reshape" in differences:  # n-th run of d numbers as they lie in memory
            tokens[:, n] = x.flatten(1)[:, n * dim : (n + 1) * dim]
        else:
            tokens[:, n] = x[:, :, n // width, n % width]
    of_queries, of_keys, of_values = layer.qkv.weight[:, :, 0, 0].split(layer.rows)
    queries = (tokens @ of_queries.T).unflatten(2, (HEADS, DEPTH))
    keys, values = tokens @ of_keys.T, tokens @ of_values.T
    if "queries" in differences:
        queries = normalised(queries, (0, 1, 2), layer.query_norm.norm)
    else:
        queries = normalised(queries.flatten(2), (0, 1), layer.query_norm)
        queries = queries.unflatten(2, (HEADS, DEPTH))
    if "values" in differences:
        values = normalised(values, (0, 2), layer.value_norm.norm)
    else:
        values = normalised(values, (0, 1), layer.value_norm)
    shares = keys.exp() / keys.exp().sum(1, keepdim=True)
    output = torch.zeros(batch, HEADS, dim // HEADS, number, dtype=x.dtype)
    for n in range(number):
        found = torch.zeros(batch, DEPTH, dim // HEADS, dtype=x.dtype)
        for m in range(number):
            if "pairs" in differences:
                embedding = layer.position.embedding[:, 0, n, m]
            else:
                dy, dx = m // width - n // width, m % width - n % width
                embedding = layer.position.embedding[:, 0, height - 1 + dy, width - 1 + dx]
            found += (shares[:, m] + embedding)[:, :, None] * values[:, m][:, None]
        output[..., n] = torch.einsum("bhk,bkv->bhv", queries[:, n], found)
    return output.view(x.shape)


@pytest.mark.parametrize("differences", [set(), *({name} for name in DIFFERENCES), {*DIFFERENCES}])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_each_difference_is_its_formula(differences, layout):
    torch.manual_seed(1)
    layer = DelftLambda(8, SIZE, nn.BatchNorm2d, differences).double()
    for norm in layer.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    x = torch.randn(4, 8, *SIZE, dtype=torch.float64).contiguous(memory_format=layout)
    torch.testing.assert_close(layer(x), by_loops(layer, x, differences))


def test_layers_of_one_input_size_share_their_embeddings():
    made = [lambda_det.create_classifier("resnet14_slim_lambda_delft", 10) for _ in range(2)]
    for model in made:
        layers = [m for m in model.modules() if isinstance(m, DelftLambda)]
        sizes = [layer.map_size for layer in layers]
        assert len({id(layer.position) for layer in layers}) == len(set(sizes)) < len(layers)
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    one, other = ({id(p) for p in model.parameters()} for model in made)
    assert not one & other
    with pytest.raises(ConfigError, match=r"8x8 .*16x16.*INPUT\.SIZE.*GLOBAL_CONTEXT"):
        made[0](torch.randn(2, 3, 64, 64))
    larger = lambda_det.create_classifier("resnet14_slim_lambda_delft", 10, global_context=64)
    assert larger(torch.randn(2, 3, 64, 64)).shape == (2, 10)


def test_it_has_the_article_s_number_of_parameters():
    with torch.device("meta"):
        whole = lambda_det.create_classifier("resnet50_lambda_delft", 10)
    assert sum(p.numel() for p in whole.parameters()) / 1e6 == pytest.approx(12.8, abs=0.1)


def test_info_counts_them():
    pairs, offsets = (rows([f"resnet14_slim_lambda_{kind}"], 32)[0] for kind in ("pairs", "values"))
    assert pairs[0] == "resnet14_slim_lambda_pairs" and len(pairs) == len(offsets)
