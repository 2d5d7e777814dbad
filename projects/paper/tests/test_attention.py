"""The attention baselines against loops over pairs, in float64; the networks that have them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lambda_det
from lambda_det import LambdaLayer
from lambda_det.errors import ConfigError
from lambda_det.export.networks import backbone_network
from lambda_det.modeling import LambdaResNet
from lambda_det.modeling.specs import ALL, ResNetSpec, get_spec
from lambda_paper.attention import (
    AugmentedConvolution,
    AxialAttention,
    DoubleAttention,
    GlobalAttention,
    LocalAttention,
)
from tests import forked

HEADS = 2


def weights_of(layer, heads: int) -> list[Tensor]:
    """The projections of queries, keys and values, each [h, d, C]."""
    weight = layer.projection.weight[:, :, 0, 0]
    return [part.unflatten(0, (heads, -1)) for part in weight.split(layer.rows)]


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
                    seen = [values[Y, X] for Y, X in context]
                    maps.append(sum(s * v for s, v in zip(shares, seen, strict=True)))
            output = torch.stack(maps).view(height, width, -1)
            rows.append(output.permute(2, 0, 1))
    return torch.stack(rows).view(batch, -1, height, width)


def global_loops(layer: GlobalAttention, x: Tensor) -> Tensor:
    height, width = x.shape[2:]
    everything = [(Y, X) for Y in range(height) for X in range(width)]
    middle_y, middle_x = layer.y_offsets.shape[0] // 2, layer.x_offsets.shape[0] // 2
    return by_loops(
        x,
        weights_of(layer, HEADS),
        lambda y, column: everything,
        lambda q, dy, dx: q @ layer.y_offsets[middle_y + dy] + q @ layer.x_offsets[middle_x + dx],
    )


def batch_norm(x: Tensor, norm: torch.nn.BatchNorm2d) -> Tensor:
    """Of channels in the last place, with the statistics of the batch."""
    rows = x.flatten(0, -2)
    variance = (rows - rows.mean(0)).square().mean(0)
    return (x - rows.mean(0)) / (variance + norm.eps).sqrt() * norm.weight + norm.bias


def row_loops(layer, x: Tensor) -> Tensor:
    batch, _, height, width = x.shape
    rows = torch.einsum("oc,bcyx->byxo", layer.projection[0].weight[:, :, 0, 0], x)
    rows = batch_norm(rows, layer.projection[1])
    queries, keys, values = (
        part.unflatten(3, (HEADS, -1)) for part in rows.split([4, 4, 8], dim=3)
    )
    middle = layer.key_offsets.shape[0] // 2
    places = [(b, y, q) for b in range(batch) for y in range(height) for q in range(width)]
    terms = []
    for b, y, q in places:
        for k in range(width):
            query, key = queries[b, y, q] / 2**0.5, keys[b, y, k]  # [h, d] of depth 2
            of_query, of_key = (
                layer.query_offsets[middle + k - q],
                layer.key_offsets[middle + k - q],
            )
            terms.append(
                [query[h] @ key[h] for h in range(HEADS)]
                + [query[h] @ of_query for h in range(HEADS)]
                + [key[h] @ of_key for h in range(HEADS)]
            )
    terms = torch.stack([torch.stack(row) for row in terms])
    logits = batch_norm(terms, layer.logits_norm).view(len(places), width, 3, HEADS).sum(2)
    shares = logits.exp() / logits.exp().sum(1, keepdim=True)
    sums = []
    for (b, y, q), share in zip(places, shares, strict=True):
        of_values = sum(share[k, :, None] * values[b, y, k] for k in range(width))
        of_places = sum(
            share[k, :, None] * layer.value_offsets[middle + k - q] for k in range(width)
        )
        sums.append(torch.cat([of_values.flatten(), of_places.flatten()]))
    content, position = batch_norm(torch.stack(sums), layer.output_norm).chunk(2, dim=1)
    return (content + position).view(batch, height, width, -1).permute(0, 3, 1, 2)


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
        return q @ torch.cat([layer.y_offsets[reach + dy], layer.x_offsets[reach + dx]])

    return by_loops(x, weights_of(layer, HEADS), near, position)


def augmented_loops(layer: AugmentedConvolution, x: Tensor) -> Tensor:
    attended = global_loops(layer.attention, x)
    kernel, padded = layer.convolution.weight, torch.nn.functional.pad(x, (1, 1, 1, 1))
    height, width = x.shape[2:]
    convolved = sum(
        torch.einsum(
            "oi,bihw->bohw", kernel[:, :, i, j], padded[:, :, i : i + height, j : j + width]
        )
        for i in range(3)
        for j in range(3)
    )
    mixed = torch.einsum("oi,bihw->bohw", layer.output.weight[:, :, 0, 0], attended)
    return torch.cat([convolved, mixed], dim=1)


def double_loops(layer: DoubleAttention, x: Tensor) -> Tensor:
    half = layer.output.in_channels
    rows = torch.einsum("oi,bin->bon", layer.projection.weight[:, :, 0, 0], x.flatten(2))
    images = []
    for gather, give, values in rows.unflatten(1, (3, half)):
        shares = gather.exp() / gather.exp().sum(1, keepdim=True)
        lambda_ = sum(values[:, m, None] * shares[None, :, m] for m in range(x.shape[2:].numel()))
        outputs = [
            lambda_ @ (give[:, n].exp() / give[:, n].exp().sum()) for n in range(x[0, 0].numel())
        ]
        images.append(layer.output.weight[:, :, 0, 0] @ torch.stack(outputs, dim=1))
    return x + torch.stack(images).view_as(x)


KINDS = {
    "global": (lambda: GlobalAttention(8, HEADS, (4, 5)), global_loops),
    "axial": (lambda: AxialAttention(8, HEADS, (4, 5), torch.nn.BatchNorm2d), axial_loops),
    "local": (lambda: LocalAttention(8, HEADS, 3), local_loops),
    "augmented": (lambda: AugmentedConvolution(8, HEADS, (4, 5)), augmented_loops),
    "double": (lambda: DoubleAttention(8, lambda dim: torch.nn.Identity()), double_loops),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(4, 5), (1, 3)])
def test_equals_the_sum_over_pairs(kind, size):
    make, loops = KINDS[kind]
    layer = make().double()
    for norm in layer.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(norm.weight)
            torch.nn.init.normal_(norm.bias)
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
            torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_keeps_the_layout_of_its_input(kind, memory_format):
    layer = KINDS[kind][0]().to(memory_format=memory_format)
    x = torch.randn(2, 8, 4, 5).to(memory_format=memory_format)
    assert layer(x).is_contiguous(memory_format=memory_format)


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


@pytest.mark.parametrize("make", [KINDS["global"][0], KINDS["axial"][0]])
def test_a_map_larger_than_the_embeddings_is_refused(make):
    with pytest.raises(ConfigError, match="side"):
        make()(torch.randn(1, 8, 6, 5))


NETWORKS = {
    "global": GlobalAttention,
    "axial": AxialAttention,
    "local": LocalAttention,
    "augmented": AugmentedConvolution,
    "double": DoubleAttention,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_networks_train(kind):
    options = (
        {"global_context": 64} if get_spec(f"resnet50_{kind}_attention").global_context else {}
    )
    model = lambda_det.create_classifier(f"resnet50_{kind}_attention", 10, **options)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(NETWORKS[kind]) == {"augmented": 13, "double": 5}.get(kind, 16)
    assert LambdaLayer not in kinds
    model(torch.randn(2, 3, 64, 64)).logsumexp(1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "name, options",
    [
        ("local", {"scope": 5}),
        ("local", {"global_context": 64}),
        ("axial", {"heads": 4}),
        ("axial", {"mask_padding": True}),
        ("axial", {"norm": "GN"}),
        ("double", {"dilation": {"res5": 2}}),
        ("local", {"multi_grid": [1, 2, 4]}),
    ],
)
def test_options_that_attention_does_not_have(name, options):
    with pytest.raises(ConfigError):
        lambda_det.create_backbone(f"resnet50_{name}_attention", **options)


@pytest.mark.parametrize(
    ("kind", "millions"), [("local", 18.02), ("augmented", 25.79), ("double", 32.91)]
)
def test_parameters_are_those_of_the_paper(kind, millions):
    with torch.device("meta"):
        model = lambda_det.create_classifier(f"resnet50_{kind}_attention")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


@pytest.mark.parametrize(
    ("kind", "words"), [("global", "16x16"), ("axial", "to 16 "), ("augmented", "16x16")]
)
def test_global_positions_are_not_exported(kind, words):
    spec = ResNetSpec(
        (1, 1, 1, 1), width=16, lambda_blocks={"res5": ALL}, kind=kind, global_context=256
    )
    with pytest.raises(ConfigError, match=rf"res5\.0\.conv2.*{words}"):
        backbone_network(LambdaResNet(spec))


# What Detectron2 does at its import
_IN_A_PROCESS = """
from detectron2.utils import env
env._ENV_SETUP_DONE = False
env.setup_environment()
import lambda_det
print(lambda_det.list_models())
"""


@pytest.mark.slow
def test_detectron2_adds_the_networks_in_every_process(tmp_path):
    """As experiments.md has it: the environment names this module."""
    variables = {"DETECTRON2_ENV_MODULE": "lambda_paper.attention"}
    for more, expected in (({}, False), (variables, True)):
        done = forked.run(["-c", _IN_A_PROCESS], tmp_path / "printed", **more)
        assert done.returncode == 0, done.stdout
        assert ("resnet50_axial_attention" in done.stdout) == expected
