"""Learning rate schedules: Detectron2's, and the polynomial one of its DeepLab."""

from __future__ import annotations

from typing import Any

from detectron2.config import CfgNode
from detectron2.solver import build_lr_scheduler as build_detectron2_scheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["build_lr_scheduler"]


def build_lr_scheduler(cfg: CfgNode, optimizer: Optimizer) -> LRScheduler:
    """The schedule of ``SOLVER.LR_SCHEDULER_NAME``; WarmupPolyLR is that of DeepLab.

    SOLVER.STEPS may lie beyond SOLVER.MAX_ITER, as in a run that is made shorter.
    """
    if any(step >= cfg.SOLVER.MAX_ITER for step in cfg.SOLVER.STEPS):
        # Detectron2 drops those above it, and fvcore raises an error at the one that is equal
        cfg = cfg.clone()
        cfg.defrost()
        cfg.SOLVER.STEPS = tuple(s for s in cfg.SOLVER.STEPS if s < cfg.SOLVER.MAX_ITER)
    if cfg.SOLVER.LR_SCHEDULER_NAME != "WarmupPolyLR":
        return build_detectron2_scheduler(cfg, optimizer)
    # Its keys are only there where the project is
    from detectron2.projects import deeplab

    scheduler = deeplab.build_lr_scheduler(cfg, optimizer)

    class _WarmupPolyLR(type(scheduler)):
        """Saves how far it is and not its form, as Detectron2's other schedules do.

        The project's own saves its number of steps, too, and a run that is resumed to be longer
        ends in a root of a negative number.
        """

        def state_dict(self) -> dict[str, Any]:
            return {"base_lrs": self.base_lrs, "last_epoch": self.last_epoch}

    scheduler.__class__ = _WarmupPolyLR
    return scheduler
