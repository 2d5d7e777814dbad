"""A trained detector ready for inference: its weights, and the names of its classes."""

from __future__ import annotations

import copy
import logging
import os

from detectron2.config import CfgNode
from omegaconf import DictConfig
from torch import nn

from lambda_det.detection.data import class_names
from lambda_det.detection.model import for_inference
from lambda_det.detection.task import DetectionTask, read_parts
from lambda_det.distributed.launch import check_device
from lambda_det.errors import UserError, WeightsError
from lambda_det.training.checkpointer import SafeCheckpointer, last_checkpoint
from lambda_det.weights.loading import read_weights

__all__ = ["find_weights", "known_class_names", "trained_detector"]

logger = logging.getLogger(__name__)


def trained_detector(
    cfg: CfgNode | DictConfig, weights: str, precision: str | None = None
) -> nn.Module:
    """The detector of a configuration with the weights of a file, for inference on its device.

    Args:
        cfg: the configuration that the weights were trained with.
        weights: a checkpoint of the whole model; its averaged weights are taken where it has them.
        precision: "float32" or "bfloat16"; None for that of the configuration.

    Raises:
        ConfigError: the device is missing, or the configuration describes no model.
        WeightsError: the weights are missing or do not fit the model.
    """
    if not os.path.isfile(weights):
        raise WeightsError(f"There is no weights file {weights}; correct the path.")
    task = DetectionTask(cfg)
    check_device(task.settings.device, 1, task.settings.key("device"))
    model = task.build_model()
    content = read_weights(weights)
    if "ema" in content:
        logger.info(f"The averaged weights of {weights} are taken")
        content = {**content, "model": content["ema"]["model"]}
    SafeCheckpointer(model).load(weights, [], content=content)
    precision = precision or task.parts.test_precision
    return for_inference(model, precision, channels_last=task.parts.channels_last)


def find_weights(cfg: CfgNode | DictConfig, config_file: str | None, weights: str | None) -> str:
    """Choose ``weights`` if given, else the last checkpoint of the run, else those of ``cfg``.

    Args:
        cfg: names what the training started from.
        config_file: its folder is the folder of the run; None where ``cfg`` is of no file.
        weights: given by the user.

    Raises:
        WeightsError: none of the three is set.
    """
    last = last_checkpoint(os.path.dirname(config_file)) if config_file else ""
    settings = read_parts(cfg).settings
    found = weights or last or settings.weights
    if not found:
        where = f"{settings.key('weights')} is empty"
        if config_file:
            where = f"the folder of {config_file} has no checkpoint of a run"
        raise WeightsError(f"There are no weights: {where}; add --weights FILE.")
    return found


def known_class_names(cfg: CfgNode | DictConfig) -> list[str] | None:
    """The names of all classes of the model; None, with a warning, if they are not known."""
    named = copy.deepcopy(cfg)
    if isinstance(named, CfgNode):
        named.defrost()
    task = DetectionTask(named)
    count = (
        task.parts.detector.num_classes
    )  # registering data changes it to that of the annotations
    try:
        task.register_data()
        names = class_names((*task.parts.train_names, *task.parts.test_names))
    except UserError as error:
        logger.warning("Classes have numbers, because their names are unknown: %s", error)
        return None
    if names is not None and count not in (None, len(names)):
        logger.warning(
            "Classes have numbers: the model has %d classes, the data set %d names.",
            count,
            len(names),
        )
        return None
    return names
