"""The model built for a trial, before a run writes anything."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Iterable

import torch
from detectron2 import modeling
from detectron2.config import CfgNode
from detectron2.modeling.proposal_generator.rpn import RPN_HEAD_REGISTRY
from torch import nn

from lambda_det.config import leaves
from lambda_det.errors import ConfigError
from lambda_det.training.checkpointer import SafeCheckpointer

__all__ = ["build_for_trial", "load_for_trial"]

# fmt: off
_REGISTRIES = {
    "MODEL.META_ARCHITECTURE":       modeling.META_ARCH_REGISTRY,
    "MODEL.BACKBONE.NAME":           modeling.BACKBONE_REGISTRY,
    "MODEL.ANCHOR_GENERATOR.NAME":   modeling.ANCHOR_GENERATOR_REGISTRY,
    "MODEL.PROPOSAL_GENERATOR.NAME": modeling.PROPOSAL_GENERATOR_REGISTRY,
    "MODEL.RPN.HEAD_NAME":           RPN_HEAD_REGISTRY,
    "MODEL.ROI_HEADS.NAME":          modeling.ROI_HEADS_REGISTRY,
    "MODEL.ROI_BOX_HEAD.NAME":       modeling.ROI_BOX_HEAD_REGISTRY,
    "MODEL.ROI_MASK_HEAD.NAME":      modeling.ROI_MASK_HEAD_REGISTRY,
    "MODEL.ROI_KEYPOINT_HEAD.NAME":  modeling.ROI_KEYPOINT_HEAD_REGISTRY,
    "MODEL.SEM_SEG_HEAD.NAME":       modeling.SEM_SEG_HEADS_REGISTRY,
}
# fmt: on
# detectron2.layers.get_norm keeps its table to itself
_NORMS = ("BN", "SyncBN", "FrozenBN", "GN", "LN", "nnSyncBN", "naiveSyncBN", "naiveSyncBN_N")


def build_for_trial(cfg: CfgNode) -> nn.Module:
    """Build the model of ``cfg`` where it takes no memory and hardly any time.

    Returns:
        The model on the meta device, with names and shapes and no values; on the CPU if it must be.

    Raises:
        ConfigError: the configuration describes no model.
    """
    _check_point_head(cfg)
    try:
        try:
            return _build_on(cfg, "meta")
        except RuntimeError:  # NotImplementedError is one, too
            return _build_on(cfg, "cpu")  # a model that looks at values while it is built
    except KeyError as error:
        unknown = _unknown_name(cfg, error)
        if unknown is None:
            raise
        raise unknown from error


def _check_point_head(cfg: CfgNode) -> None:
    """What PointRend asserts without a word."""
    head, classes = cfg.MODEL.get("POINT_HEAD"), cfg.MODEL.ROI_HEADS.NUM_CLASSES
    if cfg.MODEL.ROI_MASK_HEAD.get("POINT_HEAD_ON") and classes != head.NUM_CLASSES:
        raise ConfigError(
            f"MODEL.POINT_HEAD.NUM_CLASSES is {head.NUM_CLASSES} and MODEL.ROI_HEADS.NUM_CLASSES "
            f"{classes}; set both to the same."
        )


def _build_on(cfg: CfgNode, device: str) -> nn.Module:
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = device
    with torch.device(device):
        return modeling.build_model(cfg)


def load_for_trial(model: nn.Module, load: Callable[[SafeCheckpointer], object]) -> None:
    """Let ``load`` compare a file with ``model``, which keeps no values.

    Raises:
        WeightsError: the file cannot be read or does not fit.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter", UserWarning)
        load(SafeCheckpointer(model))


def _unknown_name(cfg: CfgNode, error: KeyError) -> ConfigError | None:
    """The word on a name that Detectron2 looked up in vain; None if ``cfg`` does not hold it."""
    text = str(error.args[0])
    registry = re.match(r"No object named '(.*?)' found", text)
    name = registry[1] if registry else text
    keys = [
        key
        for key, value in leaves(cfg)
        if (value == name or (isinstance(value, (list, tuple)) and name in value))
        and (key in _REGISTRIES or not registry)
    ]
    if not keys:
        return None
    near = difflib.get_close_matches(name, _known_names(keys), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; check the spelling."
    return ConfigError(f"{' and '.join(keys)} names {name!r}, which is not there{hint}")


def _known_names(keys: Iterable[str]) -> list[str]:
    names: set[str] = set()
    for key in keys:
        names.update(name for name, _ in _REGISTRIES.get(key, ()))
        if key.endswith(".NORM"):
            names.update(_NORMS)
    return sorted(names)
