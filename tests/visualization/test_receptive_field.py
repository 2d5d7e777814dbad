from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lambda_det.errors import ConfigError
from lambda_det.visualization.context import radius, receptive_field


def test_of_one_convolution_it_is_the_absolute_kernel():
    conv = nn.Conv2d(1, 1, (3, 5), padding=(1, 2)).double()
    image = torch.randn(1, 1, 9, 11, dtype=torch.float64, requires_grad=True)
    field = receptive_field(conv(image), image, (4, 6), draws=3)
    expected = torch.zeros(9, 11, dtype=torch.float64)
    expected[3:6, 4:9] = conv.weight[0, 0].abs()
    torch.testing.assert_close(field / field.max(), (expected / expected.max()).detach())


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


def test_a_position_beside_the_map_is_refused():
    image = torch.randn(1, 1, 4, 4, requires_grad=True)
    with pytest.raises(ConfigError, match=r"\(4, 0\).*4x4"):
        receptive_field(image * 2, image, (4, 0))


@pytest.mark.parametrize(
    ("share", "expected"), [(0.1, 0.0), (0.5, 0.0), (0.75, 1.0), (0.9, 2.0), (1.0, 2.0)]
)
def test_radius_is_the_distance_that_holds_the_share(share, expected):
    field = torch.zeros(7, 7)
    field[3, 3], field[3, 4], field[2, 3], field[3, 1] = 5, 2, 1, 2
    assert radius(field, (3, 3), share) == expected


def test_radius_of_nothing_is_0():
    assert radius(torch.zeros(3, 3), (1, 1), 0.5) == 0
