"""The settings of a run, in one typed form for every kind of configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from lambda_det.config import option
from lambda_det.errors import ConfigError

if TYPE_CHECKING:
    from detectron2.config import CfgNode

__all__ = [
    "COMMON_KEYS",
    "NOT_NEGATIVE",
    "POSITIVE",
    "SHARE",
    "Clipping",
    "FixedKeys",
    "Rule",
    "Settings",
    "check",
    "check_division",
    "common_settings",
]

# The key of YAML for each setting that has the same key in every task
# fmt: off
COMMON_KEYS = {
    "output_dir":         "OUTPUT_DIR",
    "device":             "MODEL.DEVICE",
    "seed":               "SEED",
    "weights":            "MODEL.WEIGHTS",
    "images_per_step":    "SOLVER.IMS_PER_BATCH",
    "accumulate":         "SOLVER.ACCUMULATE_GRADIENTS",
    "amp":                "SOLVER.AMP.ENABLED",
    "amp_dtype":          "SOLVER.AMP.DTYPE",
    "clipping.kind":      "SOLVER.CLIP_GRADIENTS.CLIP_TYPE",
    "clipping.limit":     "SOLVER.CLIP_GRADIENTS.CLIP_VALUE",
    "clipping.norm_type": "SOLVER.CLIP_GRADIENTS.NORM_TYPE",
    "cudnn_benchmark":    "CUDNN_BENCHMARK",
    "ema_decay":          "SOLVER.EMA_DECAY",
    "num_workers":        "DATALOADER.NUM_WORKERS",
    "timeout":            "DATALOADER.TIMEOUT",
    "checkpoint_period":  "SOLVER.CHECKPOINT_PERIOD",
    "checkpoints_kept":   "SOLVER.CHECKPOINTS_KEPT",
    "patience":           "TEST.PATIENCE",
    "event_writers":      "EVENT_WRITERS",
}
# fmt: on

# What a value must be: a check, and the words for it
Rule = tuple[Callable[[Any], bool], str]
POSITIVE: Rule = (lambda number: number >= 1), "1 or more"
NOT_NEGATIVE: Rule = (lambda number: number >= 0), "0 or more"
SHARE: Rule = (lambda number: 0 <= number <= 1), "from 0 to 1"
_FLOAT32 = ("", "highest", "high", "medium")
_AMP = ("auto", "bfloat16", "float16", None)
_CLIPPING = ("value", "norm", "full_model")
_RULES: dict[str, Rule] = {
    "accumulate": POSITIVE,
    "max_iter": NOT_NEGATIVE,
    "seed": (
        lambda seed: seed < 2**32,
        "below 4294967296; a run draws its own where it is below 0",
    ),
    "precise_bn_batches": NOT_NEGATIVE,
    "images_per_step": (lambda number: number is None or number >= 1, "1 or more"),
    "checkpoint_period": POSITIVE,
    "checkpoints_kept": POSITIVE,
    "log_period": POSITIVE,
    "num_workers": NOT_NEGATIVE,
    "timeout": NOT_NEGATIVE,
    "patience": NOT_NEGATIVE,
    "ema_decay": (lambda decay: 0 <= decay < 1, "at least 0 and below 1, such as 0.999"),
    "amp_dtype": (_AMP.__contains__, f"one of {_AMP}"),
    "float32_precision": (_FLOAT32.__contains__, f"one of {_FLOAT32}"),
    "clipping.kind": (_CLIPPING.__contains__, f"one of {_CLIPPING}"),
    "clipping.limit": (lambda limit: 0 < limit < math.inf, "above 0, such as 1.0"),
    "clipping.norm_type": (lambda norm: norm > 0, "above 0, such as 2.0"),
}
# What an evaluation alone does not need
_RULES_OF_TRAINING: dict[str, Rule] = {"max_iter": POSITIVE}


def check(key: str, value: Any, rule: Rule) -> None:
    """Refuse a value that a rule does not allow.

    Raises:
        ConfigError: the value of the key cannot be.
    """
    is_allowed, words = rule
    if not is_allowed(value):
        raise ConfigError(f"{key} is {value!r}; it must be {words}.")


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping.

    Attributes:
        kind: "value", each number of a gradient; "norm", the gradient of each parameter; or
            "full_model" (as DETR and Mask2Former call it), the norm of all gradients together.
        limit: to which gradients are clipped.
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
        images_per_step: over all processes and accumulated batches; None if unknown.
        accumulate: batches per optimiser step.
        amp_dtype: "bfloat16", "float16" or "auto", in which the forward pass computes; None for
            float32.
        clipping: of gradients; None for none.
        ema_decay: limit of the decay of the weights' exponential moving average; 0 for none.
        cudnn_benchmark: let cuDNN try its algorithms, for images of one size.
        float32_precision: "highest", "high" or "medium", of products and convolutions of float32 on
            a GPU; "" leaves PyTorch's. Below "highest" they may use TF32.
        num_workers: loader processes of each training process.
        timeout: seconds to wait for a batch of such a process.
        checkpoint_period: steps between two checkpoints.
        checkpoints_kept: how many of the newest are kept, the final one among them, besides the
            best; all of a long run would fill the disk.
        log_period: steps between two lines of the log.
        eval_period: steps between two evaluations, which need not be whole; 0 for one at the end.
        evaluate_raw: evaluate the trained weights also where there are averaged ones.
        best_metric: the result whose best checkpoint is kept; "" for the task's first.
        patience: evaluations in a row that may bring no better result; 0 for any number.
        event_writers: where the numbers of the log go besides metrics.json, see
            :func:`lambda_det.training.writers.check_writers`.
        precise_bn_batches: batches of each process from which batch norm's statistics are estimated
            before an evaluation; 0 keeps the running statistics.
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
    timeout: int = 600
    checkpoint_period: int = 1000
    checkpoints_kept: int = 5
    log_period: int = 20
    eval_period: float = 0.0
    evaluate_raw: bool = True
    best_metric: str = ""
    patience: int = 0
    event_writers: tuple[str, ...] = ("tensorboard",)
    precise_bn_batches: int = 0
    keys: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            if not name.startswith("clipping.") or self.clipping is not None:
                check(self.key(name), attrgetter(name)(self), rule)

    def check_training(self) -> None:
        """
        Raises:
            ConfigError: nothing can be trained with a setting, with which there can be evaluations.
        """
        for name, rule in _RULES_OF_TRAINING.items():
            check(self.key(name), getattr(self, name), rule)

    def of_a_step(self) -> dict[str, Any]:
        """The settings that decide which images a step takes, by name; a resumed run keeps them."""
        return {"images_per_step": self.images_per_step}

    def key(self, name: str) -> str:
        """The user's key for a setting."""
        return self.keys.get(name, name)

    def option(self, name: str, value: Any) -> str:
        """A setting as it is written on the user's command line."""
        return option(self.key(name), value)


def common_settings(cfg: CfgNode) -> dict[str, Any]:
    """The values of :data:`COMMON_KEYS` in a YAML configuration, as arguments of ``Settings``."""
    values = {name: attrgetter(key)(cfg) for name, key in COMMON_KEYS.items()}
    clipping = Clipping(
        values.pop("clipping.kind"),
        values.pop("clipping.limit"),
        values.pop("clipping.norm_type"),
    )
    return values | {
        "amp_dtype": values["amp_dtype"] if values.pop("amp") else None,
        "clipping": clipping if cfg.SOLVER.CLIP_GRADIENTS.ENABLED else None,
        "event_writers": tuple(cfg.EVENT_WRITERS),
    }


def check_division(
    images: int, world_size: int, accumulate: int, keys: Mapping[str, str] = COMMON_KEYS
) -> None:
    """Refuse a number of images that processes and accumulated batches cannot share equally.

    Args:
        images: of one optimiser step.
        world_size: number of processes.
        accumulate: batches of one optimiser step on each of them.
        keys: the user's keys for "images_per_step" and "accumulate".

    Raises:
        ConfigError: it does not divide; the message has the nearest numbers that do.
    """
    shares = world_size * accumulate
    if images > 0 and images % shares == 0:
        return
    below = images // shares * shares
    fitting = f"{below} or {below + shares}" if below > 0 else f"{shares}"
    raise ConfigError(
        f"{keys['images_per_step']} {images} does not divide by {world_size} process(es) x "
        f"{accumulate} batch(es) of {keys['accumulate']}: {fitting} images would do."
    )


@dataclass(frozen=True)
class FixedKeys:
    """The keys that a resumed run must keep.

    The weights, their average or the optimiser's saved state depend on them. A new value would not
    fit, would silently be ignored, or would drop what is saved.

    Attributes:
        names: keys, and sections with all that is in them.
        but_not: keys within ``names`` that may change nevertheless.
    """

    names: tuple[str, ...]
    but_not: tuple[str, ...] = ()

    def __contains__(self, key: str) -> bool:
        return _is_within(key, self.names) and not _is_within(key, self.but_not)


def _is_within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)
