"""The settings of a run, in one typed form for every kind of configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from lambda_det.config import KEYS, NOT_NEGATIVE, POSITIVE, Rule, check, option
from lambda_det.errors import ConfigError

if TYPE_CHECKING:
    from detectron2.config import CfgNode

_Settings = TypeVar("_Settings", bound="Settings")

# The key of YAML for each setting of detectors, whose keys classifiers have as well
YAML_KEYS = {row.setting: key for key, row in KEYS.items() if row.setting}
_RULES: dict[str, Rule] = {
    "precise_bn_batches": NOT_NEGATIVE,
    "log_period": POSITIVE,
    **{row.setting: row.rule for row in KEYS.values() if row.setting and row.rule},
}


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
            :func:`lambda_det.training.hooks.writers_of`.
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
            # Each task has some of them, and there may be no clipping
            with contextlib.suppress(AttributeError):
                check(self.key(name), attrgetter(name)(self), rule)

    def of_a_step(self) -> dict[str, Any]:
        """The settings that decide which images a step takes, by name; a resumed run keeps them."""
        return {"images_per_step": self.images_per_step}

    @property
    def images_per_batch(self) -> int | None:
        """Images that all processes together take in one forward pass; a step may have several
        passes.
        """
        return None if self.images_per_step is None else self.images_per_step // self.accumulate

    def key(self, name: str) -> str:
        """The user's key for a setting."""
        return self.keys.get(name, name)

    def option(self, name: str, value: Any) -> str:
        """A setting as it is written on the user's command line."""
        return option(self.key(name), value)


def read_yaml(cfg: CfgNode, kind: type[_Settings], **given: Any) -> _Settings:
    """The settings of a YAML configuration, as written.

    Args:
        cfg: has the keys of some of the settings.
        kind: the class of the settings.
        given: settings that are no keys, or other ones than their keys.

    Raises:
        ConfigError: a value cannot be.
    """
    values = {}
    for one in fields(kind):
        with contextlib.suppress(KeyError, AttributeError):  # it is no key, or none of this task
            value = attrgetter(YAML_KEYS[one.name])(cfg)
            values[one.name] = tuple(value) if isinstance(value, list) else value
    if not cfg.SOLVER.AMP.ENABLED:
        values["amp_dtype"] = None
    if (clip := cfg.SOLVER.CLIP_GRADIENTS).ENABLED:
        values["clipping"] = Clipping(clip.CLIP_TYPE, clip.CLIP_VALUE, clip.NORM_TYPE)
    return kind(**values | {"keys": YAML_KEYS} | given)


def check_division(
    images: int,
    world_size: int,
    accumulate: int,
    key: Callable[[str], str] = YAML_KEYS.__getitem__,
) -> None:
    """Refuse a number of images that processes and accumulated batches cannot share equally.

    Args:
        images: of one optimiser step, 1 or more.
        world_size: number of processes.
        accumulate: batches of one optimiser step on each of them.
        key: gives the user's keys for "images_per_step" and "accumulate".

    Raises:
        ConfigError: it does not divide; the message has a number near it that does.
    """
    shares = world_size * accumulate
    if images % shares:
        raise ConfigError(
            f"{key('images_per_step')} {images} does not divide by {world_size} process(es) x "
            f"{accumulate} batch(es) of {key('accumulate')}: "
            f"{max(images // shares, 1) * shares} images would do."
        )
