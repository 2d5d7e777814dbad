"""Detectors' YAML configurations: read with the flags for data, and as settings of a run."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from detectron2.config import CfgNode, get_cfg
from detectron2.utils import comm

from lambda_det.config import add_lambda_config, leaves
from lambda_det.detection.registry import HEADS
from lambda_det.detection.schedule import KEYS, SCALED
from lambda_det.errors import ConfigError, reason
from lambda_det.training.config_file import read_config

# What a recipe or the number of processes may change, and the command line sets literally
FITTED_KEYS = frozenset(
    [
        "DATALOADER.REPEAT_THRESHOLD",
        "DATALOADER.SAMPLER_TRAIN",
        "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS",
        "MODEL.ANCHOR_GENERATOR.SIZES",
        "MODEL.MASK_ON",
        "SOLVER.BASE_LR",
        "SOLVER.CHECKPOINT_PERIOD",
        "SOLVER.IMS_PER_BATCH",
        "SOLVER.MAX_ITER",
        "SOLVER.REFERENCE_WORLD_SIZE",
        "SOLVER.STEPS",
        "SOLVER.WARMUP_ITERS",
        "TEST.EVAL_PERIOD",
    ]
)
# Sections of our keys that only our trainer acts on
_ONLY_OUR_TRAINER = ("DATALOADER", "DATASETS", "INPUT", "SOLVER", "TEST")
DATA_FLAGS = ("train_json", "train_images", "test_json", "test_images")
_SIZES = tuple(f"INPUT.{edge}_SIZE_{use}" for edge in ("MIN", "MAX") for use in ("TRAIN", "TEST"))
_SMALLEST = 32  # pixels, the stride of a backbone
# Keys of other flags of the command line
_FLAGS = {flag: f"DATASETS.{flag.upper()}" for flag in DATA_FLAGS} | {
    "val_share": "DATASETS.VAL_SHARE",
    "group_by": "DATASETS.GROUP_BY",
    "stratify": "DATASETS.STRATIFY",
    "batch": "SOLVER.IMS_PER_BATCH",
    "epochs": "RECIPE.EPOCHS",
}


def load_config(args: argparse.Namespace) -> CfgNode:
    """Detectron2's defaults and ours, then --config-file, KEY VALUE pairs and the data flags.

    Args:
        args: of :func:`lambda_det.detection.parser`; flags that are absent or None are left out.

    Returns:
        The configuration, not frozen.

    Raises:
        ConfigError: the file is missing or not a mapping, a key or value cannot be, or a project
            of Detectron2 that they need is not installed.
    """
    cfg = get_cfg()
    add_lambda_config(cfg)
    read_config(cfg, args.config_file, args.opts, add_projects)
    flags, keys = flag_settings(args), list(args.opts or [])[::2]
    if size := getattr(args, "size", None):
        flags |= _typed_size(cfg, size, keys)
    for key, value in flags.items():
        *sections, name = key.split(".")
        functools.reduce(getattr, sections, cfg)[name] = value
    typed = [*keys, *flags]
    cfg.RECIPE.KEEP = sorted({*cfg.RECIPE.KEEP, *FITTED_KEYS.intersection(typed)})
    unscaled = {KEYS[name] for name in SCALED}.intersection(typed)
    cfg.SOLVER.UNSCALED = sorted({*cfg.SOLVER.UNSCALED, *unscaled})
    return cfg


def _typed_size(cfg: CfgNode, size: int, keys: Sequence[str]) -> dict[str, Any]:
    """The sizes of images that ``--size`` asks for, by their keys."""
    if size < _SMALLEST:
        raise ConfigError(f"--size is {size}; give {_SMALLEST} pixels or more.")
    sizes = sizes_for(cfg, size)
    if both := sizes.keys() & set(keys):
        raise ConfigError(f"--size and {min(both)} both say how large images are; give one.")
    return sizes


def sizes_for(cfg: CfgNode, side: float) -> dict[str, Any]:
    """The sizes of images in training and in the test, all changed by one factor.

    Args:
        cfg: has the sizes now.
        side: pixels of the shorter side of images in the test.

    Returns:
        Values by their keys.
    """
    factor = side / cfg.INPUT.MIN_SIZE_TEST
    sizes = {key: cfg.INPUT[key.partition(".")[2]] for key in _SIZES}
    if cfg.INPUT.LSJ.ENABLED:
        sizes["INPUT.LSJ.SIZE"] = cfg.INPUT.LSJ.SIZE
    return {
        key: tuple(round(factor * one) for one in value)
        if isinstance(value, tuple | list)
        else round(factor * value)
        for key, value in sizes.items()
    }


def load_saved_config(text: str, opts: Sequence[str], where: str) -> CfgNode:
    """Detectron2's defaults and ours, then the configuration of a checkpoint, and KEY VALUE pairs.

    Args:
        text: of :meth:`CfgNode.dump`.
        where: the checkpoint, for messages.

    Raises:
        ConfigError: as :func:`load_config` does.
    """
    cfg = get_cfg()
    add_lambda_config(cfg)
    read_config(cfg, where, opts, add_projects, text=text)
    return cfg


def flag_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags for data and schedule say, by the keys of YAML."""
    settings = {key: getattr(args, flag, None) for flag, key in _FLAGS.items()}
    settings = {key: value for key, value in settings.items() if value not in (None, "")}
    for key in settings.keys() & {f"DATASETS.{flag.upper()}" for flag in DATA_FLAGS}:
        if "://" not in settings[key]:  # the run's config.yaml serves in any folder
            settings[key] = os.path.abspath(os.path.expanduser(settings[key]))
    return settings | ({"RECIPE.ENABLED": True} if "RECIPE.EPOCHS" in settings else {})


def typed_keys(opts: Sequence[str]) -> dict[str, str]:
    """What follows the flags of a command line, by the keys of YAML or of a LazyConfig."""
    pairs = (word.lstrip("+").partition("=")[::2] for word in opts if "=" in word)
    lazy = {key: value.strip("'\"") for key, value in pairs}
    return lazy | dict(zip(opts[::2], opts[1::2], strict=False))


def add_projects(cfg: CfgNode, settings: Iterable[tuple[str, Any]]) -> None:
    """Add the keys of the projects that ``settings`` use, and import their modules.

    A project of :data:`lambda_det.detection.registry.HEADS` is used where one of its keys, or a
    value such as PointRendROIHeads, occurs. Keys that another project adds, too, go with whichever
    is there.

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
        if not head.module or not (named or (unknown and head.add_config)):
            continue
        try:
            module = importlib.import_module(head.module)
        except ImportError as error:
            if named:
                raise ConfigError(
                    f"{named[0]} needs {head.module}, which cannot be imported ({reason(error)}); "
                    "install it."
                ) from error
            continue
        add_keys = getattr(module, head.add_config, lambda cfg: None)
        added = get_cfg()
        add_keys(added)
        there = dict(leaves(added)).keys() - dict(leaves(cfg)).keys()
        if named or unknown & there:
            add_keys(cfg)


def warn_of_idle_keys(defaults: Mapping[str, Any]) -> None:
    """Make ``CfgNode.freeze`` warn once, on stderr, of keys that Detectron2's trainer ignores.

    Args:
        defaults: our keys with their defaults. Of these, the ones that only our trainer acts on
            are named where they have another value.
    """
    freeze = CfgNode.freeze
    ours = {key: value for key, value in defaults.items() if key.startswith(_ONLY_OUR_TRAINER)}

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
