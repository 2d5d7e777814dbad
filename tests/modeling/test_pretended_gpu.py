"""Traces on tensors without data, against real tensors and autograd's own engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils.checkpoint import checkpoint

from lambda_det.layers import LambdaLayer
from lambda_det.layers.local.query_first import query_first_output
from lambda_det.modeling.resnet import Bottleneck
from tests.modeling.pretended_gpu import Trace, backward, is_available, pretend_gpu

pytestmark = pytest.mark.skipif(not is_available(), reason="not with this PyTorch")


class _TwoOutputs(torch.autograd.Function):
    """Takes a number before its tensors, and only one of its outputs is used."""

    @staticmethod
    def forward(ctx, factor, x, y):
        ctx.factor = factor
        return x * factor, y * factor

    @staticmethod
    def backward(ctx, grad_x, grad_y):
        return None, grad_x * ctx.factor, grad_y * ctx.factor


class _Network(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.block = Bottleneck(16, 32, bottleneck_channels=8, stride=2, se_ratio=4)
        self.layer = LambdaLayer(32, query_depth=8, scope=3, implementation="query_first")
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.conv(x)
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        first, _ = _TwoOutputs.apply(3, x, x)
        y = self.layer(first)
        return [y, (x + y).mean((2, 3))]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_walk_equals_autograd(checkpointed):
    network = _Network(checkpointed)
    images = torch.randn(2, 3, 8, 8)
    outputs = network(images)
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    found = {}
    backward(network(images), found.__setitem__)
    assert len(found) == len(list(network.parameters()))
    for parameter in network.parameters():
        torch.testing.assert_close(found[parameter], parameter.grad, rtol=1e-6, atol=1e-6)


def test_operators_on_a_gpu_that_is_not_there():
    with pretend_gpu(), torch.device("cuda"):
        conv = nn.Conv2d(4, 8, 1, bias=False)
        x = torch.randn(2, 4, 16, 16)
        with Trace() as trace:
            with torch.autocast("cuda", torch.bfloat16):
                y = conv(x)
            assert y.dtype == torch.bfloat16 and y.is_cuda
            leaves = trace.backward([y.permute(0, 2, 3, 1)])
    assert leaves == {conv.weight}
    # two casts, convolution, ones as gradient, its backward pass, a cast
    assert trace.launches == 6 and not trace.waits


def test_sees_what_the_host_waits_for():
    with pretend_gpu():
        x = torch.randn(8, device="cuda")
        for wait in (lambda: x.cpu(), lambda: torch.zeros(8).to("cuda"), lambda: x.to("cpu") + 1):
            with Trace() as trace:
                wait()
            assert trace.waits == {"aten::_to_copy": 1}
        with Trace() as trace:
            x + 2.5, x * torch.tensor(2.0), torch.arange(8, device="cuda") + 1
        assert not trace.waits
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
        with pytest.raises(DynamicOutputShapeException):
            x[x > 0]
        with pytest.raises(RuntimeError, match="cuda:0"):
            x + torch.zeros(8)


@pytest.mark.parametrize("images", [2, 16])
def test_query_first_on_a_gpu_is_a_few_kernels(images):
    """As many at any batch that is one chunk (docs/gpu.md), and the host waits for none."""
    with pretend_gpu(), torch.device("cuda"):
        queries = torch.empty(images, 32, 32, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        values = torch.empty(images, 32, 32, 128, 1, dtype=torch.bfloat16, requires_grad=True)
        embedding = torch.empty(16, 1, 23, 23, dtype=torch.bfloat16, requires_grad=True)
        with Trace() as trace:
            output = query_first_output(queries, values, embedding)
            forward = trace.launches
            trace.backward([output])
    assert forward == 10 and trace.launches - forward <= 38
    assert not trace.waits
