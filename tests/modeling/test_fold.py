"""Norms are folded only where nothing but the time changes, whatever a network is built from."""

import copy
from dataclasses import dataclass

import pytest
import torch
from detectron2.layers import Conv2d, FrozenBatchNorm2d, NaiveSyncBatchNorm
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

import lambda_det
from lambda_det.cpu import winograd
from lambda_det.detection.model import for_inference
from lambda_det.layers import LambdaLayer
from lambda_det.modeling.fold import fold_norms
from lambda_det.modeling.norm import SyncBatchNorm2d
from lambda_det.modeling.resnet import Bottleneck
from lambda_det.modeling.specs import ResNetSpec
from tests.export.toy import scramble

WIDTH = 16

# What is done to a convolution or to a norm


def _pruned(module):
    return prune.random_unstructured(module, "weight", 0.5)


def _doubled(module):
    module.register_forward_hook(lambda module, args, y: y * 2)
    return module


def _other_forward(module):
    forward = type(module).forward
    module.forward = lambda x: forward(module, x) * 2
    return module


def _with_idle_norm(conv):
    """The forward pass of PyTorch's class calls neither."""
    if type(conv) is nn.Conv2d:
        conv.norm, conv.activation = nn.BatchNorm2d(WIDTH), torch.sin
    return conv


CHANGES = {
    "nothing": lambda conv: conv,
    "spectral norm": spectral_norm,
    "parametrized weight norm": parametrizations.weight_norm,
    "pruned": _pruned,
    "other forward": _other_forward,
    "idle norm": _with_idle_norm,
}
OPTIONS = {"kernel_size": 1, "bias": False}, {"kernel_size": 3, "padding": 1}


class _ActiveNorm(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def forward(self, x):
        return super().forward(x).relu()


def _without(norm, name):
    norm.register_parameter(name, None)
    return norm


NORMS = {
    "BN": lambda channels: nn.BatchNorm2d(channels),
    "without parameters": lambda channels: nn.BatchNorm2d(channels, affine=False),
    "without statistics": lambda channels: nn.BatchNorm2d(channels, track_running_stats=False),
    "without weight": lambda channels: _without(nn.BatchNorm2d(channels), "weight"),
    "large eps": lambda channels: nn.BatchNorm2d(channels, eps=1.0),
    "frozen": FrozenBatchNorm2d,
    "naive": NaiveSyncBatchNorm,
    "synchronised": SyncBatchNorm2d,
    "PyTorch's": nn.SyncBatchNorm,
    "active": _ActiveNorm,
    "groups": lambda channels: nn.GroupNorm(4, channels),
    "hooked": lambda channels: _doubled(nn.BatchNorm2d(channels)),
}


@dataclass
class Parts:
    """Makes the parts of a network: convolutions of one kind, and norms of one kind."""

    options: dict
    change: str
    kind: str

    def conv(self):
        return CHANGES[self.change](nn.Conv2d(WIDTH, WIDTH, **self.options))

    def own_norm(self, activation=None):
        """A convolution of Detectron2, with its norm."""
        conv = Conv2d(WIDTH, WIDTH, **self.options, norm=self.norm(), activation=activation)
        return CHANGES[self.change](conv)

    def norm(self, channels=WIDTH):
        return NORMS[self.kind](channels)


# What convolutions and norms stand in


class _OwnConv(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).sin()


class _SeesMaps(nn.Module):
    """Looks at each map between its parts."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x):
        total = 0
        for part in self.parts:
            x = part(x)
            total = total + x
        return total


def _one_norm(parts):
    norm = parts.norm()
    return nn.Sequential(parts.conv(), norm, parts.conv(), norm)


def _one_conv(parts):
    conv = parts.conv()
    return nn.Sequential(conv, parts.norm(), conv, parts.norm())


def _one_sequence_in_two(parts):
    whole = nn.Sequential(parts.conv(), parts.norm())
    return nn.Sequential(nn.Sequential(whole), nn.Sequential(whole))


def _one_kernel(parts):
    first, second = (Conv2d(WIDTH, WIDTH, 1, norm=parts.norm()) for _ in range(2))
    second.weight = first.weight
    return nn.Sequential(first, second)


def _lambda_layer(parts):
    sizes = {"heads": 2, "query_depth": WIDTH // 2, "scope": 3}
    layer = LambdaLayer(WIDTH, **sizes, norm=parts.norm)
    layer.qkv = CHANGES[parts.change](layer.qkv)
    return layer


def _block(parts):
    spec = ResNetSpec((1, 1, 1, 1), se_stages=("res2",), width=WIDTH // 4)
    return Bottleneck(spec, "res2", WIDTH, norm=parts.norm)


def _changed_block(parts):
    block = _block(parts)
    block.conv3 = CHANGES[parts.change](block.conv3)
    return block


def _hooked_squeeze(parts):
    block = _block(parts)
    _doubled(block.se.squeeze)
    return block


PLACES = {
    "sequence": lambda parts: nn.Sequential(parts.conv(), parts.norm(), nn.ReLU()),
    "Detectron2's": lambda parts: nn.Sequential(parts.own_norm(), parts.own_norm(nn.ReLU())),
    "norm behind norm": lambda parts: nn.Sequential(parts.own_norm(), parts.norm()),
    "norm behind activation": lambda parts: nn.Sequential(
        Conv2d(WIDTH, WIDTH, 1, activation=torch.sin), parts.norm()
    ),
    "two norms": lambda parts: nn.Sequential(parts.conv(), parts.norm(), parts.norm()),
    "nothing behind": lambda parts: nn.Sequential(parts.conv(), nn.Sequential(parts.norm())),
    "one norm": _one_norm,
    "one convolution": _one_conv,
    "one sequence in two": _one_sequence_in_two,
    "one kernel": _one_kernel,
    "hooked sequence": lambda parts: _doubled(nn.Sequential(parts.conv(), parts.norm())),
    "own convolution": lambda parts: nn.Sequential(_OwnConv(WIDTH, WIDTH, 1), parts.norm()),
    "sees maps": lambda parts: _SeesMaps(parts.conv(), parts.norm()),
    "lambda layer": _lambda_layer,
    "block": _block,
    "changed block": _changed_block,
    "hooked squeeze": _hooked_squeeze,
}


@torch.no_grad()
def _check(network, x, bound):
    """All copies for inference compute what the network computes."""
    network.eval()(x)  # lazy modules get their parameters
    expected = network(x)
    copies = {
        "fold_norms": fold_norms(network),
        "for_inference": for_inference(network),
        "accelerate": lambda_det.accelerate(copy.deepcopy(network)),
        "both": for_inference(lambda_det.accelerate(copy.deepcopy(network))),
    }
    for name, model in copies.items():
        error = (model(x) - expected).abs().max()
        assert error <= bound * expected.abs().max(), name
    assert torch.equal(network(x), expected)


def _drawn(network, dtype=torch.float64):
    """A network whose every number counts, and an image for it."""
    x = torch.randn(2, WIDTH, 9, 8)
    with torch.no_grad():
        network.train()(x)
    return scramble(network).to(dtype), x.to(dtype)


@pytest.fixture(autouse=True)
def _kernels_for_small_maps(monkeypatch):
    monkeypatch.setitem(winograd._PAYS_FROM, torch.float64, (1, 0))


@pytest.mark.parametrize("place", PLACES)
def test_each_place_computes_the_same(place):
    for options in ({"kernel_size": 1}, {"kernel_size": 3, "padding": 1}):
        _check(*_drawn(PLACES[place](Parts(options, "nothing", "BN"))), 1e-12)


LEFT = {"without statistics", "active", "groups", "hooked"}  # what does more, or depends on the map


@pytest.mark.parametrize("kind", NORMS)
def test_each_norm_computes_the_same(kind):
    for place in ("sequence", "Detectron2's", "lambda layer", "block"):
        network, x = _drawn(PLACES[place](Parts(OPTIONS[0], "nothing", kind)))
        _check(network, x, 1e-12)
        if place == "sequence":
            assert isinstance(fold_norms(network)[1], nn.Identity) == (kind not in LEFT)


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_a_convolution_computes_the_same(change):
    for place in ("sequence", "Detectron2's", "lambda layer", "changed block"):
        for options in OPTIONS:
            _check(*_drawn(PLACES[place](Parts(options, change, "BN"))), 1e-12)


def _norms(network):
    return [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]


def _of_place(place, dtype=torch.float64):
    return _drawn(PLACES[place](Parts(OPTIONS[1], "nothing", "BN")), dtype)


@pytest.mark.parametrize("place", ["Detectron2's", "sequence", "block", "lambda layer"])
def test_what_is_known_and_used_once_is_folded(place):
    network, _ = _of_place(place)
    assert _norms(network) and not _norms(fold_norms(network))
    winograd.use_winograd(network)
    assert not _norms(fold_norms(network))


@pytest.mark.parametrize("place", ["sees maps", "hooked sequence"])
def test_code_of_others_keeps_its_norms_and_no_more(place):
    network, _ = _of_place(place)
    folded = fold_norms(nn.Sequential(_of_place("sequence")[0], network))
    assert len(_norms(folded)) == len(_norms(network)) == 1


@torch.no_grad()
def test_networks_of_16_bits():
    network, x = _of_place("sequence", torch.bfloat16)
    exact, wide = copy.deepcopy(network).double().eval()(x.double()), x.double().abs().max()
    folded = fold_norms(network)
    assert not _norms(folded)
    for model in (network.eval(), folded):
        assert (model(x) - exact).abs().max() <= 2**-6 * wide.clamp(min=exact.abs().max())
    assert _norms(fold_norms(network.half()))  # whose small numbers have few digits
    # Detectron2's norm of another dtype than its convolution is PyTorch's mixed precision
    mixed, x = _of_place("Detectron2's", torch.bfloat16)
    for norm in _norms(mixed):
        norm.float()
    _check(mixed, x, 0)


@torch.no_grad()
def test_a_norm_for_another_number_of_channels_fails_as_before():
    network = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(1)).eval()
    own = Conv2d(WIDTH, WIDTH, 1, norm=nn.BatchNorm2d(1)).eval()
    for model in (network, own, fold_norms(network), fold_norms(own), lambda_det.accelerate(own)):
        with pytest.raises(RuntimeError, match="running_mean"):
            model(torch.randn(2, WIDTH, 3, 3))


@torch.no_grad()
def test_a_norm_without_a_finite_factor_stays():
    network, x = _of_place("sequence")
    network[1].running_var[3], network[1].running_mean[3] = -1, 5  # PyTorch 2.10 refuses eps = 0
    folded = fold_norms(network)
    assert _norms(folded)
    torch.testing.assert_close(folded(x), network.eval()(x), equal_nan=True)


def test_hooks_on_all_modules_see_all_of_them():
    network, x = _of_place("sequence")
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda *call: seen.append(call[0]))
    try:
        _check(network, x, 1e-12)
        seen.clear()
        fold_norms(network)(x)
        assert _norms(nn.ModuleList(seen))
    finally:
        handle.remove()


@pytest.mark.parametrize("change", ["spectral norm", "pruned"])
def test_a_kernel_of_the_last_training_step_is_copied(change):
    """As in an evaluation between two steps."""
    network, x = _drawn(PLACES["Detectron2's"](Parts(OPTIONS[1], change, "BN")))
    network.train()(x).sum().backward()
    assert not network[0].weight.is_leaf
    torch.testing.assert_close(fold_norms(network)(x), network.eval()(x))
