"""The optimiser and schedule of a detector, fitted to the number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from detectron2.config import CfgNode
from detectron2.solver.lr_scheduler import WarmupParamScheduler
from fvcore.common.param_scheduler import ParamScheduler
from torch import nn
from torch.optim import Optimizer

from lambda_det.config import KEYS, POSITIVE, check
from lambda_det.errors import counted
from lambda_det.training import schedules
from lambda_det.training.log import log_table, show
from lambda_det.training.settings import Settings, check_division, read_yaml

# the settings that the number of processes changes
SCALED = tuple(row.setting for row in KEYS.values() if row.is_scaled)


@dataclass(frozen=True, kw_only=True)
class DetectionSettings(Settings):
    """The settings of a detector, whose schedule counts steps.

    Attributes:
        base_lr: the learning rate after warm-up; None if unknown.
        warmup_iters: steps of the warm-up.
        lr_steps: after which the learning rate decays.
        reference_world_size: the processes that the configuration was written for; 0 means that
            nothing is scaled.
        unscaled: the user's keys that are taken literally, such as those of the command line.
        test_precision: "float32" or "bfloat16", in which evaluation and prediction compute.
        channels_last: the layout of all maps in memory.
        compile: the backbone, for the training.
    """

    base_lr: float | None = None
    warmup_iters: int = 0
    lr_steps: tuple[int, ...] = ()
    reference_world_size: int = 0
    unscaled: tuple[str, ...] = ()
    test_precision: str = "float32"
    channels_last: bool = True
    compile: bool = False

    def of_a_step(self) -> dict[str, Any]:
        return super().of_a_step() | {"base_lr": self.base_lr}


LOG_PERIOD = 20  # steps; YAML has no key for it


def read_settings(cfg: CfgNode) -> DetectionSettings:
    """The settings of a YAML configuration, as written.

    Raises:
        ConfigError: a value cannot be.
    """
    schedules.check_solver(cfg.SOLVER)
    precise = cfg.TEST.PRECISE_BN
    return read_yaml(
        cfg,
        DetectionSettings,
        log_period=LOG_PERIOD,
        precise_bn_batches=precise.NUM_ITER if precise.ENABLED else 0,
    )


def scale_settings(settings: DetectionSettings, world_size: int) -> DetectionSettings:
    """Fit batch, learning rate and all counts of steps to the number of processes.

    The rule is Detectron2's linear one, with ``accumulate`` batches on a process counting as that
    many processes. 8 processes that accumulate 16 batches do exactly what a file for 128 processes
    says; without accumulation they take 1/16 of the batch and of the learning rate, and 16 times
    the steps. Steps between checkpoints are not scaled, because they limit the time, and not the
    images, that a crash may cost.

    Args:
        settings: as written.
        world_size: number of processes.

    Raises:
        ConfigError: there are no steps, or the batch cannot be divided among the processes and the
            accumulated batches.
    """
    check(settings.key("max_iter"), settings.max_iter, POSITIVE)
    given = [name for name in SCALED if settings.key(name) in settings.unscaled]
    reference = settings.reference_world_size
    scaled, shares = settings, world_size * settings.accumulate
    if reference not in (0, shares):
        scaled = _scaled(settings, shares)
        scaled = replace(scaled, **{name: getattr(settings, name) for name in given})
        why = f"{reference} process(es) in the file, here {world_size} x {settings.accumulate}"
        reasons = dict.fromkeys(SCALED, why) | dict.fromkeys(given, "it is given")
        rows = [
            (settings.key(name), getattr(settings, name), getattr(scaled, name), reason)
            for name, reason in reasons.items()
        ]
        log_table("The schedule, scaled to the processes", rows)
    images = scaled.images_per_step
    if images is not None:
        check_division(images, world_size, settings.accumulate, settings.key)
    rate = "the optimizer's own" if scaled.base_lr is None else f"{scaled.base_lr:g}"
    show(
        f"Schedule for {world_size} process(es) x {settings.accumulate} batch(es) a step: {images} "
        f"images a step, lr {rate}, {counted(scaled.max_iter, 'step')}"
    )
    return scaled


def _scaled(settings: DetectionSettings, shares: int) -> DetectionSettings:
    """The settings for another number of processes times accumulated batches."""
    scale, images = shares / settings.reference_world_size, settings.images_per_step
    # rounding must not make a period 0, which would mean never or divide by zero
    return replace(
        settings,
        images_per_step=None if images is None else max(round(images * scale), 1),
        base_lr=None if settings.base_lr is None else settings.base_lr * scale,
        max_iter=max(round(settings.max_iter / scale), 1),
        eval_period=max(round(settings.eval_period / scale), 1) if settings.eval_period else 0,
        warmup_iters=round(settings.warmup_iters / scale),
        lr_steps=tuple(round(step / scale) for step in settings.lr_steps),
        reference_world_size=shares,
    )


def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """The optimiser of ``cfg``; the backbone learns at SOLVER.BACKBONE_MULTIPLIER of the rate."""
    has_neck = hasattr(getattr(model, "backbone", None), "bottom_up")
    backbone = "backbone.bottom_up." if has_neck else "backbone."

    def factor_of(name: str) -> float:
        return cfg.SOLVER.BACKBONE_MULTIPLIER if name.startswith(backbone) else 1.0

    return schedules.build_optimizer(cfg.SOLVER, model, cfg.SOLVER.BASE_LR, factor_of)


def build_schedule(cfg: CfgNode) -> ParamScheduler:
    """The warm-up, and then the schedule of ``SOLVER.LR_SCHEDULER_NAME``.

    SOLVER.STEPS may lie beyond SOLVER.MAX_ITER, as in a run that is made shorter.

    Raises:
        ConfigError: there is no such schedule, or a value of it cannot be.
        ValueError: of Detectron2, where SOLVER.WARMUP_METHOD cannot be.
    """
    solver = cfg.SOLVER
    row = schedules.schedule_of(solver, "LR_SCHEDULER_NAME")
    rate = row.make(solver, 0, solver.MAX_ITER)
    warmup = partial(
        WarmupParamScheduler,
        warmup_factor=solver.WARMUP_FACTOR,
        warmup_length=min(solver.WARMUP_ITERS / solver.MAX_ITER, 1.0),
        warmup_method=solver.WARMUP_METHOD,
        rescale_interval=solver.RESCALE_INTERVAL,
    )
    return _Product(warmup(lambda share: 1.0), rate) if row.is_multiplied else warmup(rate)


class _Product(ParamScheduler):
    """A schedule that is multiplied by its warm-up."""

    def __init__(self, *factors: Callable[[float], float]) -> None:
        self._factors = factors

    def __call__(self, where: float) -> float:
        return math.prod(factor(where) for factor in self._factors)
