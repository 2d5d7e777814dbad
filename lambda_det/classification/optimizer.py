"""The optimisers of the recipes, with and without weight decay on norms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from detectron2.config import CfgNode
from detectron2.solver.build import get_default_optimizer_params
from torch import nn

from lambda_det.classification.schedule import peak_learning_rate
from lambda_det.errors import ConfigError
from lambda_det.training.clipping import add_clipping

__all__ = ["build_optimizer"]


def _sgd(groups: list[dict], cfg: CfgNode) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=cfg.SOLVER.MOMENTUM, nesterov=cfg.SOLVER.NESTEROV)


def _adam(groups: list[dict], cfg: CfgNode) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups)


def _rmsprop(groups: list[dict], cfg: CfgNode) -> torch.optim.Optimizer:
    # timm's follows TensorFlow, which the paper's MobileNet was trained with: epsilon inside the
    # root, squares that start at 1, the learning rate within the momentum. PyTorch's differs in all
    # three. Decay and epsilon are those of TensorFlow's mobile networks.
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
        ConfigError: SOLVER.OPTIMIZER is unknown, SOLVER.NESTEROV has no momentum, or
            SOLVER.CLIP_GRADIENTS cannot be.
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
    return add_clipping(cfg, _OPTIMIZERS[solver.OPTIMIZER](groups, cfg))
