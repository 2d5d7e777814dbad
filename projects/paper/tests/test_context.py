"""Context weights against the layer, its derivative and the definition; receptive fields."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lambda_det.layers import LambdaLayer
from lambda_paper.context import Context, effective_positions, radius, receptive_field
from tests.layers import reference

VARIANTS = {
    "local": {},
    "rectangular scope": {"scope": (3, 7)},
    "scope beyond the map": {"scope": 15},
    "global": {"scope": None, "map_size": (7, 8)},
    "content": {"scope": None},
    "position": {"content": False},
    "intra-depth": {"intra_depth": 3},
    "multi-head": {"multi_head": True, "intra_depth": 2},
    "l2 keys": {"key_norm": "l2"},
    "plain keys": {"key_norm": "none"},
    "query softmax": {"query_softmax": True},
    "without norm": {"norm": ""},
    "dilated": {"dilation": 2, "intra_depth": 2},
    "dilated beyond the map": {"dilation": 4, "scope": 7},
}


def make(**options):
    """A layer with norms that do something, and an input of an odd size."""
    layer = LambdaLayer(12, 8, **{"query_depth": 5, "heads": 4, "scope": 5, **options})
    for norm in (layer.query_norm, layer.value_norm):
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
            torch.nn.init.uniform_(norm.weight, 0.5, 2)
            torch.nn.init.uniform_(norm.bias)
    return layer.double().eval(), torch.randn(2, 12, 5, 7, dtype=torch.float64)


def parts(context, y, x):
    both = (context.content_weights(y, x), context.position_weights(y, x))
    return [weights for weights in both if weights is not None]


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_weights_times_values_are_the_output_of_the_layer(options):
    layer, x = make(**options)
    expected = layer(x)
    context = Context(layer, x)
    for place in ((0, 0), (2, 3), (4, 6)):
        y = context.output(sum(parts(context, *place)))
        torch.testing.assert_close(y, expected[..., place[0], place[1]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_weights_are_the_derivative_of_the_output_by_the_values(options):
    layer, x = make(**options)
    place = (1, 4)
    context = Context(layer, x)
    weights = sum(parts(context, *place))  # [B, heads, u, H, W]
    given = {}

    def replace(module, inputs, output):
        given["values"] = output.detach().requires_grad_()
        return given["values"]

    layer.value_norm.register_forward_hook(replace)
    output = layer(x)[:, :, place[0], place[1]].unflatten(1, (4, -1))  # [B, h, v]
    groups, depth = layer.heads if layer.multi_head else 1, layer.value_depth
    for head in range(4):
        group = head if groups > 1 else 0
        for channel in range(depth):
            (jacobian,) = torch.autograd.grad(
                output[:, head, channel].sum(), given["values"], retain_graph=True
            )
            jacobian = jacobian.unflatten(1, (groups, depth, -1))
            torch.testing.assert_close(jacobian[:, group, channel], weights[:, head])
            others = jacobian.clone()
            others[:, group, channel] = 0
            assert not others.any()


def test_content_and_position_are_told_apart():
    layer, x = make(intra_depth=2)
    context = Context(layer, x)
    y, column = 3, 2
    q, v = context.queries[:, 0], context.values[:, 0]  # [B, h, k, H, W], [B, v, u, H, W]
    local = reference.local_position_output(
        q.permute(0, 3, 4, 1, 2), v.permute(0, 3, 4, 1, 2), layer.position.embedding
    )[:, y, column]
    position = context.output(context.position_weights(y, column))
    torch.testing.assert_close(position, local.flatten(1))
    raw = layer.qkv(x).split(layer.rows, dim=1)[1]
    raw = raw.unflatten(1, (5, 2)).flatten(3).permute(0, 3, 1, 2)  # [B, m, k, u]
    mask = torch.ones(2, 1, 35, dtype=torch.bool)
    content = reference.content_output(
        q[..., y, column][:, None], raw, v.flatten(3).permute(0, 3, 1, 2), mask
    )
    found = context.output(context.content_weights(y, column))
    torch.testing.assert_close(found, content.flatten(1))


@pytest.mark.parametrize("options", [{}, {"multi_head": True}, {"key_norm": "l2"}])
def test_padding_gets_no_weight(options):
    layer, x = make(**options)
    mask = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    mask[0, :, :4, :5] = True
    mask[1, :, :, :6] = True
    context = Context(layer, x, mask)
    weights = sum(parts(context, 2, 3))
    assert not weights[0, :, :, 4:].any() and not weights[0, ..., 5:].any()
    assert not weights[1, ..., 6].any()
    torch.testing.assert_close(context.output(weights), layer(x, mask)[..., 2, 3])


def test_the_layer_is_left_as_it_was():
    layer, x = make()
    layer.float().train()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    context = Context(layer, x.float())
    assert context.values.dtype == torch.float64
    assert layer.training and all(p.dtype == torch.float32 for p in layer.parameters())
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_effective_positions_count_those_that_have_weight():
    weights = torch.zeros(3, 4, 5)
    weights[0] = 0.3
    weights[1, 0, 0] = 7.0
    weights[2, 1, :2] = torch.tensor([-1.0, 1.0])
    torch.testing.assert_close(effective_positions(weights), torch.tensor([20.0, 1.0, 2.0]))


# ---- receptive fields


def test_of_one_convolution_it_is_the_absolute_kernel():
    conv = nn.Conv2d(1, 1, (3, 5), padding=(1, 2)).double()
    image = torch.randn(1, 1, 9, 11, dtype=torch.float64, requires_grad=True)
    field = receptive_field(conv(image), image, (4, 6), draws=3)
    expected = torch.zeros(9, 11, dtype=torch.float64)
    expected[3:6, 4:9] = conv.weight[0, 0].abs()
    torch.testing.assert_close(field / field.max(), (expected / expected.max()).detach())


@pytest.mark.slow
def test_with_many_draws_it_tends_to_the_norm_of_the_jacobian():
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3)).double()
    image = torch.randn(1, 2, 7, 6, dtype=torch.float64, requires_grad=True)
    output = network(image)
    jacobian = torch.stack(
        [torch.autograd.grad(output[0, c, 2, 1], image, retain_graph=True)[0][0] for c in range(3)]
    )
    expected = math.sqrt(2 / math.pi) * jacobian.norm(dim=0).mean(0)
    found = receptive_field(output, image, (2, 1), draws=4000)
    torch.testing.assert_close(found, expected, rtol=0.06, atol=1e-12)


def test_the_same_seed_gives_the_same_field():
    conv = nn.Conv2d(3, 4, 3)
    image = torch.randn(1, 3, 6, 6, requires_grad=True)
    output = conv(image)
    fields = [receptive_field(output, image, (1, 1), seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(fields[0], fields[1]) and not torch.equal(fields[0], fields[2])


@pytest.mark.parametrize(
    ("share", "expected"), [(0.1, 0.0), (0.5, 0.0), (0.75, 1.0), (0.9, 2.0), (1.0, 2.0)]
)
def test_radius_is_the_distance_that_holds_the_share(share, expected):
    field = torch.zeros(7, 7)
    field[3, 3], field[3, 4], field[2, 3], field[3, 1] = 5, 2, 1, 2
    assert radius(field, (3, 3), share) == expected


def test_radius_of_nothing_is_0():
    assert radius(torch.zeros(3, 3), (1, 1), 0.5) == 0
