"""The kernels of this package in a model of Detectron2."""

from __future__ import annotations

import torch
from detectron2.modeling.roi_heads import BaseKeypointRCNNHead
from torch import nn

from lambda_det.cpu.pooling import patch_pooling
from lambda_det.cpu.winograd import use_winograd


def accelerate(
    model: nn.Module, *, channels_last: bool = True, mixed_precision: bool = False
) -> nn.Module:
    """Let any model of Detectron2 convolve and pool boxes on a CPU in less time.

    Results differ by rounding. Weights keep their names and shapes. On another device, in graphs
    and without a C++ compiler the model computes as before.

    Args:
        model: is changed. It can be trained afterwards.
        channels_last: lay out the weights of convolutions so that all maps are channels last; the
            3x3 convolutions of this package need it.
        mixed_precision: pool boxes in float32 under autocast, where torchvision rounds their
            corners: in bfloat16 to every fourth whole number between 512 and 1024.

    Returns:
        The model.
    """
    patch_pooling(model, in_float32=mixed_precision)
    use_winograd(model)
    if channels_last:
        use_channels_last(model)
    return model


def use_channels_last(model: nn.Module) -> None:
    """Lay the weights of all convolutions out so that their outputs are channels last.

    The first convolution lays out the image, and all that follows keeps the layout of its input.
    Detectron2's keypoint loss needs contiguous maps.
    """
    left = {
        part
        for head in model.modules()
        if isinstance(head, BaseKeypointRCNNHead)
        for part in head.modules()
    }
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d) and module not in left:
            module.to(memory_format=torch.channels_last)
