"""The layer that NaN and infinite numbers come from is named, and a step whose loss stands out."""

import copy
import math

import pytest
import torch
from torch import nn

import lambda_det
from lambda_det.errors import NonFiniteLossError
from lambda_det.training.numerics import NonFiniteNumbers, NumericsDebugger
from lambda_det.training.precision import LossScaler, Precision
from tests.training.toy import Steps, ToyModel, batches, items


@pytest.fixture
def net():
    return lambda_det.create_backbone("lambda_resnet26_slim", scope=5, stochastic_depth=0.5)


def _run(net, debugger, x=None, **options):
    x = torch.randn(2, 3, 64, 64) if x is None else x
    with debugger.watching(**options):
        sum(y.sum() for y in net(x).values()).backward()


def _found(net, x=None, **options):
    with pytest.raises(NonFiniteNumbers) as caught:
        _run(net, NumericsDebugger(net), x, **options)
    return str(caught.value)


def test_a_healthy_network_computes_as_without(net):
    x, watched, results = torch.randn(2, 3, 64, 64), copy.deepcopy(net), []
    for one in (net, watched):
        torch.manual_seed(0)
        if one is watched:
            _run(one, NumericsDebugger(one), x)
        else:
            sum(y.sum() for y in one(x).values()).backward()
        results.append([p.grad for p in one.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * float(one.abs().max()))
    # and nothing is looked at outside of its time
    assert watched(torch.full((2, 3, 64, 64), torch.nan))["res5"].isnan().any()


def test_a_compiled_network_is_watched_as_one_that_is_not(net):
    net.compile()
    NumericsDebugger(net)
    assert not any(module._compiled_call_impl for module in net.modules())


def test_the_first_module_is_named_with_what_it_was_given(net):
    nn.init.constant_(net.res3[1].conv2.weight, torch.nan)
    text = _found(net)
    assert text.startswith(
        "res3.1.conv2 (Conv2d) gives its module res3.1.conv2.norm (BatchNorm2d) an input "
    )
    assert " NaN (its input: 0 numbers not finite, magnitudes up to" in text
    weights = net.res3[1].conv2.weight.numel()
    assert f"its parameters and buffers: {weights} numbers not finite" in text


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_image_of_nan_is_told_from_a_bad_layer(net, bad):
    x = torch.randn(2, 3, 64, 64)
    x[1, 2, 3, 4] = bad
    assert _found(net, x).startswith(f"The data hold an input in which 1 of {x.numel()} numbers")


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.inf


class Breaks(nn.Module):
    def forward(self, x):
        return _BadBackward.apply(x)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gamma.sqrt()


@pytest.mark.parametrize(
    ("layers", "after", "words"),
    [
        (
            [nn.Linear(3, 4), Breaks(), nn.Linear(4, 2)],
            nn.Identity(),
            r"^1 \(Breaks\) passes back a gradient of its input",
        ),
        (
            [nn.Linear(3, 4)],
            _BadBackward.apply,
            r"^What follows 0 \(Linear\) passes back a gradient of its output",
        ),
        ([Scale()], nn.Identity(), r"^0 \(Scale\) gets a gradient of its gamma"),
    ],
)
def test_the_module_whose_backward_pass_breaks_is_named(layers, after, words):
    net = nn.Sequential(*layers)
    debugger = NumericsDebugger(net)
    with pytest.raises(NonFiniteNumbers, match=words), debugger.watching():
        after(net(torch.randn(5, 3))).sum().backward()
    with debugger.watching(gradients=False):
        after(net(torch.randn(5, 3))).sum().backward()


class Toy(ToyModel):
    """Its loss is NaN at the item "bad"."""

    def forward(self, batch):
        losses = super().forward(batch)
        if any("bad" in item["file_name"] for item in batch):
            nn.init.constant_(self.layers[2].weight, torch.nan)
            return super().forward(batch)
        return losses


def _named_items(count, bad):
    result = items(count)
    for index, item in enumerate(result):
        item["file_name"] = f"bad{index}.jpg" if index == bad else f"{index}.jpg"
    return result


@pytest.mark.parametrize(
    ("debug", "beginning", "end"),
    [
        (
            True,
            "layers.2 (Linear) gives an output in which 2 of 2 numbers are not ",
            "a lower learning rate.",
        ),
        (False, "A loss is not finite (loss_fit nan", "--resume --debug-numerics names the layer."),
    ],
)
def test_a_step_names_iteration_images_and_checkpoint_and_the_layer_if_asked(debug, beginning, end):
    data = batches(_named_items(8, 5), 2)
    with pytest.raises(NonFiniteLossError) as caught:
        Steps(Toy(), data, debug_numerics=debug, last_checkpoint=lambda: "run/model_7.pth").take(
            range(4)
        )
    text = str(caught.value)
    assert text.startswith(beginning) and text.endswith(end)
    assert "at iteration 2 (images 4.jpg, bad5.jpg)" in text and "run/model_7.pth" in text


def test_with_loss_scaling_gradients_are_looked_at_when_no_scale_helps(monkeypatch):
    monkeypatch.setattr(Precision, "grad_scaler", lambda self: LossScaler("cpu"))
    monkeypatch.setattr(LossScaler, "get_scale", lambda self: 2.0)
    model = ToyModel()
    model.layers.insert(1, Breaks())
    with pytest.raises(NonFiniteLossError, match=r"layers\.1 \(Breaks\).* at iteration 10"):
        Steps(model, batches(items(60), 2), debug_numerics=True).take(range(30))
