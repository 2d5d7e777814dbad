"""The ranges of the numbers in a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from detectron2.config import CfgNode

from lambda_det.errors import ConfigError

__all__ = ["check_ranges"]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _three(low: float) -> Callable[[Any], bool]:
    return lambda values: len(values) == 3 and all(_is_number(v) and v > low for v in values)


def _positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _not_negative(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


_WORDS = {
    _positive: "above 0",
    _not_negative: "0 or more",
    _share: "at least 0 and below 1",
}
_RANGES: dict[Callable[[Any], bool], tuple[str, ...]] = {
    _positive: (
        "LOG_PERIOD",
        "SOLVER.ACCUMULATE_GRADIENTS",
        "SOLVER.CHECKPOINTS_KEPT",
        "SOLVER.CHECKPOINT_PERIOD",
        "SOLVER.DECAY",
        "SOLVER.DECAY_EPOCHS",
        "SOLVER.EPOCHS",
        "SOLVER.IMS_PER_BATCH",
        "SOLVER.LR_BATCH",
        "TEST.EVAL_PERIOD",
    ),
    _not_negative: (
        "DATALOADER.NUM_WORKERS",
        "DATALOADER.TIMEOUT",
        "SEED",
        "SOLVER.BASE_LR",
        "SOLVER.MOMENTUM",
        "SOLVER.WARMUP_EPOCHS",
        "SOLVER.WEIGHT_DECAY",
        "SOLVER.WEIGHT_DECAY_NORM",
        "TEST.IMS_PER_BATCH",
        "TEST.PATIENCE",
        "TEST.PRECISE_BN_BATCHES",
    ),
    _share: ("SOLVER.EMA_DECAY", "SOLVER.LABEL_SMOOTHING"),
}


def check_ranges(cfg: CfgNode) -> None:
    """Refuse numbers that no training can have; those of DATA and INPUT are checked where used.

    Raises:
        ConfigError: it names the key and its range.
    """
    for is_within, keys in _RANGES.items():
        for key in keys:
            value = _value(cfg, key)
            if not is_within(value):
                raise ConfigError(f"{key} is {value}; it must be {_WORDS[is_within]}.")
    for key, low in (("MODEL.PIXEL_MEAN", -math.inf), ("MODEL.PIXEL_STD", 0)):
        values = _value(cfg, key)
        if not _three(low)(values):
            above = " above 0" if low == 0 else ""
            raise ConfigError(f"{key} is {values}; it must hold three numbers{above}.")


def _value(cfg: CfgNode, key: str) -> Any:
    for name in key.split("."):
        cfg = cfg[name]
    return cfg
