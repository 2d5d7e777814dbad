"""The length of a classifier's training in steps, and its learning rate."""

from __future__ import annotations

import math

from detectron2.config import CfgNode
from fvcore.common.param_scheduler import ParamScheduler

from lambda_det.errors import ConfigError
from lambda_det.training import schedules
from lambda_det.training.settings import check_division


class EpochSchedule(ParamScheduler):
    """Learning rate as a multiple of its peak: a linear warm-up, then SOLVER.SCHEDULE.

    Call it with the share of the training that is done, 0 to 1; it returns the multiple.
    """

    def __init__(self, cfg: CfgNode) -> None:
        """
        Raises:
            ConfigError: SOLVER.SCHEDULE is unknown, or the warm-up fills the whole training.
        """
        solver = cfg.SOLVER
        schedule = schedules.schedule_of(solver, "SCHEDULE")
        if solver.WARMUP_EPOCHS >= solver.EPOCHS:
            raise ConfigError(
                f"SOLVER.WARMUP_EPOCHS is {solver.WARMUP_EPOCHS}; it must be below SOLVER.EPOCHS, "
                f"{solver.EPOCHS}."
            )
        self._solver = solver
        # It begins at the end of the warm-up, so the peak is reached. The paper does not say where
        # its cosine begins, and no code of its trainings is public. EfficientNet's code begins at
        # epoch 0: at the end of the warm-up it has 0.9924 (90 epochs) or 0.9995 (350) of the peak.
        self._rate = schedule.make(solver, solver.WARMUP_EPOCHS, solver.EPOCHS)

    def __call__(self, where: float) -> float:
        solver = self._solver
        epoch = where * solver.EPOCHS
        ahead = 0
        if solver.LR_BY_EPOCH:
            epoch = math.floor(epoch + 1e-6)  # rounding may end a step just before the epoch ends
            ahead = 1  # the rate must not be 0 in the first epoch of the warm-up
        if epoch < solver.WARMUP_EPOCHS:
            return min((epoch + ahead) / solver.WARMUP_EPOCHS, 1.0)
        length = solver.EPOCHS - solver.WARMUP_EPOCHS
        return self._rate((epoch - solver.WARMUP_EPOCHS) / length)


def peak_learning_rate(cfg: CfgNode) -> float:
    """SOLVER.BASE_LR, scaled to the images of one optimiser step (Goyal et al., 2017)."""
    return cfg.SOLVER.BASE_LR * cfg.SOLVER.IMS_PER_BATCH / cfg.SOLVER.LR_BATCH


class Plan:
    """The counts of images and steps of a training; its epochs are exact, and may end in a step.

    Attributes:
        images: of the training data.
        batch: of one optimiser step, over all processes and accumulated batches.
        forward: of one forward pass on one process.
        steps: of the whole training.
        eval_steps: between two evaluations; need not be whole, or they would drift from the epochs.
    """

    def __init__(self, cfg: CfgNode, images: int, world_size: int) -> None:
        """
        Raises:
            ConfigError: the batch cannot be divided among the processes.
        """
        solver = cfg.SOLVER
        check_division(solver.IMS_PER_BATCH, world_size, solver.ACCUMULATE_GRADIENTS)
        self.images = images
        self.batch = solver.IMS_PER_BATCH
        self.forward = self.batch // (world_size * solver.ACCUMULATE_GRADIENTS)
        per_epoch = images / self.batch
        self.steps = max(round(solver.EPOCHS * per_epoch), 1)
        self.eval_steps = max(cfg.TEST.EVAL_PERIOD * per_epoch, 1.0)
