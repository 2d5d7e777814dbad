"""The folded network on BGR pixels against the original one on normalised RGB pixels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lambda_det
from lambda_det.errors import WeightsError
from lambda_det.weights.backbone_file import fold_normalisation
from lambda_det.weights.provenance import PixelSettings
from tests.export.toy import scramble

MEAN, STD = [125.3, 122.9, 113.8], [20.0, 57.0, 90.0]  # far apart, so that their order matters
PIXELS = PixelSettings("RGB", MEAN, STD)
NETWORKS = {
    "lambda_resnet26": {"scope": 3},  # ResNet-RS' stem
    "resnet50_lambda_c5": {"scope": 3},  # the vanilla stem
    "mobilenet_v2": {},
}
NO_BN = ("GN", "")


def _features(backbone, image):
    """In float64; the image may have odd sides, where borders differ."""
    with torch.no_grad():
        return backbone.double().eval()(image.double())


def _copy(backbone, name, state, **options):
    copy = lambda_det.create_backbone(name, ("stem", "res5"), **options)
    copy.load_state_dict({**backbone.state_dict(), **state})
    return copy


@pytest.mark.parametrize(
    ("name", "norm"),
    [*((name, "BN") for name in NETWORKS), *(("lambda_resnet26", n) for n in NO_BN)],
)
def test_the_features_are_the_same(name, norm):
    options = {**NETWORKS[name], "norm": norm}
    original = scramble(lambda_det.create_backbone(name, ("stem", "res5"), **options))
    state, pixels = fold_normalisation(original, original.state_dict(), PIXELS)
    assert pixels == PixelSettings("BGR", MEAN[::-1], (1.0, 1.0, 1.0))
    folded = _copy(original, name, state, **options)
    image = torch.randint(0, 256, (1, 3, 65, 47)).double()
    mean, std = (torch.tensor(v).view(3, 1, 1).double() for v in (MEAN, STD))
    expected = _features(original, (image - mean) / std)
    found = _features(folded, image.flip(1) - mean.flip(0))
    for key, feature in expected.items():
        assert (found[key] - feature).abs().max() < 1e-5 * feature.abs().max()
    # and the test would see an error of the size that matters
    wrong = _features(folded, image - mean)
    assert (wrong["stem"] - expected["stem"]).abs().max() > 1e-3 * expected["stem"].abs().max()


def test_one_convolution_and_its_norm_are_changed_and_nothing_else():
    backbone = scramble(lambda_det.create_backbone("lambda_resnet26", scope=3))
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    given = backbone.state_dict()
    state, _ = fold_normalisation(backbone, given, PIXELS)
    changed = {name for name in state if not torch.equal(state[name], before[name])}
    statistics = {f"stem.conv1.norm.running_{kind}" for kind in ("mean", "var")}
    assert changed == {"stem.conv1.weight"} | statistics
    assert all(torch.equal(t, before[name]) for name, t in given.items())


@pytest.mark.parametrize("name", NETWORKS)
def test_the_first_weights_learn_as_fast_as_before(name):
    """A step of SGD on the folded network is one on the original network, at the same rate."""
    options = {**NETWORKS[name], "norm": "BN"}
    std = [57.0, 57.0, 57.0]
    original = scramble(lambda_det.create_backbone(name, ("stem",), **options)).train()
    state, _ = fold_normalisation(
        original, original.state_dict(), PixelSettings("RGB", [0.0] * 3, std)
    )
    folded = lambda_det.create_backbone(name, ("stem",), **options)
    folded.load_state_dict(state)
    image = torch.randint(0, 256, (2, 3, 32, 32)).float()
    gradients = []
    for network, pixels in ((original, image / 57), (folded.train(), image.flip(1))):
        network(pixels)["stem"].square().mean().backward()
        conv = next(m for m in network.modules() if isinstance(m, nn.Conv2d))
        gradients.append(conv.weight.grad)
    error = (gradients[0] - gradients[1].flip(1)).abs().max() / gradients[0].abs().max()
    assert error < 0.05  # eps counts less beside larger variances


def test_what_cannot_be_folded():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1))
    with pytest.raises(WeightsError, match="2 convolutions of 3 channels"):
        fold_normalisation(network, network.state_dict(), PIXELS)
    network = nn.Sequential(nn.Conv2d(3, 4, 1))
    with pytest.raises(WeightsError, match="BGR images"):
        fold_normalisation(network, network.state_dict(), PixelSettings("BGR", MEAN, STD))


@pytest.mark.parametrize(("bias", "var"), [(True, 1.0), (False, 1e-6)])
def test_a_bias_before_the_norm_and_a_variance_below_eps(bias, var):
    network = scramble(nn.Sequential(nn.Conv2d(3, 4, 1, bias=bias), nn.BatchNorm2d(4)))
    nn.init.constant_(network[1].running_var, var)
    state, _ = fold_normalisation(network, network.state_dict(), PIXELS)
    network.double().eval()
    image = torch.randint(0, 256, (1, 3, 5, 4)).double()
    mean, std = (torch.tensor(v).view(3, 1, 1).double() for v in (MEAN, STD))
    expected = network((image - mean) / std)
    network.load_state_dict(state)
    found = network(image.flip(1) - mean.flip(0))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
