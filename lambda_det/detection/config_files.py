"""The configurations that come with lambda_det and with Detectron2, by name."""

from __future__ import annotations

import difflib
from pathlib import Path

import detectron2
from detectron2.config import CfgNode, LazyConfig, get_cfg
from omegaconf import DictConfig

from lambda_det.config import add_lambda_config, leaves
from lambda_det.detection.projects import add_projects
from lambda_det.errors import ConfigError

__all__ = ["detectron2_config", "get_config"]

_PACKAGE = Path(__file__).parents[1]


def get_config(name: str) -> DictConfig | CfgNode:
    """A configuration of lambda_det, from a checkout or an installed package alike.

    Args:
        name: of a file below configs/, such as "common/backbone.py", "mask_rcnn_lambdaresnet50.py"
            or "mask_rcnn_lambdaresnet50.yaml".

    Returns:
        A fresh LazyConfig for a .py file, a fresh configuration with all keys for a .yaml file.

    Raises:
        ConfigError: there is no such file, or it is a recipe for classifiers.
    """
    folder = _PACKAGE / "configs"  # where the wheel has them
    return _load(folder if folder.is_dir() else _PACKAGE.parent / "configs", name)


def detectron2_config(name: str) -> DictConfig | CfgNode:
    """A configuration that Detectron2 installs, as ``model_zoo.get_config`` gives it.

    That function needs pkg_resources, which setuptools 81 and newer has not.

    Args:
        name: of a file below Detectron2's configs/, such as "common/models/mask_rcnn_fpn.py".

    Raises:
        ConfigError: there is no such file.
    """
    return _load(Path(detectron2.__file__).parent / "model_zoo" / "configs", name)


def _load(folder: Path, name: str) -> DictConfig | CfgNode:
    path = folder / name
    if not path.is_file():
        names = [str(p.relative_to(folder)) for p in sorted(folder.rglob(f"*{path.suffix}"))]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ConfigError(f"There is no configuration {name} in {folder}{hint}")
    if path.suffix != ".yaml":
        return LazyConfig.load(str(path))
    # What is installed is trusted: Detectron2 computes its RetinaNet's anchors in the file
    loaded = CfgNode.load_yaml_with_base(str(path), allow_unsafe=True)
    cfg = get_cfg()
    add_lambda_config(cfg)
    add_projects(cfg, leaves(loaded))
    try:
        cfg.merge_from_other_cfg(CfgNode(loaded))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} is no configuration of a detector ({error}); tools/train_imagenet.py reads "
            "those of classifiers."
        ) from error
    return cfg
