"""Winograd's convolution against PyTorch's, in float64 and within the bound of float32."""

import contextlib
import copy
from collections import Counter
from functools import partial

import pytest
import torch
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torchvision.ops.misc import Conv2dNormActivation

from lambda_det import native
from lambda_det.cpu import winograd
from lambda_det.cpu.pooling import without_mkl
from lambda_det.cpu.winograd import use_winograd, winograd_conv2d

pytestmark = pytest.mark.skipif(bool(native.missing()), reason=str(native.missing()))
LAST = torch.channels_last
needs_bfloat16 = pytest.mark.skipif(
    not native.has("convolve", torch.bfloat16), reason="no instructions for bfloat16"
)


def _draw(low, high):
    return int(torch.randint(low, high + 1, ()))


def _plain(x, weight, bias=None):
    return F.conv2d(x, weight, bias, padding=1)


def _results(convolution, inputs, grad):
    """The output, and the gradients of all inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = convolution(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def _inputs(batch, channels, out, height, width, dtype=torch.float32):
    x = torch.randn(batch, channels, height, width, dtype=dtype)
    weight = torch.randn(out, channels, 3, 3, dtype=dtype) / (3 * channels**0.5)
    return [x, weight, torch.randn(out, dtype=dtype)]


@pytest.fixture
def all_channels(monkeypatch):
    """Sums over few channels, too, so that the sizes of a test can be small."""
    monkeypatch.setattr(winograd, "_LEAST", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("all_channels")
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
def test_equals_the_convolution_on_random_sizes(layout):
    """Maps smaller than a tile, every remainder of tiles, vectors and panels, sparse gradients."""
    for case in range(30):
        channels, out = 16 * _draw(1, 6), 16 * _draw(1, 6)
        inputs = _inputs(_draw(1, 3), channels, out, _draw(1, 14), _draw(1, 14), torch.float64)
        inputs[:2] = [x.contiguous(memory_format=layout) for x in inputs[:2]]
        grad = torch.randn_like(_plain(*inputs))
        grad[:, : (0, 16, out)[case % 3]] *= torch.rand(grad[:, :1].shape) < torch.rand(()) / 2
        fast, plain = winograd_conv2d, _plain
        if case % 2:
            fast, plain = partial(winograd_conv2d, relu=True), lambda *x: _plain(*x).relu()
        pairs = zip(_results(fast, inputs, grad), _results(plain, inputs, grad), strict=True)
        for got, expected in pairs:
            assert got.shape == expected.shape
            assert (got - expected).norm() <= 1e-12 * expected.norm(), [x.shape for x in inputs]


@pytest.mark.parametrize(("channels", "out"), [(16, 48), (32, 128), (144, 64)])
def test_sums_over_few_channels(channels, out):
    """One, both or none of the output and the gradient of the map are PyTorch's."""
    inputs = _inputs(2, channels, out, 9, 10, torch.float64)
    grad = torch.randn_like(_plain(*inputs))
    got, expected = (_results(f, inputs, grad) for f in (winograd_conv2d, _plain))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "share"),
    [
        # The fewest channels and the smallest maps that are taken
        *(((11, 128, 128, 7, 7), 1), ((1, 128, 256, 32, 32), 1), ((6, 256, 256, 14, 14), 1)),
        *(((1, 128, 128, 64, 64), share) for share in (0, 0.001, 0.01, 0.1, 0.24, 0.26)),
    ],
)
def test_the_error_in_float32_is_at_most_twice_that_of_pytorch(size, share):
    """Also of gradients of which a share of the positions is not 0.

    PyTorch's own errors differ fourfold between its two layouts, and so do processors.
    """
    inputs, (batch, _, out, *sides) = _inputs(*size), size
    grad = torch.randn(batch, out, *sides) * (torch.rand(batch, 1, *sides) < share)
    exact = _results(_plain, [x.double() for x in inputs], grad.double())
    contiguous = _results(_plain, inputs, grad)
    inputs[:2] = [x.to(memory_format=LAST) for x in inputs[:2]]
    got, last = (_results(f, inputs, grad) for f in (winograd_conv2d, _plain))
    # PyTorch 2.4 sums this gradient in another way than its convolutions, which is more exact
    turned = inputs[1].flip(2, 3).transpose(0, 1).contiguous(memory_format=LAST)
    last[1] = _plain(grad.contiguous(memory_format=LAST), turned)
    for a, true, *plain in zip(got, exact, contiguous, last, strict=True):
        assert (a - true).norm() <= 2 * max((b - true).norm() for b in plain)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("share", [0, 0.01, 1])
def test_what_is_not_finite_never_disappears(share, value):
    """Also where a gradient is sparse: 0 times NaN is NaN, as PyTorch has it."""
    for place in (0, 1):
        inputs = _inputs(1, 128, 128, 24, 24)
        inputs[place][0, 5, 2, 1] = value
        grad = torch.randn(1, 128, 24, 24) * (torch.rand(1, 1, 24, 24) < share)
        got, expected = (_results(f, inputs, grad) for f in (winograd_conv2d, _plain))
        for a, b in zip(got, expected, strict=True):
            assert not a[~b.isfinite()].isfinite().any()


@pytest.mark.usefixtures("all_channels")
@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_has_the_same_bits(threads):
    inputs = _inputs(3, 32, 48, 13, 30)
    grad = torch.randn(3, 48, 13, 30)
    expected, before = _results(winograd_conv2d, inputs, grad), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = _results(winograd_conv2d, inputs, grad)
    finally:
        torch.set_num_threads(before)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("all_channels")
def test_it_keeps_within_its_buffers(monkeypatch):
    """Every tensor that it gets lies amid numbers that must neither be read nor written."""
    fences = []

    def fenced(name, dtype, sizes, *tensors):
        inside = []
        for x in tensors:
            fence = torch.full((x.numel() + 2048,), torch.nan, dtype=dtype)
            fences.append((fence, fence[1024:-1024].view(x.shape)))
            fences[-1][1].copy_(x)
            inside.append(fences[-1][1])
        native.call(name, dtype, sizes, *inside)
        for x, written in zip(tensors, inside, strict=True):
            x.copy_(written)

    monkeypatch.setattr(winograd, "call", fenced)
    inputs = _inputs(2, 16, 80, 5, 7)
    got = _results(winograd_conv2d, inputs, torch.randn(2, 80, 5, 7))
    assert all(x.isfinite().all() for x in got) and len(fences) == 16
    for fence, _ in fences:
        assert fence[:1024].isnan().all() and fence[-1024:].isnan().all()


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


@pytest.mark.parametrize("cls", [Conv2d, nn.Conv2d])
def test_a_convolution_is_the_same(cls, taken):
    own = {"norm": nn.BatchNorm2d(128), "activation": F.relu} if cls is Conv2d else {}
    conv = cls(128, 128, 3, padding=1, bias=False, **own).to(memory_format=LAST)
    fast, x = nn.Sequential(copy.deepcopy(conv)), _map()
    use_winograd(fast)
    torch.testing.assert_close(fast(x), conv(x), rtol=1e-4, atol=1e-4)
    assert taken == [tuple(x.shape)]
    torch.testing.assert_close(fast.eval()(x.contiguous()), conv.eval()(x), rtol=1e-4, atol=1e-4)
    assert len(taken) == 2
    assert copy.deepcopy(fast).state_dict().keys() == fast.state_dict().keys()
    if own:
        torch.testing.assert_close(fast[0].norm.running_mean, conv.norm.running_mean)


@pytest.mark.usefixtures("taken")
def test_its_result_can_be_changed_in_place():
    conv, x = _conv(), _map()
    model = nn.Sequential(copy.deepcopy(conv), nn.ReLU(inplace=True))
    use_winograd(model)
    got, expected = (
        torch.autograd.grad(f(x).square().sum(), module.weight)[0]
        for f, module in ((model, model[0]), (lambda x: conv(x).relu(), conv))
    )
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-2)


WRONG = {
    "channels": (_conv(), _map(144)),
    "no image": (_conv(), _map()[0, 0]),
    "bias": (_conv(), _map()),
}
WRONG["bias"][0].bias = nn.Parameter(torch.zeros(16))


@pytest.mark.parametrize(("conv", "x"), WRONG.values(), ids=WRONG)
def test_wrong_inputs_get_pytorchs_errors(conv, x, taken):
    model = nn.Sequential(conv)
    use_winograd(model)
    with pytest.raises(RuntimeError):
        model(x)
    assert not taken


def test_other_kinds_of_tensors_are_pytorchs(taken):
    model = nn.Sequential(_conv())
    use_winograd(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(_map())).shape == (1, 128, 48, 48)
    assert model(_map()[0]).shape == (128, 48, 48)
    assert model.to("meta")(_map().to("meta")).is_meta
    assert not taken


def test_transforms_of_torch_func_are_pytorchs(taken):
    """The gradient for each image, of layers that are taken without the transform."""
    plain = nn.Sequential(_conv(16, 16), nn.ReLU(), _conv(16, 16))
    model, images = copy.deepcopy(plain), torch.randn(3, 1, 16, 16, 16)
    use_winograd(model)
    model(images[0])
    assert len(taken) == 2

    def gradients(net):
        loss = lambda weights, x: functional_call(net, weights, x).square().mean()  # noqa: E731
        return vmap(grad(loss), (None, 0))(dict(net.named_parameters()), images)

    torch.testing.assert_close(gradients(model), gradients(plain))
    assert len(taken) == 2


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
}


@pytest.mark.parametrize(("conv", "x"), OTHERS.values(), ids=OTHERS)
def test_others_are_pytorchs(conv, x, taken):
    expected, model = conv(x), nn.Sequential(conv)
    use_winograd(model)
    assert torch.equal(model(x), expected)
    assert not taken


@pytest.mark.skipif(not without_mkl(), reason="no AVX-512")
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"groups": 2}], ids=str)
def test_kernels_of_one_tap_on_one_thread_are_onednns(options, monkeypatch):
    plain = nn.Sequential(nn.Conv2d(32, 64, 1, **options))
    model, x = copy.deepcopy(plain), torch.randn(2, 32, 9, 11)
    use_winograd(model)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    results = []
    for net, dtype in ((plain, torch.float64), (model, torch.float32), (model, torch.float64)):
        inputs = [x.to(dtype).requires_grad_(), *net.to(dtype).parameters()]
        with torch.profiler.profile() as profile:
            output = net(inputs[0])
        results.append([output, *torch.autograd.grad(output.sum(), inputs)])
        used = "aten::mkldnn_convolution" in {event.name for event in profile.events()}
        assert used == (dtype == torch.float32)
    for exact, *others in zip(*results, strict=True):
        for got in others:
            torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)


def test_graphs_are_pytorchs(taken):
    model, x = nn.Sequential(_conv(), nn.Conv2d(128, 16, 1), FrozenBatchNorm2d(16)), _map()
    use_winograd(model)
    found = torch.jit.trace(model, x, check_trace=False)(x)
    assert not taken
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)
    assert taken


@pytest.mark.parametrize("autocast", [False, True])
def test_the_gradient_of_float32_is_in_float32(autocast):
    """Whether or not it is taken under autocast."""
    model, x, grad = nn.Sequential(_conv()), _map(), torch.zeros(1, 128, 48, 48)
    use_winograd(model)
    grad[..., 7] = torch.randn(1, 128, 48)
    expected = torch.autograd.grad(_plain(x, model[0].weight), model[0].weight, grad)[0]
    output = model(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = torch.autograd.grad(output, model[0].weight, grad)[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def _sequence(norm=FrozenBatchNorm2d):
    """Of two convolutions with norms; the numbers of the norms differ from those of a new one."""
    model = Conv2dNormActivation(3, 8, norm_layer=norm)
    model.append(nn.Conv2d(8, 8, 1)).append(norm(8))
    for module in model.modules():
        if type(module) is norm:
            for numbers in (module.weight, module.bias, module.running_mean, module.running_var):
                nn.init.uniform_(numbers, 0.5, 2)
    return model.to(memory_format=LAST)


@pytest.mark.parametrize("norm", [FrozenBatchNorm2d, nn.BatchNorm2d])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("before_norms", [False, True])
def test_a_sequence_folds_norms_with_fixed_statistics(before_norms, training, norm):
    model, seen = _sequence(norm).double().train(training), []
    fast, x, grad = copy.deepcopy(model), _map(3).double(), _map(8).double()
    use_winograd(fast)
    for module in fast.modules():
        if isinstance(module, norm if before_norms else nn.Conv2d):
            module.register_forward_pre_hook(lambda *_: seen.append(1))
    expected, hooked = _trained(model, x.clone(), grad), _trained(fast, x.clone(), grad)
    assert len(seen) == 2
    for module in fast.modules():
        module._forward_pre_hooks.clear()
    with torch.profiler.profile() as profile:
        folded = _trained(fast, x.clone(), grad)
    names = {event.name for event in profile.events()}
    statistics = norm is nn.BatchNorm2d and training
    assert ("aten::native_batch_norm" in names) == statistics
    for a, b, exact in zip(hooked, folded, expected, strict=True):
        torch.testing.assert_close(a, exact)
        torch.testing.assert_close(b, exact)
    use_winograd(fast, False)
    assert [type(m) for m in fast.modules()] == [type(m) for m in model.modules()]


@pytest.mark.parametrize("hooks", [None, "forward_pre", "full_backward", "module_forward"])
@pytest.mark.parametrize("activation", [F.relu, nn.ReLU(), nn.GELU()])
@pytest.mark.parametrize("channels", [16, 128])
def test_an_activation_is_the_same(channels, activation, hooks, taken):
    """A rectifier is computed with the sums, unless somebody looks at what it gets."""
    seen, hooked, activation = [], contextlib.nullcontext(), copy.deepcopy(activation)
    if hooks and activation is not F.relu:
        owner = nn.modules.module if "module" in hooks else activation
        register = getattr(owner, f"register_{hooks}_hook")
        hooked = register(lambda m, *_: seen.extend([1] * isinstance(m, type(activation))))
    conv, x, grad = _conv(channels, activation=activation), _map(channels), torch.ones_like(_map())
    model = nn.Sequential(copy.deepcopy(conv))
    use_winograd(model)
    with hooked as hooked:
        for a, b in zip(*(_trained(f, x, grad) for f in (model, conv)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)
    assert taken and len(seen) == 2 * bool(hooked)


@needs_bfloat16
def test_predictions_in_bfloat16(taken, monkeypatch):
    monkeypatch.setattr(winograd, "_twice_the_rate", lambda: True)  # older PyTorch cannot say
    conv, x = _conv(64, activation=F.relu), _map(64)
    model = nn.Sequential(copy.deepcopy(conv))
    use_winograd(model)
    exact = conv.double()(x.double())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        got, plain = model(x), conv.float()(x)
        assert len(taken) == 1 and got.dtype == torch.bfloat16
        # Both round their output alike, which is all of the error where PyTorch sums in float32
        assert (got - exact).norm() <= 1.01 * (plain - exact).norm()
        monkeypatch.setattr(winograd, "_twice_the_rate", lambda: False)
        assert torch.equal(model(x), plain) and len(taken) == 1


@pytest.mark.parametrize("quick", [False, pytest.param(True, marks=needs_bfloat16)])
@pytest.mark.parametrize("share", [0, 0.001, 0.1, 0.24, 0.26, 1])
def test_the_error_in_bfloat16_is_at_most_twice_that_of_pytorch(share, quick, taken, monkeypatch):
    """With the kernels of ours, and without them."""
    calls = []
    monkeypatch.setattr(winograd, "_twice_the_rate", lambda: quick)
    monkeypatch.setattr(winograd, "call", lambda *x, **y: calls.append(x) or native.call(*x, **y))
    conv = _conv()
    model = nn.Sequential(copy.deepcopy(conv))
    use_winograd(model)
    x, grad = _map(), torch.randn(1, 128, 48, 48) * (torch.rand(1, 1, 48, 48) < share)
    exact = _trained(copy.deepcopy(conv).double(), x.double(), grad.double())
    with torch.autocast("cpu", torch.bfloat16):
        plain = _trained(conv, x, grad)
        assert not taken
        got = _trained(model, x, grad)
    assert taken and len(calls) == quick * (5 if share > 0.25 else 2)
    for a, b, true in zip(got, plain, exact, strict=True):
        assert a.dtype == b.dtype
        assert (a - true).norm() <= 2 * (b - true).norm()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_depthwise_kernels_with_a_stride_are_computed_in_float32(dtype, bias):
    """Their gradients in bfloat16 take oneDNN many times as long."""
    conv = _conv(32, 32, stride=2, groups=32, bias=bias)
    model = nn.Sequential(copy.deepcopy(conv))
    use_winograd(model)
    x, grad = _map(32).to(dtype), torch.randn(1, 32, 24, 24).bfloat16()
    expected = _trained(conv, x.detach().float(), grad.float())
    with torch.autocast("cpu", torch.bfloat16):
        got = _trained(model, x.detach(), grad)
    dtypes = [torch.bfloat16, dtype, *(weight.dtype for weight in conv.parameters())]
    for a, b, own in zip(got, expected, dtypes, strict=True):
        assert a.dtype == own
        torch.testing.assert_close(a, b.to(own))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(model(x), conv(x))  # without gradients it is PyTorch's


def test_other_depthwise_kernels_are_pytorchs():
    conv = _conv(32, 32, stride=2, groups=32)
    model, x = nn.Sequential(copy.deepcopy(conv)), _map(32)
    use_winograd(model)
    with pytest.raises(RuntimeError):
        model(x.bfloat16())  # without autocast all have one dtype
    biased = _conv(32, 32, stride=2, groups=32).bfloat16()
    biased.bias.data = biased.bias.data.float()
    fast = nn.Sequential(biased)
    use_winograd(fast)
    with pytest.raises(RuntimeError):
        fast(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        assert torch.equal(model.double()(x.double()), conv.double()(x.double()))
    x = x.bfloat16().to("meta")
    assert _operators(model.bfloat16().to("meta"), x) == _operators(conv.bfloat16().to("meta"), x)


def _operators(model, x):
    with torch.profiler.profile() as profile:
        model(x)
    return Counter(event.name for event in profile.events())


def _trained(model, x, grad):
    """The output, and the gradients of map and parameters."""
    x = x.requires_grad_()
    output = model(x)
    return [output, *torch.autograd.grad(output, [x, *model.parameters()], grad.to(output.dtype))]


def test_without_kernels_it_is_pytorchs(taken, monkeypatch):
    model, x = nn.Sequential(_conv()), _map()
    expected = model(x)
    use_winograd(model)
    monkeypatch.setattr(winograd, "missing", lambda: "no compiler")
    assert torch.equal(model(x), expected)
    assert not taken
