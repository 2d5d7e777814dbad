"""The normalisation of images, moved from before a network into its first convolution."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lambda_det.errors import WeightsError
from lambda_det.weights.provenance import PixelSettings

__all__ = ["fold_normalisation"]


def fold_normalisation(
    backbone: nn.Module, state: Mapping[str, Tensor], pixels: PixelSettings
) -> tuple[dict[str, Tensor], PixelSettings]:
    """Turn a network for RGB images, divided by their std, into one for undivided BGR images.

    With BGR images less their mean it computes what it did before: padding is 0 for both, so this
    is exact at the border, too. The weights are divided by std and their input channels reversed.
    Where a batch norm follows, they are multiplied by the mean of std again and the statistics take
    that factor: weights 57 times smaller under a norm would learn 57^2 times faster than the others
    (van Laarhoven, 2017), and the first steps of fine-tuning would wipe them out.

    Args:
        backbone: whose structure to look at; it needs no values.
        state: its tensors.
        pixels: of the training, RGB.

    Returns:
        A new state and the pixel settings it is for: BGR, std 1.

    Raises:
        WeightsError: the network or the pixel settings are others.
    """
    modules = list(backbone.named_modules())
    first = [
        index
        for index, (_, module) in enumerate(modules)
        if isinstance(module, nn.Conv2d) and module.in_channels == 3
    ]
    if len(first) != 1 or pixels.format != "RGB":
        raise WeightsError(
            f"The input normalisation cannot be folded into a network for {pixels.format} images "
            f"with {len(first)} convolutions of 3 channels; use --no-fold."
        )
    (name, conv), *following = modules[first[0] :]
    # The norm of Detectron2's convolutions is a part of them, torchvision's comes after: in either
    # case the next module
    norm_name, norm = following[0] if following else ("", None)
    std = torch.tensor(pixels.std, dtype=torch.float64)
    result = dict(state)
    factor = 1.0
    if isinstance(norm, _BatchNorm) and conv.bias is None:
        factor = std.mean().item()
        mean, var = f"{norm_name}.running_mean", f"{norm_name}.running_var"
        result[mean] = (state[mean].double() * factor).float()
        # var + eps is what the output is divided by, and has to take the factor as a whole
        result[var] = ((state[var].double() + norm.eps) * factor**2 - norm.eps).float()
    weight = state[f"{name}.weight"].double() * factor / std[:, None, None]
    result[f"{name}.weight"] = weight.flip(1).float().contiguous()
    return result, PixelSettings("BGR", pixels.mean[::-1], (1.0, 1.0, 1.0))
