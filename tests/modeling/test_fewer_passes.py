"""What is computed in fewer passes on a GPU is what the modules compute."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lambda_det.modeling import common, fewer_passes, resnet
from lambda_det.modeling.common import SqueezeExcitation
from lambda_det.modeling.fewer_passes import Rescale, convolve_averages, rescale, rescale_gradients
from lambda_det.modeling.resnet import Bottleneck, LambdaResNet
from lambda_det.modeling.specs import ResNetSpec
from tests.modeling.pretended_gpu import Trace, is_available, pretend_gpu

LAYOUTS = (torch.contiguous_format, torch.channels_last)
on_a_pretended_gpu = pytest.mark.skipif(not is_available(), reason="not with this PyTorch")


def gradients(y, grad, inputs):
    return torch.autograd.grad(y, inputs, grad)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(1, 1), (2, 3)])
def test_squeeze_and_excitation_in_few_passes(size, layout):
    torch.manual_seed(0)
    se = SqueezeExcitation(8).double()
    nn.init.normal_(se.reduce.bias)
    nn.init.normal_(se.expand.bias)
    x = torch.randn(2, 8, *size).double().to(memory_format=layout).requires_grad_()
    inputs = (x, *se.parameters())
    y, grad = rescale(x, se.reduce, se.expand), torch.randn(x.shape).double()
    torch.testing.assert_close(y, se(x))
    torch.testing.assert_close(gradients(y, grad, inputs), gradients(se(x), grad, inputs))
    parameters = se.reduce.weight, se.reduce.bias, se.expand.weight, se.expand.bias
    assert torch.autograd.gradcheck(Rescale.apply, (x, *parameters))
    assert torch.autograd.gradgradcheck(Rescale.apply, (x, *parameters))
    grad = grad.to(memory_format=layout)
    for one in (y, gradients(y := rescale(x, se.reduce, se.expand), grad, x)[0]):
        assert one.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_squeeze_and_excitation_in_16_bits(dtype):
    """Its errors are those of one rounding, and no sum leaves the range of float16."""
    torch.manual_seed(0)
    se = SqueezeExcitation(8)
    for size, mean in ((5, 0.0), (64, 200.0)):
        x = (torch.randn(2, 8, size, size) + mean).to(dtype).requires_grad_()
        se.reduce.weight.data /= 1 + mean
        wide = x.detach().double().requires_grad_()
        exact = copy.deepcopy(se).double()
        with torch.autocast("cpu", dtype):
            y = rescale(x, se.reduce, se.expand)
        grad = torch.rand(x.shape).to(dtype)  # of one sign, so that sums are large
        found = gradients(y, grad, (x, *se.parameters()))
        expected = gradients(exact(wide), grad.double(), (wide, *exact.parameters()))
        assert y.dtype == found[0].dtype == dtype and found[1].dtype == torch.float32
        limit = 4 * torch.finfo(dtype).eps
        for one, right in zip((y, *found), (exact(wide), *expected), strict=True):
            assert (one - right).norm() <= limit * right.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(1, 1), (1, 4), (2, 2), (6, 4), (5, 8), (6, 3), (7, 5)])
def test_a_convolution_of_averages(size, layout):
    torch.manual_seed(0)
    pool = nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False)
    x = torch.randn(2, 8, *size).double().to(memory_format=layout).requires_grad_()
    weight = torch.randn(16, 8, 1, 1).double().requires_grad_()
    bias = torch.randn(16).double().requires_grad_()
    y, expected = convolve_averages(x, weight, bias), F.conv2d(pool(x), weight, bias)
    torch.testing.assert_close(y, expected)
    assert y.is_contiguous(memory_format=layout)
    grad, inputs = torch.randn(y.shape).double(), (x, weight, bias)
    torch.testing.assert_close(gradients(y, grad, inputs), gradients(expected, grad, inputs))
    torch.testing.assert_close(convolve_averages(x, weight), F.conv2d(pool(x), weight))


def small_network():
    spec = ResNetSpec((1, 1, 2, 1), "rs", se_stages=("res2", "res4"), lambda_blocks={"res4": (1,)})
    torch.manual_seed(0)
    network = LambdaResNet(spec, out_features=["res2", "res5"], scope=5)
    for name, parameter in network.named_parameters():
        if name.endswith("norm.weight"):  # otherwise the residual branches are 0
            nn.init.uniform_(parameter, 0.5, 1.5)
    return network


@pytest.mark.slow
def test_a_network_computes_the_same(monkeypatch):
    network = small_network().double()
    other = copy.deepcopy(network)
    x, calls = torch.randn(2, 3, 97, 70).double(), []
    features = network(x)
    for module, name in ((common, "can_join"), (resnet, "can_join_pooling")):
        monkeypatch.setattr(module, name, lambda *inputs, name=name: calls.append(name) or True)
    found = other(x)
    assert calls.count("can_join") == calls.count("can_join_pooling") == 3
    torch.testing.assert_close(found, features)
    for maps in (features, found):
        sum(one.pow(3).mean() for one in maps.values()).backward()
    for one, expected in zip(other.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(one.grad, expected.grad)
    torch.testing.assert_close(other.state_dict(), network.state_dict())


class Passes(Trace):
    """Counts maps of a number of elements that are read or written."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.count = elements, 0

    def called(self, func, args, kwargs, result):
        before = self.launches
        super().called(func, args, kwargs, result)
        if self.launches > before:
            tensors = [x for x in (*args, result) if isinstance(x, torch.Tensor)]
            self.count += sum(x.numel() == self.elements for x in tensors)


@on_a_pretended_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_launches_and_passes_of_squeeze_and_excitation(dtype):
    with pretend_gpu(), torch.device("cuda"):
        se = SqueezeExcitation(64)
        x = torch.empty(4, 64, 12, 10, dtype=dtype).to(memory_format=torch.channels_last)
        with Passes(x.numel()) as forward, torch.autocast("cuda", torch.bfloat16):
            y = se(x)
        inner = [torch.empty(4, n) for n in (64, 16, 64)]
        inputs = x, se.reduce.weight, se.reduce.bias, se.expand.weight, se.expand.bias
        with Passes(x.numel()) as backward:
            found = rescale_gradients(torch.empty_like(y), *inputs, *inner)
    assert forward.launches <= 7 and backward.launches <= 14
    assert forward.count <= 3 and backward.count <= 6
    for one, gradient in zip((x, *inputs[1:]), found, strict=True):
        assert gradient.shape == one.shape and gradient.dtype == one.dtype
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert not forward.waits and not backward.waits


def operators(module, x, dtype=torch.bfloat16):
    with Trace() as trace, torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        module(x)
    return trace.operators


@on_a_pretended_gpu
def test_where_the_shortcut_is_one_convolution():
    with pretend_gpu(), torch.device("cuda"):
        block, pooling = Bottleneck(64, 128, bottleneck_channels=16, stride=2), "aten::avg_pool2d"
        x = torch.empty(2, 64, 9, 8, dtype=torch.bfloat16)
        assert pooling not in operators(block, x)
        assert pooling in operators(block, x.float(), torch.float32)  # whose products take longer
        hook = block.shortcut_pool.register_forward_hook(lambda *called: None)
        assert pooling in operators(block, x)
        hook.remove()
        block.shortcut = nn.Conv2d(64, 128, 1)  # another project's
        assert pooling in operators(block, x)


@on_a_pretended_gpu
def test_hooks_and_other_modules_see_their_maps():
    called = []
    with pretend_gpu(), torch.device("cuda"):
        x = torch.empty(2, 64, 9, 8)
        for name in ("squeeze", "reduce", "expand"):
            se = SqueezeExcitation(64)
            operators(se, x)
            getattr(se, name).register_forward_hook(lambda *_, name=name: called.append(name))
            operators(se, x)
        se = SqueezeExcitation(64)
        se.reduce = nn.Sequential(nn.Conv2d(64, 16, 1), nn.SiLU())
        assert "aten::silu" in operators(se, x)
    assert called == ["squeeze", "reduce", "expand"]


@pytest.mark.filterwarnings("ignore:.*jit.trace")
def test_recorded_and_transformed_networks_keep_their_modules(monkeypatch):
    x, found = torch.randn(1, 4, 2, 2), []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    def look(x):
        found.append(fewer_passes.can_join(x))
        return x

    look(x)
    torch.func.grad(lambda x: look(x).sum())(x)
    torch.jit.trace(look, x, check_trace=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    look(x)
    assert found == [True, False, False, False]
