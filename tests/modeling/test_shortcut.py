"""The shortcut's pooling and 1x1 convolution, as one convolution where that takes a GPU less."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lambda_det.modeling import resnet
from lambda_det.modeling.resnet import Bottleneck, convolve_averages
from lambda_det.modeling.specs import ResNetSpec
from tests.layers.reference import with_gradients
from tests.modeling.pretended_gpu import Trace, is_available, pretend_gpu
from tests.modeling.small import small_network

LAYOUTS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(1, 1), (1, 4), (2, 2), (6, 4), (5, 8), (6, 3), (7, 5)])
def test_a_convolution_of_averages(size, layout):
    pool = nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False)
    x = torch.randn(2, 8, *size).double().to(memory_format=layout).requires_grad_()
    weight = torch.randn(16, 8, 1, 1).double().requires_grad_()
    bias = torch.randn(16).double().requires_grad_()
    inputs = x, weight, bias
    found = with_gradients(convolve_averages, inputs)
    expected = with_gradients(lambda x, *kernel: F.conv2d(pool(x), *kernel), inputs)
    torch.testing.assert_close(found, expected)
    assert found[0].is_contiguous(memory_format=layout)
    torch.testing.assert_close(convolve_averages(x, weight), F.conv2d(pool(x), weight))


def test_a_network_computes_the_same(monkeypatch):
    network = small_network().double()
    other, x = copy.deepcopy(network), torch.randn(2, 3, 97, 70).double()
    features = network(x)
    monkeypatch.setattr(resnet, "_is_one_convolution", lambda *inputs: True)
    torch.testing.assert_close(other(x), features)
    torch.testing.assert_close(other.state_dict(), network.state_dict())


@pytest.mark.skipif(not is_available(), reason="not with this PyTorch")
def test_where_the_shortcut_is_one_convolution(monkeypatch):
    def pools(x, dtype=torch.bfloat16):
        with Trace() as trace, torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            block(x)
        return "aten::avg_pool2d" in trace.operators

    with pretend_gpu(), torch.device("cuda"):
        block = Bottleneck(ResNetSpec((1, 1, 1, 1), width=32), "res2", 64, stride=2)
        x = torch.empty(2, 64, 9, 8, dtype=torch.bfloat16)
        assert not pools(x)
        assert pools(x.float(), torch.float32)  # whose products take longer
        for owner, name, value in (
            (torch.version, "hip", "6.4"),  # of AMD, where nobody measured it
            (torch.compiler, "is_compiling", lambda: True),
            (torch.jit, "is_tracing", lambda: True),  # perhaps for other sizes
        ):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, value)
                assert pools(x)
        hook = block.shortcut_pool.register_forward_hook(lambda *called: None)
        assert pools(x)
        hook.remove()
        block.shortcut = nn.Conv2d(64, 128, 1)  # another project's
        assert pools(x)
