"""Gradient clipping by SOLVER.CLIP_GRADIENTS, with Detectron2's keys."""

from __future__ import annotations

import math
from collections.abc import Iterable

from detectron2.config import CfgNode
from detectron2.solver.build import (
    _generate_optimizer_class_with_gradient_clipping,
    maybe_add_gradient_clipping,
)
from torch import nn
from torch.optim import Optimizer

from lambda_det.errors import ConfigError

__all__ = ["add_clipping", "check_clipping"]

WHOLE = "full_model"  # what DETR and Mask2Former call it; Detectron2 has the other two
TYPES = ("value", "norm", WHOLE)


def check_clipping(cfg: CfgNode) -> None:
    """Refuse a clipping that cannot be.

    Raises:
        ConfigError: it names the key.
    """
    clip = cfg.SOLVER.CLIP_GRADIENTS
    if not clip.ENABLED:
        return
    if clip.CLIP_TYPE not in TYPES:
        raise ConfigError(
            f"SOLVER.CLIP_GRADIENTS.CLIP_TYPE is {clip.CLIP_TYPE!r}; it can be value (each number "
            f"of a gradient), norm (the gradient of each parameter) or {WHOLE} (the norm of all "
            "gradients together)."
        )
    for key in ("CLIP_VALUE", "NORM_TYPE"):
        if not clip[key] > 0 or (key == "CLIP_VALUE" and math.isinf(clip[key])):
            raise ConfigError(
                f"SOLVER.CLIP_GRADIENTS.{key} is {clip[key]:g}; it must be above 0, such as 1.0."
            )


def add_clipping(cfg: CfgNode, optimizer: Optimizer) -> Optimizer:
    """Have ``optimizer`` clip gradients at the beginning of its step, as ``cfg`` says.

    That is after all batches of the step were added up, over all processes, and after loss scaling
    is taken out again.

    Raises:
        ConfigError: see :func:`check_clipping`.
    """
    check_clipping(cfg)
    clip = cfg.SOLVER.CLIP_GRADIENTS
    if not (clip.ENABLED and clip.CLIP_TYPE == WHOLE):
        return maybe_add_gradient_clipping(cfg, optimizer)
    most, kind = clip.CLIP_VALUE, clip.NORM_TYPE

    def clip_all(parameters: Iterable[nn.Parameter]) -> None:
        nn.utils.clip_grad_norm_(parameters, most, kind)

    optimizer.__class__ = _generate_optimizer_class_with_gradient_clipping(
        type(optimizer), global_clipper=clip_all
    )
    return optimizer
