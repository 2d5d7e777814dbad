"""With masked padding an image has the features that it has alone."""

import copy

import pytest
import torch

from lambda_det.modeling.padding import image_area
from tests.export.tiny import scramble
from tests.modeling.small import DESIGNS, small_network


def _network(design="rs", **options):
    """In float64, in evaluation mode."""
    torch.manual_seed(0)
    options = {"scope": 7, "mask_padding": True, **options}
    return scramble(small_network(design, **options)).double().eval()


def test_image_area_is_the_image():
    images = torch.zeros(2, 3, 8, 10)
    images[0, :, :5, :7] = torch.randn(3, 5, 7)
    images[0, :, 2, :] = 0  # a row of zeros inside the image is not padding
    images[1] = torch.randn(3, 8, 10)
    area = image_area(images)
    assert area.shape == (2, 1, 8, 10)
    assert area[0, 0, :5, :7].all() and area[0].sum() == 35 and area[1].all()


@torch.no_grad()
def test_an_image_of_zeros_is_no_padding():
    images = torch.zeros(1, 3, 64, 64, dtype=torch.float64)
    masked, without = _network()(images), _network(mask_padding=False)(images)
    assert all(feature.isfinite().all() for feature in masked.values())
    torch.testing.assert_close(masked, without)


@torch.no_grad()
def _alone_and_in_a_batch(model):
    """Features of one image alone, and beside a larger one."""
    torch.manual_seed(2)
    image = torch.randn(3, 97, 75).double()
    batch = torch.zeros(2, 3, 160, 192, dtype=torch.float64)
    batch[0, :, :97, :75] = image
    batch[1] = torch.randn(3, 160, 192)
    return model(image[None]), model(batch)


def _reach(alone, inside, stride):
    """How many positions from the padding's border the features still differ by over 1e-4."""
    rows, columns = -(-97 // stride), -(-75 // stride)
    alone, inside = alone[0, :, :rows, :columns], inside[0, :, :rows, :columns]
    assert alone.isfinite().all()
    different = (inside - alone).abs().amax(0) > 1e-4 * alone.abs().max()
    y, x = different.nonzero(as_tuple=True)
    return int(torch.minimum(rows - y, columns - x).max()) if len(y) else 0


@pytest.mark.parametrize("options", [{}, {"dilation": {"res4": 2, "res5": 4}, "norm": "FrozenBN"}])
@pytest.mark.parametrize("design", DESIGNS)
def test_features_are_those_of_the_image_alone(design, options):
    model = _network(design, **options)
    alone, inside = _alone_and_in_a_batch(model)
    for feature, shape in model.output_shape().items():
        assert _reach(alone[feature], inside[feature], shape.stride) == 0
    alone, inside = _alone_and_in_a_batch(_network(design, mask_padding=False, **options))
    stride = model.output_shape()["res5"].stride
    assert _reach(alone["res5"], inside["res5"], stride) >= 3  # to the first row and column


@pytest.mark.parametrize("mask_padding", [False, True])
def test_blocks_that_are_computed_again_change_nothing(mask_padding):
    """Activation checkpointing computes blocks in the backward pass, here after another batch.

    They see the padding of their own batch, and draw the same numbers for their stochastic depth.
    """
    first, second = (torch.randn(4, 3, 64, 64).double() for _ in range(2))
    first[:, :, 40:], second[:, :, :, 20:] = 0, 0
    results = []
    for again in (False, True):
        options = {"checkpoint_activations": again, "stochastic_depth": 0.5}
        model = _network(mask_padding=mask_padding, **options).train()
        torch.manual_seed(1)
        loss = sum(y.square().mean() for y in model(first).values())
        model(second)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        results.append(gradients | dict(model.named_buffers()))
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, msg=f"{name}: {{}}".format)


@torch.no_grad()
def test_a_copy_has_a_mask_of_its_own():
    model = _network()
    images = torch.randn(1, 3, 64, 64).double()
    images[:, :, 33:] = 0
    expected = model(images)
    other = copy.deepcopy(model)
    assert other.padding is not model.padding
    other(torch.randn(1, 3, 32, 32).double())
    torch.testing.assert_close(other(images), expected)
