"""Networks of timm and torchvision against ours with their weights, in float64."""

import pytest
import timm
import torch
from torch import nn

import lambda_det
from lambda_det.weights.import_names import import_weights
from tests.weights.public_networks import make

SIZES = ((32, 32), (33, 50), (65, 31))
# timm's average pooling of lambda maps drops the last row of an odd one, and fails at the shortcut
EVEN_MAPS = ((64, 64), (255, 319), (61, 95))
ONE_SIZE = ((256, 256),)  # of timm's global embeddings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "theirs", "ours", "sizes"),
    [
        ("timm", "mobilenetv2_100", "mobilenet_v2", SIZES),
        ("torchvision", "mobilenet_v2", "mobilenet_v2", SIZES),
        ("timm", "lambda_resnet26t", "lambda_resnet26t", EVEN_MAPS),
        ("timm", "lambda_resnet26rpt_256", "lambda_resnet26rpt_256", ONE_SIZE),
        ("timm", "lambda_resnet50ts", "lambda_resnet50ts", SIZES),
        ("timm", "resnet50", "resnet50", SIZES),
        ("torchvision", "resnet50", "resnet50", SIZES),
        ("timm", "resnetrs50", "resnet_rs50_se", SIZES),
    ],
)
@torch.no_grad()
def test_the_output_is_theirs(library, theirs, ours, sizes):
    network = make(library, theirs, size=256 if sizes is ONE_SIZE else 64).double()
    content = import_weights(network.state_dict(), "w.pth")
    own = lambda_det.create_classifier(ours).double().eval()
    missing, unexpected = own.load_state_dict(content["model"], strict=False)
    assert not unexpected and all(name.endswith("num_batches_tracked") for name in missing)
    for size in sizes:
        image = torch.randn(1, 3, *size, dtype=torch.float64)
        expected = network(image)
        assert (own(image) - expected).abs().max() < 1e-12 * expected.abs().max()


@pytest.mark.slow
def test_every_tensor_of_another_depth_has_its_place():
    """With blocks of two digits; otherwise they are those of 50 layers, above."""
    with torch.device("meta"):
        theirs = timm.create_model("resnetrs101").state_dict()
        ours = lambda_det.create_classifier("resnet_rs101_se").state_dict()
    found = import_weights(theirs, "w.pth")["model"]
    shapes = {name: value.shape for name, value in ours.items() if value.dim()}
    assert {name: value.shape for name, value in found.items() if value.dim()} == shapes


@pytest.fixture(scope="module")
def mobilenet():
    return make("torchvision", "mobilenet_v2")


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s}, lambda s: {"model": s}])
def test_a_plain_file_is_loaded_into_a_backbone(mobilenet, tmp_path, wrap):
    torch.save(wrap(mobilenet.state_dict()), tmp_path / "w.pth")
    backbone = lambda_det.create_backbone("mobilenet_v2", ("res5",), tmp_path / "w.pth").eval()
    assert backbone.pixel_settings.format == "RGB"
    assert backbone.pixel_settings.std == [58.395, 57.12, 57.375]
    image = torch.randn(1, 3, 40, 50)
    with torch.no_grad():
        assert torch.equal(backbone(image)["res5"], mobilenet.features(image))


def test_other_files_stay_as_they_are():
    for model in (nn.Linear(2, 2), lambda_det.create_backbone("lambda_resnet26_slim", scope=3)):
        content = {"model": model.state_dict(), "iteration": 3}
        assert import_weights(content, "w.pth") == content
    assert import_weights({"state_dict": 3}, "w.pth") == {"model": {"state_dict": 3}}
