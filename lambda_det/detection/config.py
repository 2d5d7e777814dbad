"""Read YAML configurations of detectors, with the flags for data."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from detectron2.config import CfgNode, get_cfg
from detectron2.utils import comm

from lambda_det.config import KEYS, add_lambda_config, leaves
from lambda_det.detection.registry import HEADS
from lambda_det.errors import ConfigError, refused
from lambda_det.training.config_file import ConfigFile, read_config

logger = logging.getLogger(__name__)

# Sections of our keys that only our trainer acts on
_ONLY_OUR_TRAINER = ("DATALOADER", "DATASETS", "INPUT", "SOLVER", "TEST")
# flags of files of data, each with the key that it stands for
_FILE_FLAGS = ("train_json", "train_images", "test_json", "test_images")


class Prepared(NamedTuple):
    """A configuration with the data of a command line.

    Attributes:
        config: with the keys of the command line, and with those that follow from own data.
        file: that it is of; None for none.
    """

    config: CfgNode
    file: str | None


def load_config(args: argparse.Namespace, file: ConfigFile | None = None) -> CfgNode:
    """Detectron2's defaults and ours, then --config-file, KEY VALUE pairs and the flags of files.

    Args:
        args: of :func:`lambda_det.detection.parser`; flags that are absent or None are left out.
        file: ``args.config_file``, where it was opened already.

    Returns:
        The configuration, not frozen.

    Raises:
        ConfigError: the file is missing or not a mapping, a key or value cannot be, or a project
            of Detectron2 that they need is not installed.
    """
    if args.config_file and file is None:
        file = ConfigFile(args.config_file)
    cfg, opts = get_cfg(), args.opts or ()
    add_lambda_config(cfg)
    read_config(cfg, file, opts, add_projects)
    if file:
        _find_moved_files(cfg, Path(file.path).parent, opts)
    _keep_literal(cfg, opts)
    for flag in _FILE_FLAGS:
        if path := getattr(args, flag, None):  # so the run's config.yaml can be used in any folder
            is_address = "://" in path
            path = path if is_address else os.path.abspath(os.path.expanduser(path))
            cfg.DATASETS[flag.upper()] = path
    return cfg


def load_with_data(args: argparse.Namespace, file: ConfigFile | None) -> Prepared:
    """The configuration of a command line whose flags may name own data, which are then prepared.

    Args:
        args: as for :func:`load_config`; None in place of a file chooses one for the data.
            ``prepare`` names a function of ``args`` and of the configuration, as "module:name". It
            gives the configuration for the data, or None where there is nothing to prepare.
        file: ``args.config_file``, where it was opened already.

    Raises:
        ConfigError: as :func:`load_config` does.
        UserError: the data cannot be prepared.
    """
    config = None if args.config_file is None else load_config(args, file)
    return resolve_name(args.prepare)(args, config) or Prepared(config, args.config_file)


def changed_config(cfg: CfgNode, opts: Sequence[str]) -> CfgNode:
    """A copy of a configuration with KEY VALUE pairs, as a command line has them.

    Raises:
        ConfigError: a key or value cannot be.
    """
    cfg = cfg.clone()
    read_config(cfg, None, opts, add_projects)
    _keep_literal(cfg, opts)
    return cfg


def _keep_literal(cfg: CfgNode, opts: Sequence[str]) -> None:
    """Note the given keys that would else be scaled to the number of processes."""
    given = {key for key in opts[::2] if key in KEYS and KEYS[key].is_scaled}
    cfg.SOLVER.UNSCALED = sorted({*cfg.SOLVER.UNSCALED, *given})


def _find_moved_files(cfg: CfgNode, folder: Path, opts: Sequence[str]) -> None:
    """Find files of labels, but those of ``opts``, in a run's folder that was moved with them."""
    for name in ("TRAIN_JSON", "TEST_JSON"):
        recorded = cfg.DATASETS[name]
        if not recorded or "://" in recorded or f"DATASETS.{name}" in opts[::2]:
            continue
        here = folder.joinpath(*Path(recorded).parts[-2:])
        if not Path(recorded).exists() and here.is_file():
            logger.info(f"DATASETS.{name} {recorded} was moved, and is {here} now")
            cfg.DATASETS[name] = str(here.absolute())


def add_projects(cfg: CfgNode, settings: Iterable[tuple[str, Any]]) -> None:
    """Add the keys of the projects that ``settings`` use, and import their modules.

    A project of :data:`lambda_det.detection.registry.HEADS` is used where a key of its sections, or
    a value such as PointRendROIHeads, occurs.

    Args:
        cfg: with the keys of Detectron2 and lambda_det.
        settings: (dotted key, value) of a file and of the command line.

    Raises:
        ConfigError: the project is not installed.
    """
    settings = list(settings)
    unknown = {key for key, _ in settings} - dict(leaves(cfg)).keys()
    for head in HEADS.values():
        named = [f"{k} {v}" for k, v in settings if isinstance(v, str) and v.startswith(head.names)]
        named += sorted(key for key in unknown if key.startswith(head.sections))
        if not head.module or not named:
            continue
        what = f"{named[0]} needs {head.module}, which cannot be imported"
        with refused(ConfigError, what, "install it", ImportError):
            module = importlib.import_module(head.module)
        add_keys = getattr(module, head.add_config, lambda cfg: None)
        added = get_cfg()
        add_keys(added)
        if dict(leaves(added)).keys() - dict(leaves(cfg)).keys():  # or values of a file are lost
            add_keys(cfg)


def with_projects(cfg: CfgNode) -> CfgNode:
    """The same configuration, in a process that has not read it and imports what its values name.

    Raises:
        ConfigError: as :func:`add_projects` does.
    """
    known = get_cfg()
    add_lambda_config(known)
    add_projects(known, leaves(cfg))
    return cfg


def warn_of_idle_keys() -> None:
    """Make ``CfgNode.freeze`` warn once, on stderr, of keys that Detectron2's trainer ignores.

    The warning names keys that only our trainer acts on and that have another value than by
    default.
    """
    freeze = CfgNode.freeze
    ours = {
        key: row.default
        for key, row in KEYS.items()
        if row.default is not None and key.startswith(_ONLY_OUR_TRAINER)
    }

    def freeze_and_warn(cfg: CfgNode) -> None:
        freeze(cfg)
        idle = [key for key, value in leaves(cfg) if ours.get(key, value) != value]
        if idle and comm.is_main_process():
            CfgNode.freeze = freeze  # once is enough
            print(
                f"lambda_det.run: warning: the configuration sets {', '.join(idle)}, which only "
                "lambda_det's own trainer acts on (tools/train_net.py).",
                file=sys.stderr,
                flush=True,
            )

    CfgNode.freeze = freeze_and_warn
