"""Images that no camera makes give finite features in every precision."""

import pytest
import torch
from torch import nn

import lambda_det

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMAGES = {
    "black": torch.full((2, 3, 33, 40), -2.2),
    "white": torch.full((2, 3, 33, 40), 2.7),
    "large": 1e4 * torch.randn(2, 3, 33, 40, generator=torch.Generator().manual_seed(0)),
    "large and even": torch.full((2, 3, 32, 32), 1e4),
}
# Name, options
NETWORKS = {
    "lambda_resnet26": {},
    "padding masked": {"mask_padding": True},
    "global context": {"global_context": 64},
    "resnet_rs101_se": {"out_features": ["res2", "res3"]},
    "mobilenet_v2_lambda": {},
}


def _network(name, options):
    """As after some training: no branch is multiplied by 0, and statistics are those of images."""
    torch.manual_seed(0)
    net = lambda_det.create_backbone(
        name if name in lambda_det.list_models() else "lambda_resnet26", **options
    )
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            module.momentum = 0.7
    net.train()
    with torch.no_grad():
        for _ in range(2):
            net(torch.randn(2, 3, 64, 64))
    return net


@pytest.mark.parametrize(("name", "options"), NETWORKS.items(), ids=list(NETWORKS))
def test_features_are_finite(name, options):
    net = _network(name, options)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    for dtype in DTYPES:
        for training in (False, True):
            for what, image in IMAGES.items():
                net.float().load_state_dict(state)
                net.to(dtype).train(training)
                with torch.no_grad():
                    features = net(image.to(dtype))
                for stage, x in features.items():
                    assert x.dtype is dtype
                    assert x.isfinite().all(), (dtype, training, what, stage)


@pytest.mark.parametrize("size", [(1, 1), (500, 7), (8000, 50)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_sizes(dtype, size):
    net = _network("lambda_resnet26", {}).to(dtype).eval()
    with torch.no_grad():
        features = net(torch.randn(1, 3, *size).to(dtype))
    assert all(x.isfinite().all() for x in features.values())


def test_a_fresh_network_multiplies_no_infinite_number_by_zero():
    net = lambda_det.create_backbone("lambda_resnet26").half().eval()  # its last norms have gamma 0
    with torch.no_grad():
        features = net(IMAGES["large"].half())
    assert all(x.isfinite().all() for x in features.values())


def test_autocast_of_float16():
    net = _network("lambda_resnet26", {}).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        features = net(IMAGES["large"])
    assert all(x.isfinite().all() for x in features.values())


def test_numbers_do_not_run_away_through_many_lambda_layers():
    net = _network("lambda_resnet50", {}).eval()
    for dtype in DTYPES:
        with torch.no_grad():
            features = net.to(dtype)(IMAGES["large"].to(dtype))
        assert all(x.isfinite().all() for x in features.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_finite(dtype):
    net = _network("lambda_resnet26", {}).to(dtype)
    for image in IMAGES.values():
        net.zero_grad()
        sum(x.float().square().mean() for x in net(image.to(dtype)).values()).backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad.isfinite().all(), name
