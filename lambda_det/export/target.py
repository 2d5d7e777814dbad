"""The detector that a backbone file is tried in, from a configuration of either kind."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode, instantiate
from omegaconf import DictConfig
from torch import nn

from lambda_det.detection.lazy_file import load_lazy_file
from lambda_det.detection.model_check import build_for_trial
from lambda_det.detection.trainer import DetectionTrainer
from lambda_det.errors import ConfigError, reason
from lambda_det.training.config_file import load_config
from lambda_det.training.lazy_yaml import is_lazy_file
from lambda_det.weights.provenance import PixelSettings

__all__ = ["build_target", "load_target"]


def load_target(file: str | Path) -> CfgNode | DictConfig:
    """Read a detector's configuration: YAML, or a LazyConfig, saved or as the program that it is.

    Raises:
        ConfigError: it is not there, or describes no model.
    """
    if not is_lazy_file(file):
        return load_config(argparse.Namespace(config_file=str(file), opts=[]))
    loaded = load_lazy_file(file)
    if "model" not in loaded:
        raise ConfigError(f"{file} has no `model`; name the LazyConfig of a detector.")
    return loaded


def build_target(target: CfgNode | DictConfig) -> tuple[nn.Module, PixelSettings]:
    """Build the detector on the CPU, in evaluation mode, and say what it makes of images.

    Raises:
        ConfigError: the configuration describes no detector.
    """
    if isinstance(target, CfgNode):
        build_for_trial(target)  # which has a word for each mistake in the configuration
        target = target.clone()
        target.defrost()
        target.MODEL.DEVICE = "cpu"
        return DetectionTrainer.build_model(target).eval(), PixelSettings.from_config(target)
    try:
        detector = instantiate(target.model)
    except Exception as error:  # from within whatever it names
        raise ConfigError(
            f"The `model` of the LazyConfig cannot be made ({type(error).__name__}: "
            f"{reason(error)}); mend it, or name another one."
        ) from error
    if not isinstance(getattr(detector, "backbone", None), nn.Module):
        raise ConfigError(
            f"The `model` of the LazyConfig is a {type(detector).__name__} without a backbone; "
            "name that of a detector."
        )
    return detector.eval(), _pixels(detector, target.model)


def _pixels(detector: Any, model: DictConfig) -> PixelSettings:
    # Semantic segmenters don't keep the order of the channels
    order = getattr(detector, "input_format", None) or model.get("input_format", "BGR")
    mean, std = (getattr(detector, name).flatten().tolist() for name in ("pixel_mean", "pixel_std"))
    return PixelSettings(order, mean, std)
