"""The optimisers of the recipes, the length of a training in steps, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from detectron2.config import CfgNode
from detectron2.solver.build import get_default_optimizer_params
from fvcore.common.param_scheduler import ParamScheduler
from torch import nn

from lambda_det.errors import ConfigError, refused
from lambda_det.training.settings import check_division

__all__ = ["EpochSchedule", "Plan", "build_optimizer", "peak_learning_rate", "plan_training"]


def _cosine(cfg: CfgNode, epoch: float) -> float:
    # The cosine begins at the end of the warm-up, so the peak is reached. The paper does not say
    # where it begins, and no code of its trainings is public. EfficientNet's code begins at epoch
    # 0: at the end of the warm-up it is at 0.9924 of the peak (90 epochs) or 0.9995 (350).
    length = cfg.SOLVER.EPOCHS - cfg.SOLVER.WARMUP_EPOCHS
    return 0.5 * (1 + math.cos(math.pi * (epoch - cfg.SOLVER.WARMUP_EPOCHS) / length))


def _exponential(cfg: CfgNode, epoch: float) -> float:
    return cfg.SOLVER.DECAY ** math.floor(
        (epoch - cfg.SOLVER.WARMUP_EPOCHS) / cfg.SOLVER.DECAY_EPOCHS + 1e-9
    )


_SHAPES: dict[str, Callable[[CfgNode, float], float]] = {
    "cosine": _cosine,
    "exponential": _exponential,
}


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
        if solver.SCHEDULE not in _SHAPES:
            raise ConfigError(
                f"SOLVER.SCHEDULE is {solver.SCHEDULE!r}; it can be one of {list(_SHAPES)}."
            )
        if solver.WARMUP_EPOCHS >= solver.EPOCHS:
            raise ConfigError(
                f"SOLVER.WARMUP_EPOCHS is {solver.WARMUP_EPOCHS}; it must be below SOLVER.EPOCHS, "
                f"{solver.EPOCHS}."
            )
        self._cfg = cfg

    def __call__(self, where: float) -> float:
        solver = self._cfg.SOLVER
        epoch = where * solver.EPOCHS
        ahead = 0
        if solver.LR_BY_EPOCH:
            epoch = math.floor(epoch + 1e-6)  # rounding may end a step just before the epoch ends
            ahead = 1  # the rate must not be 0 in the first epoch of the warm-up
        if epoch < solver.WARMUP_EPOCHS:
            return min((epoch + ahead) / solver.WARMUP_EPOCHS, 1.0)
        return _SHAPES[solver.SCHEDULE](self._cfg, epoch)


def peak_learning_rate(cfg: CfgNode) -> float:
    """SOLVER.BASE_LR, scaled to the images of one optimiser step (Goyal et al., 2017)."""
    return cfg.SOLVER.BASE_LR * cfg.SOLVER.IMS_PER_BATCH / cfg.SOLVER.LR_BATCH


def _sgd(groups: list[dict], cfg: CfgNode) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=cfg.SOLVER.MOMENTUM, nesterov=cfg.SOLVER.NESTEROV)


def _adam(groups: list[dict], cfg: CfgNode) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, betas=tuple(cfg.SOLVER.BETAS))


def _rmsprop(groups: list[dict], cfg: CfgNode) -> torch.optim.Optimizer:
    # timm's follows TensorFlow, which the paper's MobileNet was trained with: epsilon inside the
    # root, squares that start at 1, the learning rate within the momentum. PyTorch's differs in all
    # three. Decay and epsilon are those of TensorFlow's mobile networks.
    what, advice = "SOLVER.OPTIMIZER rmsprop is timm's", "install it (`pip install timm`)"
    with refused(ConfigError, what, advice, ImportError):
        from timm.optim import RMSpropTF

    return RMSpropTF(groups, lr=1.0, alpha=0.9, eps=1e-3, momentum=cfg.SOLVER.MOMENTUM)


_OPTIMIZERS: dict[str, Callable[[list[dict], CfgNode], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
    "rmsprop": _rmsprop,
}


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of ``cfg`` over all parameters of ``model`` that are trained.

    Raises:
        ConfigError: SOLVER.OPTIMIZER is unknown, or SOLVER.NESTEROV has no momentum.
    """
    solver = cfg.SOLVER
    if solver.OPTIMIZER not in _OPTIMIZERS:
        raise ConfigError(
            f"SOLVER.OPTIMIZER is {solver.OPTIMIZER!r}; it can be one of {list(_OPTIMIZERS)}."
        )
    if solver.NESTEROV and solver.MOMENTUM == 0:
        raise ConfigError("SOLVER.NESTEROV needs a SOLVER.MOMENTUM above 0.")
    groups = get_default_optimizer_params(
        model,
        base_lr=peak_learning_rate(cfg),
        weight_decay=solver.WEIGHT_DECAY,
        weight_decay_norm=solver.WEIGHT_DECAY_NORM,
    )
    return _OPTIMIZERS[solver.OPTIMIZER](groups, cfg)


@dataclass(frozen=True)
class Plan:
    """The counts of images and steps of a training.

    Attributes:
        images: of the training data.
        batch: of one optimiser step, over all processes and accumulated batches.
        forward: of one forward pass on one process.
        steps: of the whole training.
        eval_steps: between two evaluations; need not be whole, or they would drift from the epochs.
    """

    images: int
    batch: int
    forward: int
    steps: int
    eval_steps: float

    def epochs(self, steps: int) -> float:
        """Passes over the training data after a number of steps."""
        return steps * self.batch / self.images


def plan_training(cfg: CfgNode, images: int, world_size: int) -> Plan:
    """Count the steps; epochs are exact over the training, and may end within a step.

    Args:
        cfg: the recipe.
        images: of the training data.
        world_size: number of processes.

    Raises:
        ConfigError: the batch cannot be divided.
    """
    solver = cfg.SOLVER
    check_division(solver.IMS_PER_BATCH, world_size, solver.ACCUMULATE_GRADIENTS)
    shares = world_size * solver.ACCUMULATE_GRADIENTS
    per_epoch = images / solver.IMS_PER_BATCH
    return Plan(
        images=images,
        batch=solver.IMS_PER_BATCH,
        forward=solver.IMS_PER_BATCH // shares,
        steps=max(round(solver.EPOCHS * per_epoch), 1),
        eval_steps=max(cfg.TEST.EVAL_PERIOD * per_epoch, 1.0),
    )
