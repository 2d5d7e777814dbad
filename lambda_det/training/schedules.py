"""The optimisers and the learning-rate schedules of every task: one table of each.

A row names the keys of the section SOLVER that it reads, and what their values must be. A task
whose SOLVER has all keys of a row can choose it. :data:`lambda_det.config.SHARED_KEYS` has the keys
that all tasks have.
"""

from __future__ import annotations

import itertools
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, mul

import torch
from detectron2.config import CfgNode
from detectron2.solver.build import get_default_optimizer_params
from fvcore.common.param_scheduler import CosineParamScheduler
from torch import nn

from lambda_det.config import (
    ABOVE_0,
    BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    Rule,
    check,
    each_of,
    or_none,
)
from lambda_det.errors import ConfigError, refused

logger = logging.getLogger(__name__)


_RISING: Rule = (
    (lambda steps: all(ABOVE_0[0](x) for x in steps) and list(steps) == sorted(steps)),
    "numbers above 0 that rise",
)
# What all optimisers and the warm-up read
_OF_ALL: dict[str, Rule] = {
    "BASE_LR": ABOVE_0,
    "WEIGHT_DECAY": NOT_NEGATIVE,
    "WEIGHT_DECAY_BIAS": or_none(NOT_NEGATIVE),
    "WEIGHT_DECAY_NORM": or_none(NOT_NEGATIVE),
    "BIAS_LR_FACTOR": NOT_NEGATIVE,
    "BACKBONE_MULTIPLIER": NOT_NEGATIVE,
    "WARMUP_EPOCHS": NOT_NEGATIVE,
    "WARMUP_FACTOR": NOT_NEGATIVE,
    "WARMUP_ITERS": NOT_NEGATIVE,
}


# -------------------------------------------------------------------------------------- optimisers
@dataclass(frozen=True)
class Optimizer:
    """A row of :data:`OPTIMIZERS`.

    Attributes:
        make: the optimiser of groups of parameters, each with its learning rate and weight decay.
        keys: of SOLVER that it alone reads, with their rules.
        base_lr: the usual learning rate of detectors for 16 images a step, from which recipes for
            own data start; None: as of the architecture; 0: unknown.
        limit: a learning rate from which on it is meant for SGD.
    """

    make: Callable[[list[dict], CfgNode], torch.optim.Optimizer]
    keys: Mapping[str, Rule]
    base_lr: float | None = 0.0
    limit: float = math.inf


def _sgd(groups: list[dict], solver: CfgNode) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=solver.MOMENTUM, nesterov=solver.NESTEROV, foreach=True)


def _adam(
    kind: type[torch.optim.Optimizer], groups: list[dict], solver: CfgNode
) -> torch.optim.Optimizer:
    return kind(groups, betas=tuple(solver.BETAS))


def _rmsprop(groups: list[dict], solver: CfgNode) -> torch.optim.Optimizer:
    # timm's follows TensorFlow, which the paper's MobileNet was trained with: epsilon inside the
    # root, squares that start at 1, the learning rate within the momentum. PyTorch's differs in all
    # three. Decay and epsilon are as for TensorFlow's mobile networks.
    what, advice = "SOLVER.OPTIMIZER rmsprop is timm's", "install it (`pip install timm`)"
    with refused(ConfigError, what, advice, ImportError):
        from timm.optim import RMSpropTF

    return RMSpropTF(groups, lr=1.0, alpha=0.9, eps=1e-3, momentum=solver.MOMENTUM)


# Three epochs of kangaroos in steps of 4 images: AP 34.0, and 10.4 by the 1e-4 of Swin
# Transformer's Mask R-CNN (projects/benchmarks/detectors.md)
_ADAMS_LR, _ADAMS_LIMIT = 5e-4, 0.01
OPTIMIZERS = {
    "sgd": Optimizer(_sgd, {"MOMENTUM": BELOW_1}, base_lr=None),
    **{
        name: Optimizer(
            partial(_adam, kind), {"BETAS": each_of(2, BELOW_1)}, _ADAMS_LR, _ADAMS_LIMIT
        )
        for name, kind in (("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW))
    },
    "rmsprop": Optimizer(_rmsprop, {"MOMENTUM": BELOW_1}),
}


def optimizer_of(solver: CfgNode) -> Optimizer:
    """The row of SOLVER.OPTIMIZER.

    Raises:
        ConfigError: there is none.
    """
    found = OPTIMIZERS.get(solver.OPTIMIZER.lower())
    if found is None:
        raise ConfigError(
            f"SOLVER.OPTIMIZER is {solver.OPTIMIZER!r}; it can be one of {list(OPTIMIZERS)}."
        )
    return found


def build_optimizer(
    solver: CfgNode,
    model: nn.Module,
    rate: float,
    factor_of: Callable[[str], float] | None = None,
) -> torch.optim.Optimizer:
    """The optimiser of ``solver`` over all parameters of ``model`` that are trained.

    Args:
        solver: the section SOLVER of a configuration.
        model: norms and biases have weight decays of their own where the section has them.
        rate: the learning rate after warm-up.
        factor_of: the factor of the learning rate of a parameter, by its name.

    Raises:
        ConfigError: SOLVER.OPTIMIZER is unknown, or all is frozen.
    """
    groups = get_default_optimizer_params(
        model,
        base_lr=rate,
        weight_decay=solver.WEIGHT_DECAY,
        weight_decay_norm=solver.WEIGHT_DECAY_NORM,
        bias_lr_factor=solver.get("BIAS_LR_FACTOR", 1.0),
        weight_decay_bias=solver.get("WEIGHT_DECAY_BIAS"),
        lr_factor_func=factor_of,
    )
    if not groups:
        raise ConfigError("No parameter of the model is trained: all are frozen; leave some free.")
    optimizer = optimizer_of(solver).make(groups, solver)
    optimizer.defaults["lr"] = rate  # by which the log knows the announced rate
    return optimizer


def check_rate(solver: CfgNode, *, is_given: bool) -> None:
    """Hold SOLVER.BASE_LR against the optimiser: a rate for SGD ruins a training by another.

    Args:
        solver: the section SOLVER, as written.
        is_given: whether the user gave the rate and not only the optimiser: then it is a warning.

    Raises:
        ConfigError: it is a rate for SGD, from a file.
    """
    row = optimizer_of(solver)
    if row.limit > solver.BASE_LR:
        return
    text = (
        f"SOLVER.BASE_LR is {solver.BASE_LR:g}, a learning rate for SGD, and SOLVER.OPTIMIZER "
        f"{solver.OPTIMIZER} takes steps of that length however small the gradient is: add a lower "
        f"one, such as SOLVER.BASE_LR {row.base_lr:g}"
    )
    if not is_given:
        raise ConfigError(f"{text}.")
    logger.warning(text)


# --------------------------------------------------------------------------------------- schedules
@dataclass(frozen=True)
class Schedule:
    """A row of :data:`SCHEDULES`.

    Attributes:
        make: makes of SOLVER, and of the start and the end of a span in the unit of the task's keys
            (steps or epochs), the learning rate as a multiple of that after warm-up, at a share of
            the span from 0 to 1.
        keys: of SOLVER that it reads, with their rules.
        in_detectron2: its name there.
        is_multiplied: by the warm-up in detection, as DeepLab's; otherwise the warm-up is a line
            that ends at its value.
    """

    make: Callable[[CfgNode, float, float], Callable[[float], float]]
    keys: Mapping[str, Rule]
    in_detectron2: str = ""
    is_multiplied: bool = False


_EPSILON = 1e-6  # fvcore's: a share that is rounded down still belongs to its step


def _steps(solver: CfgNode, start: float, end: float) -> Callable[[float], float]:
    gamma, steps = solver.GAMMA, list(solver.STEPS)
    length = end - start
    return lambda share: gamma ** bisect_right(steps, start + (share + _EPSILON) * length)


def _cosine(solver: CfgNode, start: float, end: float) -> Callable[[float], float]:
    last = solver.BASE_LR_END / solver.BASE_LR
    if not 0 <= last <= 1:
        raise ConfigError(
            f"SOLVER.BASE_LR_END is {solver.BASE_LR_END:g}; it must be from 0 to SOLVER.BASE_LR, "
            f"which is {solver.BASE_LR:g}."
        )
    return CosineParamScheduler(1.0, last)


def _exponential(solver: CfgNode, start: float, end: float) -> Callable[[float], float]:
    decay, decays = solver.DECAY, (end - start) / solver.DECAY_EPOCHS
    return lambda share: decay ** math.floor(share * decays + 1e-9)


def _equal_decays(solver: CfgNode, start: float, end: float) -> Callable[[float], float]:
    count = solver.NUM_DECAYS
    rates = list(itertools.accumulate([1.0, *[solver.GAMMA] * count], mul))
    return lambda share: rates[min(int((share + _EPSILON) * (count + 1)), count)]


def _poly(solver: CfgNode, start: float, end: float) -> Callable[[float], float]:
    power, least = solver.POLY_LR_POWER, solver.POLY_LR_CONSTANT_ENDING
    return lambda share: max((1 - share) ** power, least)


SCHEDULES = {
    "steps": Schedule(_steps, {"STEPS": _RISING, "GAMMA": ABOVE_0}, "WarmupMultiStepLR"),
    "cosine": Schedule(_cosine, {"BASE_LR_END": NOT_NEGATIVE}, "WarmupCosineLR"),
    "exponential": Schedule(_exponential, {"DECAY": ABOVE_0, "DECAY_EPOCHS": ABOVE_0}),
    "equal_decays": Schedule(
        _equal_decays, {"GAMMA": ABOVE_0, "NUM_DECAYS": POSITIVE}, "WarmupStepWithFixedGammaLR"
    ),
    "poly": Schedule(
        _poly,
        {"POLY_LR_POWER": ABOVE_0, "POLY_LR_CONSTANT_ENDING": BELOW_1},
        "WarmupPolyLR",
        is_multiplied=True,
    ),
}
# The rules of all keys that only some optimisers or schedules read
_OF_SOME = {
    key: rule
    for row in (*OPTIMIZERS.values(), *SCHEDULES.values())
    for key, rule in row.keys.items()
}


def schedule_of(solver: CfgNode, key: str) -> Schedule:
    """The row that a key of SOLVER names, by its own name or by Detectron2's.

    Raises:
        ConfigError: there is none for this task.
    """
    usable = {name: row for name, row in SCHEDULES.items() if row.keys.keys() <= solver.keys()}
    usable |= {row.in_detectron2: row for row in usable.values() if row.in_detectron2}
    if solver[key] not in usable:
        raise ConfigError(f"SOLVER.{key} is {solver[key]!r}; it can be one of {list(usable)}.")
    return usable[solver[key]]


def warn_of_unread(
    cfg: CfgNode, opts: Sequence[str], schedule: str, needs: Mapping[str, str]
) -> None:
    """Name the keys of a command line that nothing reads, because of the values of other keys.

    Args:
        cfg: with these keys.
        opts: keys and values in turn.
        schedule: the key of SOLVER that names the schedule.
        needs: by a key, the one that has to be on where it is read. Others need the ENABLED of
            their section, if it has one.
    """
    solver = cfg.SOLVER
    chosen = {*optimizer_of(solver).keys, *schedule_of(solver, schedule).keys}
    for key in opts[::2]:
        section, _, name = key.rpartition(".")
        needed = ""
        if section == "SOLVER" and name in _OF_SOME.keys() - chosen:
            needed = f"another SOLVER.OPTIMIZER or SOLVER.{schedule}"
        # a recipe that was derived is off, and its keys were read
        elif section and section != "RECIPE":
            has_switch = "ENABLED" in attrgetter(section)(cfg)
            switch = needs.get(key, f"{section}.ENABLED" if has_switch else key)
            if switch != key and not attrgetter(switch)(cfg):
                needed = switch
        if needed:
            logger.warning(
                f"Nothing reads {key} without {needed}: set that as well, or leave {key} out"
            )


def check_solver(solver: CfgNode) -> None:
    """Refuse values of SOLVER that no optimiser or schedule can have.

    Raises:
        ConfigError: it names the key, its value and what is allowed.
    """
    for key, rule in (_OF_ALL | _OF_SOME).items():
        if key in solver:
            check(f"SOLVER.{key}", solver[key], rule)
    optimizer_of(solver)
