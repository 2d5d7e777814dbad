"""The lambda layer's kernels that a run takes on GPUs: the same in all processes, and recorded.

See :mod:`lambda_det.layers.local.verdict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm

from lambda_det.layers.local import verdict


class Implementations(HookBase):
    """Lets a run take the same on all processes, and after a resume what it took before.

    Make one in every process: it asks what is proved for the GPUs of all.

    Args:
        device: of the run.
    """

    def __init__(self, device: str) -> None:
        place = torch.device(device)
        if place.type == "cuda" and place.index is None and torch.cuda.is_available():
            place = torch.device("cuda", torch.cuda.current_device())
        # As tensors on it name it; None where no verdicts are for it
        self._place = str(place) if place.type in verdict.DEVICES else None
        if self._place:
            proved, about = verdict.read(torch.device(self._place))
            common = proved.intersection(*comm.all_gather(proved))
            about = about if common == proved else "another process has less"
            verdict.allow(self._place, common, about)

    def state_dict(self) -> dict[str, Any]:
        return {"fused": sorted(verdict.allowed(self._place))} if self._place else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._place:
            verdict.continue_with(self._place, state)
