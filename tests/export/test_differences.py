"""The comparison of a file's outputs with its network's, by which exports are refused."""

import math

import pytest
import torch

from lambda_det.export.differences import TOLERANCE, alike, differences

MAP = torch.tensor([-3.0, 0.0, 2.0])


@pytest.mark.parametrize("size", [1e-20, 1e-6, 1.0, 1e20])
def test_the_size_of_a_map_does_not_matter(size):
    expected = {"map": size * MAP}
    assert alike(differences({"map": size * MAP * (1 + TOLERANCE / 2)}, expected))
    assert not alike(differences({"map": size * MAP * (1 + TOLERANCE * 2)}, expected))


def test_a_map_of_zeros_is_equal_to_zeros_only():
    expected = {"map": 0 * MAP}
    assert differences(expected, expected) == {"map": 0.0}
    assert not alike(differences({"map": 1e-20 * MAP}, expected))


def test_each_expected_output_is_compared_and_no_other():
    assert alike(differences({"map": MAP, "other": MAP}, {"map": MAP}))
    assert differences({"map": MAP}, {"map": MAP, "other": MAP}) == {"map": 0.0, "other": math.inf}
    assert not alike({})
    empty = {"map": MAP[:0]}
    assert alike(differences(empty, empty))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (MAP * math.nan, MAP),
        (MAP * math.inf, MAP),
        (MAP * math.nan, MAP * math.nan),
        (MAP * math.inf, MAP * math.inf),
        (MAP[1:], MAP),
    ],
)
def test_other_shapes_and_values_that_are_not_finite_do_not_pass(output, expected):
    assert not alike(differences({"map": output}, {"map": expected}))
