"""The optimiser and schedule of a detector, fitted to the number of processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.solver import build_lr_scheduler as build_detectron2_scheduler
from detectron2.solver import get_default_optimizer_params
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambda_det.detection.model import check_precision
from lambda_det.errors import ConfigError
from lambda_det.training.log import log_table, show
from lambda_det.training.settings import (
    COMMON_KEYS,
    Settings,
    check_division,
    common_settings,
)

# the settings that the number of processes changes
SCALED = ("images_per_step", "base_lr", "max_iter", "eval_period", "warmup_iters", "lr_steps")
# The key of YAML for each setting
# fmt: off
KEYS = COMMON_KEYS | {
    "max_iter":             "SOLVER.MAX_ITER",
    "float32_precision":    "FLOAT32_PRECISION",
    "reference_world_size": "SOLVER.REFERENCE_WORLD_SIZE",
    "unscaled":             "SOLVER.UNSCALED",
    "base_lr":              "SOLVER.BASE_LR",
    "warmup_iters":         "SOLVER.WARMUP_ITERS",
    "lr_steps":             "SOLVER.STEPS",
    "eval_period":          "TEST.EVAL_PERIOD",
    "evaluate_raw":         "TEST.RAW",
    "best_metric":          "TEST.BEST_METRIC",
    "test_precision":       "TEST.PRECISION",
    "channels_last":        "MODEL.CHANNELS_LAST",
    "cuda_graphs":          "SOLVER.CUDA_GRAPHS",
}
# fmt: on


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
        cuda_graphs: "auto", "always" or "never" compute the backbone by CUDA graphs.
    """

    base_lr: float | None = None
    warmup_iters: int = 0
    lr_steps: tuple[int, ...] = ()
    reference_world_size: int = 0
    unscaled: tuple[str, ...] = ()
    test_precision: str = "float32"
    channels_last: bool = True
    cuda_graphs: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_precision(self.test_precision, self.key("test_precision"))
        if self.cuda_graphs not in ("auto", "always", "never"):
            raise ConfigError(
                f"{self.key('cuda_graphs')} is {self.cuda_graphs!r}; it can be auto, always or "
                "never."
            )

    def of_a_step(self) -> dict[str, Any]:
        return super().of_a_step() | {"base_lr": self.base_lr}

    @property
    def images_per_batch(self) -> int | None:
        """Images that all processes together take in one forward pass; a step may have several
        passes.
        """
        return None if self.images_per_step is None else self.images_per_step // self.accumulate


LOG_PERIOD = 20  # steps; YAML has no key for it


def read_settings(cfg: CfgNode) -> DetectionSettings:
    """The settings of a YAML configuration, as written.

    Raises:
        ConfigError: a value cannot be.
    """
    own = {name: attrgetter(key)(cfg) for name, key in KEYS.items() if name not in COMMON_KEYS}
    own |= {name: tuple(own[name]) for name in ("lr_steps", "unscaled")}
    return DetectionSettings(
        **common_settings(cfg),
        **own,
        log_period=LOG_PERIOD,
        precise_bn_batches=cfg.TEST.PRECISE_BN.NUM_ITER if cfg.TEST.PRECISE_BN.ENABLED else 0,
        keys=KEYS,
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
        ConfigError: the batch cannot be divided among the processes and the accumulated batches.
    """
    typed = [name for name in SCALED if settings.key(name) in settings.unscaled]
    reference, images = settings.reference_world_size, settings.images_per_step
    by_rule = "images_per_step" not in typed and images is not None
    if reference < 0 or (reference > 0 and by_rule and images % reference):
        raise ConfigError(
            f"{settings.key('images_per_step')} {images} does not divide by "
            f"{settings.key('reference_world_size')} {reference}, the processes that the file was "
            "written for."
        )
    scaled, shares = settings, world_size * settings.accumulate
    if reference not in (0, shares):
        scaled = _scaled(settings, shares)
        scaled = replace(scaled, **{name: getattr(settings, name) for name in typed})
        why = f"{reference} process(es) in the file, here {world_size} x {settings.accumulate}"
        rows = []
        for name in SCALED:
            after = ("", "it is typed") if name in typed else (getattr(scaled, name), why)
            rows.append((settings.key(name), getattr(settings, name), *after))
        log_table("The schedule, scaled to the processes", rows)
    images = scaled.images_per_step
    if images is not None:
        keys = {name: settings.key(name) for name in ("images_per_step", "accumulate")}
        check_division(images, world_size, settings.accumulate, keys)
    show(
        f"Schedule for {world_size} process(es) x {settings.accumulate} batch(es) a step: {images} "
        f"images a step, lr {scaled.base_lr}, {scaled.max_iter} steps"
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
    """Detectron2's SGD; the backbone learns at SOLVER.BACKBONE_MULTIPLIER of the rate."""
    solver = cfg.SOLVER
    has_neck = hasattr(getattr(model, "backbone", None), "bottom_up")
    backbone = "backbone.bottom_up." if has_neck else "backbone."
    parameters = get_default_optimizer_params(
        model,
        base_lr=solver.BASE_LR,
        weight_decay_norm=solver.WEIGHT_DECAY_NORM,
        bias_lr_factor=solver.BIAS_LR_FACTOR,
        weight_decay_bias=solver.WEIGHT_DECAY_BIAS,
        lr_factor_func=lambda n: solver.BACKBONE_MULTIPLIER if n.startswith(backbone) else 1.0,
    )
    return torch.optim.SGD(
        parameters,
        lr=solver.BASE_LR,
        momentum=solver.MOMENTUM,
        nesterov=solver.NESTEROV,
        weight_decay=solver.WEIGHT_DECAY,
        foreach=True,
    )


def build_lr_scheduler(cfg: CfgNode, optimizer: Optimizer) -> LRScheduler:
    """The schedule of ``SOLVER.LR_SCHEDULER_NAME``; WarmupPolyLR is that of DeepLab.

    SOLVER.STEPS may lie beyond SOLVER.MAX_ITER, as in a run that is made shorter.
    """
    if any(step >= cfg.SOLVER.MAX_ITER for step in cfg.SOLVER.STEPS):
        # Detectron2 drops steps above it, and fvcore raises an error for a step that equals it
        cfg = cfg.clone()
        cfg.defrost()
        cfg.SOLVER.STEPS = tuple(s for s in cfg.SOLVER.STEPS if s < cfg.SOLVER.MAX_ITER)
    if cfg.SOLVER.LR_SCHEDULER_NAME != "WarmupPolyLR":
        return build_detectron2_scheduler(cfg, optimizer)
    # its keys exist only where the project is installed
    from detectron2.projects import deeplab

    scheduler = deeplab.build_lr_scheduler(cfg, optimizer)

    class _WarmupPolyLR(type(scheduler)):
        """Saves only its position, as Detectron2's other schedules do.

        The project's own schedule also saves its number of steps, and a run that is resumed and
        made longer ends with the root of a negative number.
        """

        def state_dict(self) -> dict[str, Any]:
            return {"base_lrs": self.base_lrs, "last_epoch": self.last_epoch}

    scheduler.__class__ = _WarmupPolyLR
    return scheduler
