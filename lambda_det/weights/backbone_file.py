"""Backbone files: write, read and load them, and fold the input normalisation into weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lambda_det.errors import WeightsError
from lambda_det.files import replace_file
from lambda_det.foundation import FrozenBatchNorm2d
from lambda_det.weights.formats import WRITERS, read_checkpoint
from lambda_det.weights.names import tensors_only
from lambda_det.weights.provenance import AUTHOR, PixelSettings, check_provenance


def save_backbone(content: Mapping[str, Any], path: str | Path) -> None:
    """Write a backbone file. After a crash it is complete or not there.

    Args:
        content: made by :func:`lambda_det.export.backbone.extract_backbone`.
        path: ends in .pth, which Detectron2's own checkpointer reads, or .safetensors. Its folder
            must exist.
    """
    replace_file(path, lambda file: WRITERS[Path(path).suffix](content, file))


def read_backbone(path: str | Path) -> dict[str, Any]:
    """Read a file of :func:`save_backbone`, in either of its file types.

    Returns:
        The content that was written. Arrays are converted to tensors.

    Raises:
        WeightsError: the file cannot be read, is no backbone file, or was changed.
    """
    content = read_checkpoint(path)
    if content.get("__author__") != AUTHOR or "meta" not in content:
        raise WeightsError(
            f"{path} is no backbone file of lambda_det; tools/export_backbone.py makes one from a "
            "checkpoint."
        )
    check_provenance(content, path)
    return {**content, "model": dict(tensors_only(content["model"], path))}


def fold_normalisation(
    backbone: nn.Module,
    state: Mapping[str, Tensor],
    pixels: PixelSettings,
    target: PixelSettings | None = None,
) -> tuple[dict[str, Tensor], PixelSettings]:
    """Fold std and the channel order of images into the first convolution.

    By default the result takes BGR images with the mean subtracted and a std of 1, as Detectron2's
    models do. It computes the same features; padding is 0 in both cases, so this also holds at the
    border.

    The weights are divided by std and their input channels are reversed. If a batch norm follows,
    the weights are then multiplied by the mean of std, and the running statistics are scaled
    accordingly. Otherwise the weights would be some 57 times smaller than in training. Weights
    before a norm have an effective learning rate proportional to 1 / |w|^2 (van Laarhoven, 2017),
    so the first steps of fine-tuning would destroy them.

    Args:
        backbone: gives the structure. Its values are not used, so it may be on the meta device.
        state: the tensors of the backbone.
        pixels: the pixel settings of the training, RGB or BGR.
        target: the pixel settings of the result, with the same mean.

    Returns:
        A new state dict, and ``target``.

    Raises:
        WeightsError: there is not exactly one convolution of 3 channels, or the channels have
            another order.
    """
    target = target or replace(pixels.in_order("BGR"), std=(1.0, 1.0, 1.0))
    modules = list(backbone.named_modules())
    first = [
        index
        for index, (_, module) in enumerate(modules)
        if isinstance(module, nn.Conv2d) and module.in_channels == 3
    ]
    if len(first) != 1 or pixels.format not in ("RGB", "BGR"):
        raise WeightsError(
            f"The input normalisation cannot be folded into a network for {pixels.format} images "
            f"with {len(first)} convolutions of 3 channels."
        )
    # Detectron2's norm is a child of the convolution, torchvision's follows it. In both cases it is
    # the next module.
    (name, conv), (norm_name, norm), *_ = [*modules[first[0] :], ("", None)]
    same_order = target.in_order(pixels.format)
    std = torch.tensor(pixels.std, dtype=torch.float64) / torch.tensor(same_order.std).double()
    result = dict(state)
    factor = 1.0
    if isinstance(norm, (_BatchNorm, FrozenBatchNorm2d)) and conv.bias is None:
        factor = std.mean().item()
        mean, var = f"{norm_name}.running_mean", f"{norm_name}.running_var"
        result[mean] = (state[mean].double() * factor).float()
        # The output is divided by sqrt(var + eps), so the sum has to be scaled, not only var
        result[var] = ((state[var].double() + norm.eps) * factor**2 - norm.eps).float()
    weight = state[f"{name}.weight"].double() * factor / std[:, None, None]
    if target.format != pixels.format:
        weight = weight.flip(1)
    result[f"{name}.weight"] = weight.float().contiguous()
    return result, target
