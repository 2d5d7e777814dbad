"""Load configurations of detectors of either kind: those of a command line, and by name those that
lambda_det and Detectron2 install.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from detectron2.config import CfgNode
from omegaconf import DictConfig

from lambda_det.config import CONFIGS
from lambda_det.detection.config import load_config
from lambda_det.detection.lazy import load_lazy_config
from lambda_det.training.config_file import LAZY, ZOO, ConfigFile, kind_of


def load_any_config(
    args: argparse.Namespace, file: ConfigFile | None = None
) -> CfgNode | DictConfig:
    """Load the file of --config-file; its content shows whether it is YAML or a LazyConfig.

    Args:
        args: of the parser of either.
        file: ``args.config_file``, where it was opened already.

    Raises:
        ConfigError: as :func:`lambda_det.detection.load_lazy_config` or
            :func:`lambda_det.detection.load_config` do.
    """
    if args.config_file and file is None:
        file = ConfigFile(args.config_file)
    is_lazy = file is not None and kind_of(file) == LAZY
    return load_lazy_config(args, file) if is_lazy else load_config(args, file)


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
    return load_file(CONFIGS / name)


def detectron2_config(name: str) -> DictConfig | CfgNode:
    """Load a configuration that Detectron2 installs, as ``model_zoo.get_config`` does.

    That function needs pkg_resources, which setuptools removed in version 81.

    Args:
        name: of a file below Detectron2's configs/, such as "common/models/mask_rcnn_fpn.py".

    Raises:
        ConfigError: there is no such file.
    """
    return load_file(ZOO / name)


def load_file(path: Path, opts: Sequence[str] = ()) -> DictConfig | CfgNode:
    """A configuration file of either kind, with keys of ``opts``, as a command line has them.

    Raises:
        ConfigError: as :func:`load_any_config` does.
    """
    return load_any_config(argparse.Namespace(config_file=str(path), opts=list(opts)))
