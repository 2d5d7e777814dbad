"""The CPU kernel: every path through its tiles, the layouts it takes and gives, its building."""

import pytest
import torch

from lambda_det.errors import ConfigError
from lambda_det.layers.local import OPERATORS, compiled, local_position_output
from lambda_det.native import has
from tests.native.test_native import INPUTS, needs_kernel

from .reference import laid_out

CHANNELS_LAST, MAPS = (0, 1, 2, 3, 4), (0, 3, 4, 1, 2)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_queries", [CHANNELS_LAST, MAPS])
@pytest.mark.parametrize("of_values", [CHANNELS_LAST, MAPS])
def test_results_are_laid_out_as_the_inputs(of_queries, of_values, dtype):
    """Output and gradient of the queries as the queries, that of the values as the values.

    A layer's own output does not show it: the sum with the content output takes that one's layout.
    """
    shapes = ((2, 5, 6, 3, 4), (2, 5, 6, 7, 2), (4, 2, 3, 5))
    orders = (of_queries, of_values, (1, 2, 0, 3))
    parts = zip(shapes, orders, strict=True)
    inputs = [laid_out(*about, dtype).requires_grad_() for about in parts]
    output = local_position_output(*inputs, "compiled")
    grad = laid_out(output.shape, (4, 3, 2, 1, 0), dtype)
    grads = torch.autograd.grad(output, inputs, grad)
    for result, order in zip(
        (output, *grads[:2]), (of_queries, of_queries, of_values), strict=True
    ):
        assert result.permute(order).is_contiguous()
    assert grads[2].is_contiguous()
    # What torch.compile is told about shapes, dtypes and strides is what comes
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPERATORS["compiled"][0], tuple(inputs), test_utils=checks)
    plain = tuple(x.detach() for x in (grad, *inputs))
    torch.library.opcheck(OPERATORS["compiled"][1], plain, test_utils=checks)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_gets_what_it_takes_and_no_more_than_it_needs(dtype, monkeypatch):
    """float16, and bfloat16 without AVX512-BF16, go to it as float32."""
    seen, call = set(), compiled.call

    def watched(name, dtype, *arguments):
        seen.update([dtype, *(x.dtype for x in arguments if isinstance(x, torch.Tensor))])
        call(name, dtype, *arguments)

    monkeypatch.setattr(compiled, "call", watched)
    inputs = [x.to(dtype).requires_grad_() for x in INPUTS]
    torch.autograd.grad(local_position_output(*inputs, "compiled").sum(), inputs)
    wide = torch.promote_types(dtype, torch.float32)
    assert seen == ({dtype, wide} if has("forward", dtype) else {torch.float32})


def test_another_device_is_named():
    with pytest.raises(ConfigError, match=r"'compiled'.*CPU.*meta"):
        local_position_output(*(x.to("meta") for x in INPUTS), "compiled")
