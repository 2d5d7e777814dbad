"""A trained detector ready for inference: its weights, and the names of its classes."""

from __future__ import annotations

import argparse
import copy
import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data.transforms import AugInput, AugmentationList
from omegaconf import DictConfig
from torch import nn

from lambda_det.config import find_config_file
from lambda_det.detection.config import typed_keys
from lambda_det.detection.data import classes
from lambda_det.detection.model import for_inference
from lambda_det.detection.task import DetectionTask, read_parts
from lambda_det.distributed.devices import check_device
from lambda_det.errors import UserError, WeightsError
from lambda_det.training.checkpoint_files import choose_checkpoint
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.weights.loading import read_weights

logger = logging.getLogger(__name__)


class Taken(NamedTuple):
    """The weights that a detector has: of which file, saved after how many steps, of which kind."""

    file: str
    step: int | None
    averaged: bool

    def __str__(self) -> str:
        step = "" if self.step is None else f"after {self.step:,} steps, "
        return f"{self.file} ({step}{'averaged' if self.averaged else 'raw'} weights)"

    @classmethod
    def of(cls, file: str, content: Mapping[str, Any], *, raw: bool = False) -> Taken:
        """Those of a checkpoint or a backbone file, read already."""
        about = content.get("meta")
        about = about if isinstance(about, Mapping) else {}
        iteration = content.get("iteration")
        step = iteration + 1 if type(iteration) is int else about.get("step")
        return cls(file, step, about.get("weights") == "ema" or ("ema" in content and not raw))

    def as_meta(self) -> dict[str, Any]:
        """What an exported file says of them."""
        return {"weights": self.file, "step": self.step, "averaged": self.averaged}


def as_input(image: np.ndarray, augmentations: AugmentationList) -> dict[str, Any]:
    """An image [H, W, 3] as Detectron2's models take it, resized."""
    resized = AugInput(image)
    augmentations(resized)
    tensor = torch.as_tensor(resized.image.astype("float32").transpose(2, 0, 1))
    return {"image": tensor, "height": image.shape[0], "width": image.shape[1]}


def add_model_flags(
    parser: argparse.ArgumentParser, source: argparse._MutuallyExclusiveGroup
) -> None:
    """Let a command name a detector by ``--config``, and its weights by three more flags.

    Args:
        parser: gets ``--weights``, ``--checkpoint`` and ``--raw``.
        source: gets ``--config``, which excludes the other flags of this group.
    """
    source.add_argument(
        *("--config", "--config-file"),
        dest="config_file",
        type=find_config_file,
        metavar="FILE",
        help="of the detector, YAML or Python; that of a run brings its weights",
    )
    parser.add_argument(
        "--weights", metavar="FILE", help="checkpoint of the model; default: of the run"
    )
    parser.add_argument(
        "--checkpoint",
        default="best",
        metavar="best|last|STEP",
        help="of the run (default: the best one at its evaluations)",
    )
    parser.add_argument(
        "--raw", action="store_true", help="the trained weights, also where there are averaged ones"
    )


def trained_detector(
    cfg: CfgNode | DictConfig, weights: str, precision: str | None = None, *, raw: bool = False
) -> tuple[nn.Module, Taken, dict[str, Any]]:
    """The detector of a configuration with the weights of a file, for inference on its device.

    Args:
        cfg: the configuration that the weights were trained with.
        weights: a checkpoint of the whole model; its averaged weights are taken where it has them.
        precision: "float32" or "bfloat16"; None for that of the configuration.
        raw: take the trained weights instead of averaged ones.

    Returns:
        The detector, what its weights are, and what is known of its classes, as
        :func:`lambda_det.detection.data.classes.describe` has it.

    Raises:
        ConfigError: the device is missing, or the configuration describes no model.
        WeightsError: the weights are missing or do not fit the model.
    """
    if not os.path.isfile(weights):
        raise WeightsError(f"{weights} is no file of a trained detector; name its checkpoint.")
    task = DetectionTask(cfg)
    check_device(task.settings.device, 1, task.settings.key("device"))
    model = task.build_model()
    content = read_weights(weights)
    taken = Taken.of(weights, content, raw=raw)
    if taken.averaged and "ema" in content:  # a file of the Hub has only these
        content = {**content, "model": content["ema"]["model"]}
    SafeCheckpointer(model).load(weights, [], content=content)
    precision = precision or task.settings.test_precision
    model = for_inference(model, precision, channels_last=task.settings.channels_last)
    return model, taken, _known_classes(cfg, content, weights)


def find_weights(
    cfg: CfgNode | DictConfig,
    config_file: str | None,
    weights: str | None,
    checkpoint: str = "best",
) -> str:
    """Choose ``weights`` if given, else a checkpoint of the run, else those of ``cfg``.

    Args:
        cfg: names what the training started from.
        config_file: its folder is the folder of the run; None where ``cfg`` is of no file.
        weights: given by the user.
        checkpoint: of the run: "best", "last", or the number of its step.

    Raises:
        WeightsError: none of the three is set, or the run has no such checkpoint.
    """
    of_run = ""
    if config_file and not weights:
        of_run = choose_checkpoint(os.path.dirname(config_file), checkpoint)
    settings = read_parts(cfg).settings
    found = weights or of_run or settings.weights
    if not found:
        where = f"{settings.key('weights')} is empty"
        if config_file:
            where = f"the folder of {config_file} has no checkpoint of a run"
        raise WeightsError(f"There are no weights: {where}; add --weights FILE.")
    return found


def typed_weights(opts: list[str]) -> str | None:
    """The weights that configuration keys name, which come before those of the run."""
    typed = typed_keys(opts)
    return typed.get("MODEL.WEIGHTS") or typed.get("train.init_checkpoint")


def _known_classes(
    cfg: CfgNode | DictConfig, content: Mapping[str, Any], weights: str
) -> dict[str, Any]:
    """What a checkpoint says of its classes, or else the data of ``cfg`` as they are now."""
    named = copy.deepcopy(cfg)
    if isinstance(named, CfgNode):
        named.defrost()
    task = DetectionTask(named)
    count = task.parts.detector.num_classes  # registering data changes it to that of the data
    known = classes.of_checkpoint(content)
    if known is None:
        try:
            task.register_data()
            known = classes.describe((*task.parts.train_names, *task.parts.test_names))
        except UserError as error:
            logger.warning("Classes have numbers, because their names are unknown: %s", error)
            return {}
        if "thing_classes" in known:
            logger.info(
                f"{weights} does not hold the names of its classes, as checkpoints of earlier "
                "versions: they are those of the data as they are now"
            )
    names = known.get("thing_classes")
    if names is not None and count not in (None, len(names)):
        logger.warning(
            f"Classes have numbers: the model has {count} classes, the data set {len(names)} names."
        )
        return {}
    return known
