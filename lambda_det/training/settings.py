"""What a run is told, in one typed form, whichever way its user wrote it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lambda_det.config import option
from lambda_det.errors import ConfigError

__all__ = ["Clipping", "FixedKeys", "Settings"]

_CLIPPING_KINDS = {
    "value": "each number of a gradient",
    "norm": "the gradient of each parameter",
    "full_model": "the norm of all gradients together",
}

_FLOAT32_PRECISIONS = ("", "highest", "high", "medium")
_LOWEST = {"accumulate": 1, "checkpoint_period": 1, "log_period": 1, "num_workers": 0}


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping.

    Attributes:
        kind: "value", "norm" or "full_model" (as DETR and Mask2Former call it).
        limit: that gradients are clipped to.
        norm_type: of the norm that is limited.
    """

    kind: str
    limit: float
    norm_type: float = 2.0


@dataclass(frozen=True)
class Settings:
    """The settings that every task has.

    They are checked when they are made: a ConfigError names the user's key.

    Attributes:
        output_dir: the folder of the run.
        device: "cuda", "cuda:1", "cpu", ...
        seed: of all random numbers; below 0 the run draws one.
        weights: to start from, or to evaluate; "" for none.
        max_iter: optimiser steps of the whole training.
        images_per_step: over all processes and accumulated batches; None where nobody knows.
        accumulate: batches per optimiser step.
        amp_dtype: "bfloat16", "float16" or "auto", in which the forward pass computes; None for
            float32.
        clipping: of gradients; None for none.
        ema_decay: limit of the decay of the weights' exponential moving average; 0 for none.
        cudnn_benchmark: let cuDNN try its algorithms, for images of one size.
        float32_precision: "highest", "high" or "medium", of products and convolutions of float32 on
            a GPU; "" leaves PyTorch's. Below "highest" they may use TF32.
        num_workers: loader processes of each training process.
        checkpoint_period: steps between two checkpoints.
        checkpoints_kept: so many numbered ones, the newest; all of a long run would fill the disk.
        log_period: steps between two lines of the log.
        eval_period: steps between two evaluations, which need not be whole; 0 for one at the end.
        best_metric: the result whose best checkpoint is kept; "" for the task's first.
        patience: evaluations in a row that may bring nothing better; 0 for any number.
        event_writers: where the numbers of the log go besides metrics.json, see
            :func:`lambda_det.training.writers.check_writers`.
        precise_bn_batches: batches of each process that batch norm's statistics are estimated from
            before an evaluation; 0 keeps the running ones.
        keys: the user's key for each of these names.
    """

    output_dir: str
    device: str
    seed: int
    weights: str
    max_iter: int
    images_per_step: int | None
    accumulate: int = 1
    amp_dtype: str | None = None
    clipping: Clipping | None = None
    ema_decay: float = 0.0
    cudnn_benchmark: bool = False
    float32_precision: str = ""
    num_workers: int = 0
    checkpoint_period: int = 1000
    checkpoints_kept: int = 5
    log_period: int = 20
    eval_period: float = 0.0
    best_metric: str = ""
    patience: int = 0
    event_writers: tuple[str, ...] = ("tensorboard",)
    precise_bn_batches: int = 0
    keys: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, lowest in _LOWEST.items():
            if getattr(self, name) < lowest:
                raise ConfigError(
                    f"{self.key(name)} is {getattr(self, name)}; it must be {lowest} or more."
                )
        if self.float32_precision not in _FLOAT32_PRECISIONS:
            raise ConfigError(
                f"{self.key('float32_precision')} is {self.float32_precision!r}; it can be one of "
                f"{list(_FLOAT32_PRECISIONS)}."
            )
        if self.clipping is not None:
            self._check_clipping(self.clipping)

    def _check_clipping(self, clipping: Clipping) -> None:
        if clipping.kind not in _CLIPPING_KINDS:
            kinds = ", ".join(f"{kind} ({what})" for kind, what in _CLIPPING_KINDS.items())
            raise ConfigError(
                f"{self.key('clipping.kind')} is {clipping.kind!r}; it can be {kinds}."
            )
        for name in ("limit", "norm_type"):
            value = getattr(clipping, name)
            if not value > 0 or (name == "limit" and math.isinf(value)):
                raise ConfigError(
                    f"{self.key(f'clipping.{name}')} is {value:g}; it must be above 0, such as 1.0."
                )

    def key(self, name: str) -> str:
        """The user's key for a setting."""
        return self.keys.get(name, name)

    def option(self, name: str, value: Any) -> str:
        """A setting as the user's command line has it."""
        return option(self.key(name), value)


@dataclass(frozen=True)
class FixedKeys:
    """The keys that a resumed run must keep.

    The weights or the optimiser's saved state depend on them, so that a new value would not fit or
    would silently be ignored.

    Attributes:
        names: keys, and sections with all that is in them.
        but_not: those within ``names`` that may change nevertheless.
    """

    names: tuple[str, ...]
    but_not: tuple[str, ...] = ()

    def __contains__(self, key: str) -> bool:
        return _is_within(key, self.names) and not _is_within(key, self.but_not)


def _is_within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)
