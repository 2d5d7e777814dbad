"""Loading a backbone from a file, completely or not at all."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lambda_det.errors import WeightsError

# What stands before a backbone's own names in checkpoints of detectors with FPN, of detectors and
# classifiers, and in its own.
PREFIXES = ("backbone.bottom_up.", "backbone.", "")


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
            f"{path} cannot be read: it is damaged or was not written to the end; take an older "
            "checkpoint."
        ) from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__}, not a state dict.")
    return content


def load_backbone_weights(backbone: nn.Module, path: str | Path) -> None:
    """Load every parameter and running statistic of ``backbone`` from a file.

    Args:
        backbone: any module.
        path: a ``.pth`` of its state dict, or of one under "model" as Detectron2 writes it, whose
            names may begin with one of ``PREFIXES``.

    Raises:
        WeightsError: if the file cannot be read, or a tensor of the backbone is not in it or has
            another shape; the backbone is unchanged then.
    """
    content = read_checkpoint(path)
    state = content.get("model", content)
    wanted = {
        name: tensor
        for name, tensor in backbone.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    prefix = max(PREFIXES, key=lambda start: sum(start + name in state for name in wanted))
    offenders = [
        f"{name} {'is missing' if prefix + name not in state else 'has another shape'}"
        for name, tensor in wanted.items()
        if prefix + name not in state or state[prefix + name].shape != tensor.shape
    ]
    if offenders:
        raise WeightsError(
            f"{path} does not fit the backbone: {len(offenders)} of its {len(wanted)} tensors "
            f"don't match, the first being {'; '.join(offenders[:3])}. Check the model's name and "
            "options."
        )
    backbone.load_state_dict({name: state[prefix + name] for name in wanted}, strict=False)
