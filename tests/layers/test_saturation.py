"""Numbers that would leave the range of their dtype: finite, and right as far as they can be."""

import pytest
import torch

from lambda_det.layers import LambdaLayer
from lambda_det.layers.exporting import exporting
from lambda_det.layers.functional import apply_lambda, masked_content_output
from lambda_det.layers.local import IMPLEMENTATIONS, compiled, fused, local_position_output
from lambda_det.layers.saturation import RUNAWAY, limit, saturate, saturated

from . import reference

LARGEST = 65504.0
TWO_STEPS = ("query_first", "compiled", "portable", "fused")  # scores stay small, sums are float32


def _inputs(scale, size=(1, 9, 11), heads=2, k=8, v=5, scope=(5, 7)):
    queries = torch.randn(*size, heads, k).half()
    values = (scale * torch.randn(*size, v, 1)).half()
    return queries, values, torch.randn(k, 1, *scope).half()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_float16_position_outputs_end_at_its_largest_number(name):
    inputs = _inputs(2e4)
    for module in (compiled, fused):
        reason = module.unsupported(*inputs)
        if reason and module.__name__.endswith(name):
            pytest.skip(reason)
    expected = reference.local_position_output(*(x.double() for x in inputs))
    assert expected.abs().max() > 4 * LARGEST and (expected.abs() < LARGEST).any()
    output = local_position_output(*inputs, name)
    assert output.dtype is torch.float16 and output.isfinite().all()
    if name in TWO_STEPS:
        expected = expected.clamp(-LARGEST, LARGEST)
        torch.testing.assert_close(output.double(), expected, rtol=5e-3, atol=500)


@pytest.mark.parametrize("name", ["query_first", "conv", "depthwise", "dense", "portable"])
def test_intermediate_numbers_that_leave_float16_make_no_nan(name):
    queries, values, embedding = _inputs(6e4)
    queries, values = (x.clamp(-LARGEST, LARGEST) for x in (3e4 * queries, values))
    output = local_position_output(queries, values, embedding, name)
    assert output.isfinite().all()
    assert (output.abs() == LARGEST).any()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_nan_is_not_hidden(name):
    inputs = _inputs(1.0)
    if (
        name in ("compiled", "fused")
        and IMPLEMENTATIONS[name]
        and (compiled.unsupported(*inputs) if name == "compiled" else fused.unsupported(*inputs))
    ):
        pytest.skip("it cannot run here")
    inputs[1][0, 4, 5] = torch.nan
    assert local_position_output(*inputs, name).isnan().any()


def test_other_dtypes_are_left_alone():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.tensor([1e30, -torch.inf, torch.nan, 1.0], dtype=dtype)
        assert saturate(x) is x
        torch.testing.assert_close(saturated(x, torch.float32), x.float(), equal_nan=True)
    x = torch.tensor([1e30, -torch.inf, torch.nan, 1.0])
    expected = torch.tensor([LARGEST, -LARGEST, torch.nan, 1.0])
    torch.testing.assert_close(saturated(x, torch.float16).float(), expected, equal_nan=True)
    torch.testing.assert_close(saturate(x.half()).float(), expected, equal_nan=True)


def test_gradients_pass_where_numbers_were_saturated():
    weight = torch.tensor([3e4, 1.0], dtype=torch.float16, requires_grad=True)
    y = saturate(weight * 4)
    assert y.tolist() == [LARGEST, 4.0]
    y.sum().backward()
    assert weight.grad.tolist() == [4.0, 4.0]


def test_the_limit_of_evaluation():
    x = torch.tensor([1e30, -1e30, 2.0], requires_grad=True)
    y = limit(1 * x)
    assert y.tolist() == [RUNAWAY, -RUNAWAY, 2.0]
    y.sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 1.0]
    with torch.no_grad():
        product = 1 * x
        assert limit(product) is product


@pytest.mark.parametrize("graph", [False, True], ids=["run", "export"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"content": False},
        {"scope": None},
        {"intra_depth": 2},
        {"multi_head": True},
        {"dilation": 2},
        {"key_norm": "none"},
        {"scope": None, "map_size": (12, 12)},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_layer_of_large_inputs_is_finite(dtype, options, graph):
    layer = LambdaLayer(16, **{"scope": 7, **options}).to(dtype).eval()
    x = (1e4 * torch.randn(1, 16, 9, 7)).to(dtype)
    with torch.no_grad():
        if not graph:
            y = layer(x)
            assert y.dtype is dtype
        else:
            with exporting():
                y = layer(x)
    assert y.isfinite().all()
    if dtype is torch.float16 and "scope" not in options:
        assert (y.abs() == LARGEST).any()


def test_content_outputs_of_large_numbers_are_finite():
    queries, values = torch.full((1, 3, 2, 4), 300.0).half(), torch.full((1, 3, 5, 1), 6e4).half()
    keys = torch.full((1, 3, 4, 1), 6e4).half()
    y = apply_lambda(queries, torch.full((1, 4, 5), 1e9))
    assert (y == LARGEST).all()
    mask = torch.ones(3, 3, dtype=torch.bool)
    for kind in ("softmax", "l2", "none"):
        assert masked_content_output(queries, keys, values, mask, kind).isfinite().all()
