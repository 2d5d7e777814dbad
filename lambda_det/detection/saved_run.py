"""What a trained detector is: it is written with every checkpoint, and every user opens it here.

A checkpoint records the network with its options, the configuration, the pixel settings and the
sizes of its run, and the classes of its data. So nothing else is needed to predict, to export or to
publish. A checkpoint of another trainer of Detectron2 records nothing, and a LazyConfig is a
program, which no file of weights may hold: there the config.yaml beside the checkpoint describes
the run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from omegaconf import DictConfig
from torch import nn

from lambda_det.detection.components import Components
from lambda_det.detection.config import load_config
from lambda_det.detection.config_files import load_file
from lambda_det.detection.data import classes
from lambda_det.detection.model import for_inference, prepare_model
from lambda_det.detection.task import read_components, recorded_backbone, recorded_input
from lambda_det.distributed.launch import check_device
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.training.config_file import ConfigFile
from lambda_det.training.run_folder import find_checkpoint
from lambda_det.training.task import EMA, RAW
from lambda_det.weights.formats import read_checkpoint
from lambda_det.weights.loading import load, read_weights
from lambda_det.weights.provenance import BEST_SCORES, RUN, Origin, entry, recorded_network

# Keys of the weights that a training starts from; a run's own weights are in its checkpoints
_WEIGHTS = {"MODEL.WEIGHTS", "train.init_checkpoint"}


@dataclass(frozen=True)
class SavedRun:
    """A trained detector.

    Attributes:
        origin: the file of its weights, which of the file's weights, and the number of steps.
        config: of the run, with the changes that were made when it was opened.
        components: what the configuration says.
        content: of the file.
        classes: what the file says about the classes, as
            :func:`lambda_det.detection.data.classes.facts_of` has it; {} where it says nothing.
    """

    origin: Origin
    config: CfgNode | DictConfig
    components: Components
    content: Mapping[str, Any]
    classes: Mapping[str, Any]

    @property
    def best_score(self) -> float | None:
        """The score with the best F1 at the evaluation of these weights; None if it is unknown."""
        scores = entry(entry(self.content, RUN), BEST_SCORES)
        return usable_score(scores.get(EMA if self.origin.averaged else RAW))

    def about(self) -> dict[str, Any]:
        """What a user of an exported file must know, as plain values."""
        tiling = self.components.tiling
        return {
            **self.origin.as_meta(),
            **recorded_input(self.components),
            "tile": tiling.as_meta() if tiling else None,
            "best_score": self.best_score,
            "classes": self.classes.get("thing_classes"),
            "dataset": dict(self.classes),
        }

    def detector(self, device: str | None = None, precision: str | None = None) -> nn.Module:
        """The detector with its weights, for inference.

        Args:
            device: None as in the configuration.
            precision: "float32" or "bfloat16"; None as in the configuration.

        Raises:
            ConfigError: the device is missing, or the configuration describes no model.
            WeightsError: the weights do not fit the model.
        """
        settings = self.components.settings
        device = device or settings.device
        check_device(device, 1, settings.key("device"))
        model = prepare_model(
            self.components.make_model(),
            device,
            channels_last=settings.channels_last,
        )
        averaged = self.origin.averaged
        load(model, self.origin.file, self.content, complete=True, averaged=averaged)
        precision = precision or settings.test_precision
        return for_inference(model, precision, channels_last=settings.channels_last)


def usable_score(value: Any) -> float | None:
    """A recorded score, or None where it is no number from 0 to 1."""
    is_number = isinstance(value, int | float)
    return float(value) if is_number and 0 <= value <= 1 else None


def open_run(
    source: str | os.PathLike | CfgNode | DictConfig,
    checkpoint: str = "best",
    *,
    raw: bool = False,
    opts: Sequence[str] = (),
) -> SavedRun:
    """Read a trained detector.

    Args:
        source: the folder of a run or one of its checkpoints; or a configuration that names the
            weights of the whole detector. A LazyConfig, also in the config.yaml of a folder, must
            be from people you trust, because what it names is called.
        checkpoint: of a folder: "best" at its evaluations, "last", or the number of its step.
        raw: the trained weights, also where the file has averaged ones.
        opts: changes of the configuration, as a command line has them.

    Raises:
        ConfigError: a value cannot be, or ``source`` is the file of a configuration.
        WeightsError: there is no such checkpoint, or nothing says which detector it holds.
    """
    if isinstance(source, CfgNode | DictConfig):
        settings = read_components(source).settings
        if not settings.weights:
            raise WeightsError(f"{settings.key('weights')} is empty; name a checkpoint.")
        return _opened(settings.weights, read_weights(settings.weights), source, raw=raw)
    if Path(source).suffix in (".yaml", ".yml", ".py"):
        raise ConfigError(
            f"{source} is a configuration, and a detector is asked for: name the folder of a run, "
            "or one of its checkpoints."
        )
    file = find_checkpoint(source, checkpoint)
    return run_of_checkpoint(file, read_checkpoint(file), raw=raw, opts=opts)


def run_of_checkpoint(
    file: str, content: Mapping[str, Any], *, raw: bool, opts: Sequence[str]
) -> SavedRun:
    """The trained detector of a checkpoint that was read already, as :func:`open_run` has it.

    Args:
        file: the checkpoint, for messages.
        content: of the checkpoint.
        raw: take the raw weights where there are averaged ones.
        opts: keys and values, which replace the run's.

    Raises:
        ConfigError: ``opts`` name other weights, the checkpoint is of a classifier, or a value
            cannot be.
    """
    if given := {word.lstrip("+").partition("=")[0] for word in opts} & _WEIGHTS:
        raise ConfigError(
            f"{min(given)} cannot be set, because a run has its own weights; name the checkpoint."
        )
    if "recipe" in content:
        raise ConfigError(f"{file} is of a classifier; name the run of a detector.")
    return _opened(file, content, _configuration(content, file, opts), raw=raw)


def _opened(
    file: str, content: Mapping[str, Any], config: CfgNode | DictConfig, *, raw: bool
) -> SavedRun:
    components = read_components(config)
    facts = classes.of_checkpoint(content) or {}
    if len(facts.get("thing_classes", ())) not in (0, components.detector.num_classes):
        facts = {}  # the weights are of another model, and are refused when they are loaded
    return SavedRun(Origin.of(file, content, raw=raw), config, components, content, facts)


def with_network(content: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """The content of a checkpoint, in which its backbone is named.

    A checkpoint of another trainer of Detectron2 does not name it; the config.yaml beside it does.
    """
    beside = Path(file).with_name("config.yaml")
    network, _ = recorded_network(content)
    if network is not None or "imported" in content.get("meta", {}) or not beside.is_file():
        return content
    components = read_components(_configuration(content, file, ()))
    with torch.device("meta"):
        backbone = recorded_backbone(components.make_backbone())
    pixels = components.pixels.as_meta() if components.pixels else {}
    return {**content, RUN: {**pixels, **backbone}} if backbone else content


def _configuration(
    content: Mapping[str, Any], file: str, opts: Sequence[str]
) -> CfgNode | DictConfig:
    """The configuration of a checkpoint, recorded in it or beside it."""
    text = entry(content, RUN).get("config")
    if isinstance(text, str):
        args = argparse.Namespace(config_file=file, opts=opts)
        return load_config(args, ConfigFile(file, text))
    beside = Path(file).with_name("config.yaml")
    if not beside.is_file():
        raise WeightsError(
            f"{file} does not say which detector it holds, and there is no {beside.name} beside it "
            "that does; name a checkpoint of lambda-det train, or the folder of a run."
        )
    return load_file(beside, opts)
