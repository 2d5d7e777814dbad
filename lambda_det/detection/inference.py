"""A trained detector ready for inference: its weights, and the names of its classes."""

from __future__ import annotations

import logging
import os

from detectron2.config import CfgNode
from torch import nn

from lambda_det.detection.data import class_names, register_json_datasets
from lambda_det.detection.model import build_model, for_inference
from lambda_det.distributed.launch import check_device
from lambda_det.errors import UserError, WeightsError
from lambda_det.training.checkpointer import SafeCheckpointer, last_checkpoint
from lambda_det.weights.loading import read_weights

__all__ = ["find_weights", "known_class_names", "trained_detector"]

logger = logging.getLogger(__name__)


def trained_detector(cfg: CfgNode, weights: str, precision: str | None = None) -> nn.Module:
    """The detector of a configuration with the weights of a file, for inference on MODEL.DEVICE.

    Args:
        cfg: the configuration that the weights were trained with.
        weights: a checkpoint of the whole model; its averaged weights are taken where it has them.
        precision: "float32" or "bfloat16"; None for TEST.PRECISION.

    Raises:
        ConfigError: the device is missing, or the configuration describes no model.
        WeightsError: the weights are missing or do not fit the model.
    """
    if not os.path.isfile(weights):
        raise WeightsError(f"There is no weights file {weights}; correct the path.")
    check_device(cfg.MODEL.DEVICE, 1)
    model = build_model(cfg)
    content = read_weights(weights)
    if "ema" in content:
        logger.info(f"The averaged weights of {weights} are taken")
        content = {**content, "model": content["ema"]["model"]}
    SafeCheckpointer(model).load(weights, [], content=content)
    return for_inference(model, precision or cfg.TEST.PRECISION)


def find_weights(cfg: CfgNode, config_file: str | None, weights: str | None) -> str:
    """Choose ``weights`` if given, else the last checkpoint of the run, else MODEL.WEIGHTS.

    Args:
        cfg: in the config.yaml of a run, MODEL.WEIGHTS is what the training started from.
        config_file: its folder is the folder of the run; None where ``cfg`` is of no file.
        weights: given by the user.

    Raises:
        WeightsError: none of the three is set.
    """
    last = last_checkpoint(os.path.dirname(config_file)) if config_file else ""
    found = weights or last or cfg.MODEL.WEIGHTS
    if not found:
        where = f"the folder of {config_file} has no checkpoint of a run" if config_file else ""
        raise WeightsError(
            f"There are no weights: {where or 'MODEL.WEIGHTS is empty'}; add --weights FILE."
        )
    return found


def known_class_names(cfg: CfgNode) -> list[str] | None:
    """The names of all classes of the model; None, with a warning, if they are not known."""
    retinanet = cfg.MODEL.META_ARCHITECTURE == "RetinaNet"
    section = cfg.MODEL.RETINANET if retinanet else cfg.MODEL.ROI_HEADS
    count = section.NUM_CLASSES
    try:
        # A copy, because registering data sets NUM_CLASSES from the annotations
        named = cfg.clone()
        named.defrost()
        register_json_datasets(named)
        names = class_names(named)
    except UserError as error:
        logger.warning("Classes have numbers, because their names are unknown: %s", error)
        return None
    if names is not None and len(names) != count:
        logger.warning(
            "Classes have numbers: the model has %d classes, the data set %d names.",
            count,
            len(names),
        )
        return None
    return names
