"""Files of weights, read without running what is in them."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lambda_det.errors import WeightsError
from lambda_det.modeling.provenance import check_provenance, initial_weights, wanted_pixels
from lambda_det.modeling.weight_names import compare, fitting, named_as_in, tensors_only

__all__ = ["load_backbone_weights", "read_checkpoint"]

logger = logging.getLogger(__name__)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a file of ``torch.save`` that holds tensors and plain values, and run nothing in it.

    Raises:
        WeightsError: if the file is missing or damaged, or holds anything else.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise WeightsError(f"There is no checkpoint file {path}; check the path.") from error
    except pickle.UnpicklingError as error:
        # torch's own message advises to switch the protection off
        raise WeightsError(
            f"{path} holds more than tensors, numbers, strings and containers of them, or is no "
            "checkpoint at all; reading it could run a program, so it is refused."
        ) from error
    except Exception as error:  # a damaged file may raise nearly anything
        raise WeightsError(
            f"{path} cannot be read: it is damaged, was not written to the end, or is not in the "
            "format of torch.save (.pth); take another checkpoint."
        ) from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__}, not a state dict.")
    return content


def load_backbone_weights(backbone: nn.Module, path: str | Path) -> None:
    """Load every parameter and running statistic of ``backbone`` from a file.

    Args:
        backbone: any module.
        path: a backbone file, a checkpoint of a classifier, whose averaged weights are taken if it
            has them, or of a detector, or a bare state dict; the names may have any of the prefixes
            of :func:`lambda_det.modeling.weight_names.bare_name`.

    Raises:
        WeightsError: if the file cannot be read or is not what it says, or a tensor of the backbone
            is not in it or has another shape; the backbone is unchanged then.
    """
    content = read_checkpoint(path)
    check_provenance(content, path)
    state, which = initial_weights(content)
    own = backbone.state_dict()
    state = named_as_in(own, "", tensors_only(state, path), path)
    fit = compare(own, state)
    if not fit:
        raise WeightsError(
            f"{path} does not fit the backbone: {fit.summary()}. Check the model's name and "
            "options."
        )
    backbone.load_state_dict(fitting(own, state), strict=False)
    pixels = wanted_pixels(content)
    logger.info(f"Loaded {which} of {path}" + (f", for images in {pixels}" if pixels else ""))
