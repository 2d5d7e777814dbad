"""Networks of timm and torchvision with random weights and the statistics of random images."""

import timm
import torch
import torchvision
from torch import nn


def make(library: str, name: str, size: int = 96, **options) -> nn.Module:
    """A network in evaluation mode whose every tensor counts.

    The statistics are those of a batch, as after a training: with others, rounding errors would
    grow from layer to layer.
    """
    torch.manual_seed(0)
    create = timm.create_model if library == "timm" else torchvision.models.get_model
    network = create(name, **options).train()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
        for module in network.modules():
            if hasattr(module, "running_mean"):
                module.momentum = 1.0
        network(torch.randn(2, 3, size, size))
    return network.eval()
