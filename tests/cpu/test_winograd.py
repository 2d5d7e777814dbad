"""Which convolutions take Winograd's way, and the bounds of its errors."""

import contextlib
import copy

import pytest
import torch
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from torch import nn
from torch.nn import functional as F
from torchvision.ops.misc import Conv2dNormActivation

from lambda_det import native
from lambda_det.cpu import winograd
from lambda_det.cpu.pooling import without_mkl
from lambda_det.cpu.winograd import use_winograd, winograd_conv2d
from tests.export.toy import scramble
from tests.layers.reference import with_gradients
from tests.native.test_native import needs_kernel

pytestmark = needs_kernel
LAST = torch.channels_last
needs_bfloat16 = pytest.mark.skipif(
    not native.has("convolve", torch.bfloat16), reason="no instructions for bfloat16"
)


def _plain(x, weight, bias=None):
    return F.conv2d(x, weight, bias, padding=1)


def _results(convolution, inputs, grad):
    return with_gradients(convolution, [x.detach().requires_grad_() for x in inputs], grad)


def _trained(model, x, grad):
    """The output, and the gradients of map and parameters."""
    inputs = [x.detach().requires_grad_(), *model.parameters()]
    return with_gradients(lambda x, *_: model(x), inputs, grad)


def _fast(model):
    """A copy, in a sequence, that takes Winograd's way."""
    fast = nn.Sequential(copy.deepcopy(model))
    use_winograd(fast)
    return fast


def _inputs(batch, channels, out, height, width):
    weight = torch.randn(out, channels, 3, 3) / (3 * channels**0.5)
    return [torch.randn(batch, channels, height, width), weight, torch.randn(out)]


def _sparse_grad(share, batch, out, *sides):
    return torch.randn(batch, out, *sides) * (torch.rand(batch, 1, *sides) < share)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "share"),
    [
        # The fewest channels and the smallest maps that are taken
        *(((11, 128, 128, 7, 7), 1), ((1, 128, 256, 32, 32), 1), ((6, 256, 256, 14, 14), 1)),
        *(((2, 128, 128, 64, 32), share) for share in (0, 0.001, 0.01, 0.1, 0.24, 0.26)),
    ],
)
def test_the_error_in_float32_is_at_most_twice_that_of_pytorch(size, share):
    """Also of gradients of which a share of the positions is not 0.

    PyTorch's own errors differ fourfold between its two layouts, and so do processors.
    """
    inputs, (batch, _, out, *sides) = _inputs(*size), size
    grad = _sparse_grad(share, batch, out, *sides)
    exact = _results(_plain, [x.double() for x in inputs], grad)
    contiguous = _results(_plain, inputs, grad)
    inputs[:2] = [x.to(memory_format=LAST) for x in inputs[:2]]
    got, last = (_results(f, inputs, grad) for f in (winograd_conv2d, _plain))
    # PyTorch 2.4 sums this gradient in another way than its convolutions, which is more exact
    turned = inputs[1].flip(2, 3).transpose(0, 1).contiguous(memory_format=LAST)
    last[1] = _plain(grad.contiguous(memory_format=LAST), turned)
    for a, true, *plain in zip(got, exact, contiguous, last, strict=True):
        assert (a - true).norm() <= 2 * max((b - true).norm() for b in plain)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("share", "value"), [(0, torch.inf), (0.01, torch.nan), (1, torch.nan)])
def test_what_is_not_finite_never_disappears(share, value, place):
    """Also where a gradient is sparse: 0 times NaN is NaN, as PyTorch has it."""
    inputs = _inputs(1, 128, 128, 24, 24)
    inputs[place][0, 5, 2, 1] = value
    grad = _sparse_grad(share, 1, 128, 24, 24)
    got, expected = (_results(f, inputs, grad) for f in (winograd_conv2d, _plain))
    for a, b in zip(got, expected, strict=True):
        assert not a[~b.isfinite()].isfinite().any()


@pytest.fixture
def taken(monkeypatch):
    """The sizes of the maps that were convolved in Winograd's way."""
    sizes, convolution = [], winograd_conv2d
    monkeypatch.setattr(
        winograd,
        "winograd_conv2d",
        lambda x, *parameters: sizes.append(tuple(x.shape)) or convolution(x, *parameters),
    )
    return sizes


def _conv(channels=128, out=128, **options):
    return Conv2d(channels, out, 3, **{"padding": 1, **options}).to(memory_format=LAST)


def _map(channels=128, side=48):
    return torch.randn(1, channels, side, side).to(memory_format=LAST)


OTHERS = {
    "uneven": (_conv(128, 130), _map()),
    "stride": (_conv(stride=2), _map()),
    "dilation": (_conv(dilation=2, padding=2), _map()),
    "groups": (_conv(groups=2), _map()),
    "padding": (_conv(padding=0), _map()),
    "reflected": (nn.Conv2d(128, 128, 3, padding=1, padding_mode="reflect"), _map()),
    "small": (_conv(), _map(side=22)),
    "contiguous": (_conv().to(memory_format=torch.contiguous_format), _map()),
    "float16": (_conv().half(), _map().half()),
    "empty": (_conv(), _map()[:0]),
    "no batch": (_conv(), _map()[0]),
}


@pytest.mark.parametrize(("conv", "x"), OTHERS.values(), ids=OTHERS)
def test_others_are_pytorchs(conv, x, taken):
    assert torch.equal(_fast(conv)(x), conv(x))
    assert not taken


@pytest.mark.skipif(not without_mkl(), reason="no AVX-512")
@pytest.mark.parametrize("options", [{"stride": 2, "padding": 1}, {"groups": 2}], ids=str)
def test_kernels_of_one_tap_on_one_thread_are_onednns(options, monkeypatch):
    plain, x = nn.Conv2d(32, 64, 1, **options), torch.randn(2, 32, 9, 11)
    model, grad = _fast(plain), torch.ones_like(plain(x))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    exact = _trained(plain.double(), x.double(), grad)
    for dtype in (torch.float32, torch.float64):
        with torch.profiler.profile() as profile:
            results = _trained(model.to(dtype), x.to(dtype), grad)
        used = "aten::mkldnn_convolution" in {event.name for event in profile.events()}
        assert used == (dtype == torch.float32)
        for got, want in zip(results, exact, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_gradient_of_float32_is_in_float32(autocast):
    """Whether or not it is taken under autocast."""
    model, x, grad = _fast(_conv()), _map(), torch.zeros(1, 128, 48, 48)
    grad[..., 7] = torch.randn(1, 128, 48)
    weight = model[0].weight
    expected = torch.autograd.grad(_plain(x, weight), weight, grad)[0]
    output = model(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = torch.autograd.grad(output, weight, grad)[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def _sequence(norm):
    """Of two convolutions with norms."""
    model = Conv2dNormActivation(3, 8, norm_layer=norm)
    model.append(nn.Conv2d(8, 8, 1)).append(norm(8))
    return scramble(model).to(memory_format=LAST).double()


@pytest.mark.parametrize(
    ("norm", "training"),
    [(FrozenBatchNorm2d, True), (nn.BatchNorm2d, True), (nn.BatchNorm2d, False)],
)
def test_a_sequence_folds_norms_with_fixed_statistics(training, norm):
    """Also in training; tests/modeling/test_fold.py has sequences with hooks and others."""
    model = _sequence(norm).train(training)
    fast, x, grad = copy.deepcopy(model), _map(3).double(), _map(8)
    use_winograd(fast)
    expected = _trained(model, x, grad)
    with torch.profiler.profile() as profile:
        folded = _trained(fast, x, grad)
    has_statistics = "aten::native_batch_norm" in {event.name for event in profile.events()}
    assert has_statistics == (norm is nn.BatchNorm2d and training)
    for got, exact in zip(folded, expected, strict=True):
        torch.testing.assert_close(got, exact)
    use_winograd(fast, False)
    assert [type(m) for m in fast.modules()] == [type(m) for m in model.modules()]


@pytest.mark.parametrize(
    ("activation", "hooks", "channels"),
    [
        (F.relu, None, 16),
        (nn.GELU(), None, 128),
        *((nn.ReLU(), x, 128) for x in (None, "forward_pre", "full_backward", "module_forward")),
    ],
)
def test_an_activation_is_the_same(activation, hooks, channels, taken):
    """A rectifier is computed with the sums, unless somebody looks at what it gets."""
    seen, hooked = [], contextlib.nullcontext()
    conv, x = _conv(channels, activation=activation), _map(channels)
    # Where a sum is almost 0, rounding decides whether a rectifier lets its gradient through
    grad = (_plain(x, conv.weight, conv.bias).abs() > 1e-3).float()
    model = _fast(conv)
    if hooks:
        owner = nn.modules.module if "module" in hooks else model[0].activation
        register = getattr(owner, f"register_{hooks}_hook")
        hooked = register(lambda m, *_: seen.extend([1] * isinstance(m, nn.ReLU)))
    with hooked, torch.device("meta"):  # the default for new tensors
        got = _trained(model, x, grad)
    assert taken and len(seen) == bool(hooks)
    for a, b in zip(got, _trained(conv, x, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)


@needs_bfloat16
def test_predictions_in_bfloat16(taken, monkeypatch):
    monkeypatch.setattr(winograd, "_twice_the_rate", lambda: True)  # older PyTorch cannot say
    conv, x = _conv(64, activation=F.relu), _map(64)
    model = _fast(conv)
    exact = conv.double()(x.double())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        got, plain = model(x), conv.float()(x)
        assert len(taken) == 1 and got.dtype == torch.bfloat16
        # Both round their output alike, which is all of the error where PyTorch sums in float32
        assert (got - exact).norm() <= 1.01 * (plain - exact).norm()
        monkeypatch.setattr(winograd, "_twice_the_rate", lambda: False)
        assert torch.equal(model(x), plain) and len(taken) == 1


@pytest.mark.parametrize("quick", [False, pytest.param(True, marks=needs_bfloat16)])
@pytest.mark.parametrize("share", [0, 0.001, 0.24, 0.26, 1])
def test_the_error_in_bfloat16_is_at_most_twice_that_of_pytorch(share, quick, taken, monkeypatch):
    """With the kernels of ours, and without them."""
    calls = []
    monkeypatch.setattr(winograd, "_twice_the_rate", lambda: quick)
    monkeypatch.setattr(winograd, "call", lambda *x: calls.append(x) or native.call(*x))
    conv, x, grad = _conv(), _map(), _sparse_grad(share, 1, 128, 48, 48)
    model = _fast(conv)
    exact = _trained(copy.deepcopy(conv).double(), x.double(), grad)
    with torch.autocast("cpu", torch.bfloat16):
        plain = _trained(conv, x, grad)
        assert not taken
        got = _trained(model, x, grad)
    assert taken and len(calls) == quick * (5 if share > 0.25 else 2)
    for a, b, true in zip(got, plain, exact, strict=True):
        assert a.dtype == b.dtype
        assert (a - true).norm() <= 2 * (b - true).norm()


def _depthwise(**options):
    return _conv(32, 32, stride=2, groups=32, **options)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_depthwise_kernels_with_a_stride_are_computed_in_float32(dtype, bias):
    """Their gradients in bfloat16 take oneDNN many times as long."""
    conv = _depthwise(bias=bias)
    model, x, grad = _fast(conv), _map(32).to(dtype), torch.randn(1, 32, 24, 24).bfloat16()
    expected = _trained(conv, x.float(), grad)
    with torch.autocast("cpu", torch.bfloat16):
        got = _trained(model, x, grad)
        with torch.no_grad():
            assert torch.equal(model(x), conv(x))  # without gradients it is PyTorch's
    dtypes = [torch.bfloat16, dtype, *(weight.dtype for weight in conv.parameters())]
    for a, b, own in zip(got, expected, dtypes, strict=True):
        assert a.dtype == own
        torch.testing.assert_close(a, b.to(own))


def test_other_depthwise_kernels_are_pytorchs():
    x, biased = _map(32), _depthwise().bfloat16()
    biased.bias.data = biased.bias.data.float()
    for conv in (_depthwise(), biased):
        with pytest.raises(RuntimeError):
            _fast(conv)(x.bfloat16())  # without autocast all have one dtype
    conv = _depthwise().double()
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        assert torch.equal(_fast(conv)(x.double()), conv(x.double()))
    conv, calls = conv.bfloat16().to("meta"), []
    for model in (conv, _fast(conv)):
        with torch.profiler.profile() as profile:
            model(x.bfloat16().to("meta"))
        calls.append(sorted(event.name for event in profile.events()))
    assert calls[0] == calls[1]
