"""Counts on tensors without data, against real tensors and autograd's own engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils.checkpoint import checkpoint

from lambda_benchmarks.dry_run import Trace, backward, is_available, pretend_gpu
from lambda_benchmarks.memory import peak_memory
from lambda_det.layers import LambdaLayer
from lambda_det.layers.local.query_first import query_first_output
from lambda_det.modeling.resnet import Bottleneck

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


def test_peak_is_that_of_the_allocator():
    # Convolutions of the CPU take memory inside, which no operator shows
    network = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32), nn.Sigmoid())
    images = torch.randn(8192, 64)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    real = peak_memory(lambda: network(images).square().sum().backward(), images.device)
    trace = Trace("cpu", given=[images, *network.parameters()])
    with trace:
        trace.backward([network(images).square().sum()])
    assert trace.peak == pytest.approx(real, rel=0.01)


def test_what_autograd_keeps_goes_as_it_is_used():
    network = nn.Sequential(*(nn.Sigmoid() for _ in range(8)))
    x = torch.randn(1000, requires_grad=True)
    trace = Trace("cpu", {network: "all"}, [x])
    with trace:
        trace.backward([network(x)])
    assert trace.parts["all"].kept == 8 * 4000
    assert trace.peak <= 10.1 * 4000  # and two gradients; 16 if nothing went


def test_gradients_of_parameters_go_at_once():
    """As in the engine, which takes the nodes in the reverse of the order they were made in."""
    network = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    trace = Trace("cpu", given=network.parameters())
    with trace:
        trace.backward([network(torch.randn(1, 64))])
    assert trace.peak <= 2 * 64 * 64 * 4


def test_counts_on_a_gpu_that_is_not_there():
    with pretend_gpu(), torch.device("cuda"):
        conv = nn.Conv2d(4, 8, 1, bias=False)
        x = torch.randn(2, 4, 16, 16)
        trace = Trace("cuda", {conv: "conv"}, [x, *conv.parameters()])
        with trace:
            with torch.autocast("cuda", torch.bfloat16):
                y = conv(x)
            assert y.dtype == torch.bfloat16 and y.is_cuda
            leaves = trace.backward([y.permute(0, 2, 3, 1)])
    assert leaves == {conv.weight}
    forward = 2 * 2 * 16 * 16 * 4 * 8
    assert trace.parts["conv"].forward == trace.parts["conv"].backward == forward
    # two casts, convolution, ones as gradient, its backward pass, a cast
    assert trace.launches == 6 and not trace.waits
    # the input and the weights in bfloat16
    assert trace.parts["conv"].kept == 2 * 4 * 16 * 16 * 2 + 4 * 8 * 2


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
    # 16 tiles of 8x8 queries with 4 heads, a window of 30x30; the scores are made a second time
    queries_in_all, window = images * 1024 * 4, 30 * 30
    products = queries_in_all * (16 * 529 + window * 128)
    count = trace.parts[""]
    assert count.forward == 2 * products
    assert count.backward == 2 * queries_in_all * (3 * 16 * 529 + 2 * window * 128)
