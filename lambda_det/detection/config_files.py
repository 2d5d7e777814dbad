"""Load the configurations that lambda_det and Detectron2 install, by name."""

from __future__ import annotations

import argparse
from pathlib import Path

from detectron2.config import CfgNode, LazyConfig
from omegaconf import DictConfig

from lambda_det.config import CONFIGS
from lambda_det.detection.config import load_config
from lambda_det.errors import ConfigError, suggest
from lambda_det.training.config_file import ZOO


def get_config(name: str) -> DictConfig | CfgNode:
    """Load a configuration of lambda_det, from a checkout or from the installed package.

    Args:
        name: of a file below configs/, such as "common/backbone.py", "mask_rcnn_lambdaresnet50.py"
            or "mask_rcnn_lambdaresnet50.yaml".

    Returns:
        A new LazyConfig for a .py file; a new CfgNode with all keys for a .yaml file.

    Raises:
        ConfigError: there is no such file, or it is a recipe of a classifier.
    """
    return _load(CONFIGS, name)


def detectron2_config(name: str) -> DictConfig | CfgNode:
    """Load a configuration that Detectron2 installs, as ``model_zoo.get_config`` does.

    That function needs pkg_resources, which setuptools removed in version 81.

    Args:
        name: of a file below Detectron2's configs/, such as "common/models/mask_rcnn_fpn.py".

    Raises:
        ConfigError: there is no such file.
    """
    return _load(ZOO, name)


def _load(folder: Path, name: str) -> DictConfig | CfgNode:
    path = folder / name
    if not path.is_file():
        names = [str(p.relative_to(folder)) for p in sorted(folder.rglob(f"*{path.suffix}"))]
        raise ConfigError(f"There is no configuration {name} in {folder}{suggest(name, names)}")
    if path.suffix != ".yaml":
        return LazyConfig.load(str(path))
    return load_config(argparse.Namespace(config_file=str(path), opts=[]))
