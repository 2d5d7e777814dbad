"""Backbone files in each of their forms: written, folded, checked and loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lambda_det.errors import ConfigError, WeightsError
from lambda_det.files import replace_file
from lambda_det.weights.formats import WRITERS, read_checkpoint
from lambda_det.weights.names import compare, fitting, named_as_in, tensors_only
from lambda_det.weights.provenance import (
    AUTHOR,
    FORMAT,
    PixelSettings,
    check_provenance,
    initial_weights,
    named_network,
    wanted_pixels,
)

__all__ = [
    "check_target",
    "fold_normalisation",
    "load_backbone_weights",
    "read_backbone",
    "save_backbone",
]


def check_target(path: str | Path, *, overwrite: bool = False) -> None:
    """Refuse to write a backbone file of that name; write nothing.

    Raises:
        ConfigError: the name has no known ending, or is there already.
    """
    path = Path(path)
    if path.suffix not in WRITERS:
        raise ConfigError(
            f"The backbone file {path} must have a name that ends in one of {', '.join(WRITERS)}."
        )
    if path.is_dir() or (path.exists() and not overwrite):
        raise ConfigError(f"{path} is there already; give another name, or --overwrite.")


def save_backbone(content: Mapping[str, Any], path: str | Path, *, overwrite: bool = False) -> None:
    """Write a backbone file, at once or not at all.

    Args:
        content: of :func:`lambda_det.weights.extract_backbone`.
        path: ends in .pth, .pkl (Detectron2's model zoo; arrays) or .safetensors. Detectron2's own
            checkpointer reads the first two.
        overwrite: replace a file that is there.

    Raises:
        ConfigError: the name is not one to write to.
    """
    check_target(path, overwrite=overwrite)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda file: WRITERS[path.suffix](content, file))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


def read_backbone(path: str | Path) -> dict[str, Any]:
    """Read a file of :func:`save_backbone`, of any form.

    Returns:
        What :func:`lambda_det.weights.extract_backbone` made, with tensors for arrays.

    Raises:
        WeightsError: it cannot be read, is another file, or is not what was written.
    """
    content = read_checkpoint(path)
    if content.get("__author__") != AUTHOR or "meta" not in content:
        raise WeightsError(
            f"{path} is no backbone file of lambda_det; tools/export_backbone.py makes one from a "
            "checkpoint."
        )
    check_provenance(content, path)
    if content["meta"]["format"] != FORMAT:
        raise WeightsError(
            f"{path} is of an older lambda_det, which says less of the network in it: it can still "
            "be loaded, but not looked at or written anew; export the backbone again."
        )
    return {**content, "model": dict(tensors_only(content["model"], path))}


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


logger = logging.getLogger(__name__)


def load_backbone_weights(
    backbone: nn.Module, path: str | Path, name: str | None = None
) -> PixelSettings | None:
    """Load every parameter and running statistic of ``backbone`` from a file.

    Args:
        backbone: any module.
        path: a backbone file, a checkpoint of a classifier, whose averaged weights are taken if it
            has them, or of a detector, or a bare state dict; the names may have any of the prefixes
            of :func:`lambda_det.weights.names.bare_name`.
        name: of the model that the backbone is; a file that says it is of another is refused.

    Returns:
        The images that the weights are for, if the file says so.

    Raises:
        WeightsError: if the file cannot be read or is not what it says, or a tensor of the backbone
            is not in it or has another shape; the backbone is unchanged then.
    """
    content = read_checkpoint(path)
    check_provenance(content, path)
    there, options = named_network(content)
    if name is not None and there not in (None, name):
        raise WeightsError(
            f"{path} is of {there}{options}, and this is {name}: take the file of a {name}, or "
            f"make the backbone {there!r}."
        )
    state, which = initial_weights(content)
    own = backbone.state_dict()
    state = named_as_in(own, "", tensors_only(state, path), path)
    fit = compare(own, state)
    if not fit:
        said = f" It is of {there}{options}." if there else ""
        raise WeightsError(
            f"{path} does not fit the backbone: {fit.summary()}. Check the model's name and "
            f"options.{said}"
        )
    backbone.load_state_dict(fitting(own, state), strict=False)
    pixels = wanted_pixels(content)
    logger.info(f"Loaded {which} of {path}" + (f", for images in {pixels}" if pixels else ""))
    return pixels
