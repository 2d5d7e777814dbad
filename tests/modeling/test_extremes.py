"""Images that no camera makes give finite features and gradients in float32 and bfloat16."""

import pytest
import torch
from torch import nn

import lambda_det

DTYPES = [torch.float32, torch.bfloat16]
# A normalised image reaches from about -2.2 to 2.7
IMAGES = {
    "black": torch.full((2, 3, 33, 40), -2.2),
    "white": torch.full((2, 3, 33, 40), 2.7),
    "large": 10 * torch.randn(2, 3, 33, 40, generator=torch.Generator().manual_seed(0)),
}
# A lambda layer multiplies two functions of its input, so that sizes are squared from layer to
# layer. Only the statistics of a batch, in training, bring these back
LARGE = {
    "very large": 1e4 * torch.randn(2, 3, 33, 40, generator=torch.Generator().manual_seed(0)),
    "very large and even": torch.full((2, 3, 32, 32), 1e4),
}
NETWORKS = [
    ("lambda_resnet26_slim", {"mask_padding": True}),
    ("lambda_resnet26_slim", {"global_context": 64}),
    ("lambda_resnet50", {"out_features": ["res4", "res5"]}),
    ("resnet_rs101_se", {"out_features": ["res2", "res3"]}),
    ("mobilenet_v2_lambda", {}),
]


def _network(name, options):
    """As after some training: no branch is multiplied by 0, and statistics are those of images."""
    torch.manual_seed(0)
    net = lambda_det.create_backbone(name, **options)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            module.momentum = 0.7
    net.train()
    with torch.no_grad():
        for _ in range(2):
            net(torch.randn(2, 3, 64, 64))
    return net


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), NETWORKS, ids=str)
def test_features_and_gradients_are_finite(name, options):
    net = _network(name, options)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    for dtype in DTYPES:
        for training, images in ((False, IMAGES), (True, IMAGES | LARGE)):
            for what, image in images.items():
                net.float().load_state_dict(state)
                net.to(dtype).train(training).zero_grad()
                features = net(image.to(dtype))
                for stage, x in features.items():
                    assert x.dtype is dtype
                    assert x.isfinite().all(), (dtype, training, what, stage)
                if training and "slim" in name:
                    sum(x.float().square().mean() for x in features.values()).backward()
                    for parameter, tensor in net.named_parameters():
                        assert tensor.grad.isfinite().all(), (dtype, what, parameter)
