"""Loading a backbone from a file, completely or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lambda_det.errors import WeightsError

# What stands before a backbone's own names in checkpoints of detectors with FPN, of detectors and
# classifiers, and in its own.
PREFIXES = ("backbone.bottom_up.", "backbone.", "")


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint, without unpickling anything that could run code.

    Args:
        path: a ``.pth`` file of a state dict, or of a dict with one under "model" as Detectron2
            writes it.

    Raises:
        WeightsError: if the file is missing, damaged, or holds other things than tensors and plain
            values.
    """
    if not Path(path).is_file():
        raise WeightsError(f"There is no checkpoint file {path}; check the path.")
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a damaged file
        raise WeightsError(
            f"{path} cannot be read as a checkpoint of tensors and plain values, so it is damaged "
            f"or not safe to load ({str(error).splitlines()[0]})."
        ) from error
    state = content.get("model", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not any(isinstance(x, Tensor) for x in state.values()):
        raise WeightsError(f"{path} holds no state dict, neither at its top nor under 'model'.")
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def load_backbone_weights(backbone: nn.Module, path: str | Path) -> None:
    """Load every parameter and running statistic of ``backbone`` from a file.

    Raises:
        WeightsError: if the file cannot be read, or a tensor of the backbone is not in it or has
            another shape; the backbone is unchanged then.
    """
    state = read_state_dict(path)
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
