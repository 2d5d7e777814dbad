"""Files of weights, read without running what is in them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn

from lambda_det.errors import WeightsError
from lambda_det.weights.formats import READERS, read_torch
from lambda_det.weights.names import compare, fitting, named_as_in, tensors_only
from lambda_det.weights.provenance import (
    PixelSettings,
    check_provenance,
    initial_weights,
    named_network,
    wanted_pixels,
)

__all__ = ["load_backbone_weights", "read_checkpoint"]

logger = logging.getLogger(__name__)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a file of weights and plain values, by its ending, and run nothing in it.

    Args:
        path: of Detectron2's or Caffe2's pickles with .pkl, safetensors with .safetensors, else of
            ``torch.save``.

    Raises:
        WeightsError: if the file is missing or damaged, or holds anything else.
    """
    try:
        content = READERS.get(Path(path).suffix, read_torch)(path)
    except FileNotFoundError as error:
        raise WeightsError(f"There is no checkpoint file {path}; check the path.") from error
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be read ({error.strerror or error}); check the path and its rights."
        ) from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__}, not a state dict.")
    return content


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
