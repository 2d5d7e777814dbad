"""Which implementations of the lambda layer a run takes: the same in all processes, and recorded.

See :mod:`lambda_det.layers.local.verdict`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from detectron2.utils import comm

from lambda_det.layers.local import verdict
from lambda_det.layers.local.verdict import Verdict

__all__ = ["agree", "continue_with"]

logger = logging.getLogger(__name__)


def agree(device: str) -> None:
    """Let all processes take what the first one's verdict says; call it in every process.

    Where they are on different GPUs, or have other software, no verdict is for all of them.
    """
    place = _indexed(device)
    if place is None:
        return
    own = verdict.read(place)
    found = comm.all_gather(own)
    agreed = found[0]
    for rank, other in enumerate(found):
        differing = [name for name in own.key if other.key[name] != agreed.key[name]]
        if differing:
            about = (
                f"process {rank} differs from the first one in {', '.join(differing)}, and no "
                "verdict is for both"
            )
            agreed = Verdict(own.key, about=about)
            break
    verdict.use(place, agreed)
    logger.info(f"Local position output: {verdict.describe(agreed)}")


def continue_with(device: str, recorded: Mapping[str, Any]) -> None:
    """Keep what the run took before, or say what changes; call it after :func:`agree`."""
    place = _indexed(device)
    for change in verdict.keep(place, recorded) if place is not None else ():
        logger.warning(
            f"Another implementation of the local position output than before, {change}: the run "
            "goes on with results that differ in their last digits"
        )


def _indexed(device: str) -> torch.device | None:
    """The device as tensors on it name it; None where no verdicts are for it."""
    place = torch.device(device)
    if place.type not in verdict.DEVICES:
        return None
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place
