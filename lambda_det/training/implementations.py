"""The lambda layer's kernels that a run takes on GPUs: the same in all processes, and recorded.

See :mod:`lambda_det.layers.local.verdict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from detectron2.utils import comm

from lambda_det.layers.local import verdict

__all__ = ["agree", "continue_with", "taken"]


def agree(device: str) -> None:
    """Let every process take what is proved for the GPUs of all; call it in each of them."""
    if place := _place(device):
        proved, about = verdict.read(torch.device(place))
        common = proved.intersection(*comm.all_gather(proved))
        verdict.allow(place, common, about if common == proved else "another process has less")


def continue_with(device: str, recorded: Mapping[str, Any]) -> None:
    """Keep what the run took before, or say what changes; call it after :func:`agree`."""
    if place := _place(device):
        verdict.continue_with(place, recorded)


def taken(device: str) -> dict[str, Any]:
    """What a checkpoint keeps for :func:`continue_with`."""
    place = _place(device)
    return {"fused": sorted(verdict.allowed(place))} if place else {}


def _place(device: str) -> str | None:
    """The device as tensors on it name it; None where no verdicts are for it."""
    place = torch.device(device)
    if place.type not in verdict.DEVICES:
        return None
    if place.type == "cuda" and place.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(place)
