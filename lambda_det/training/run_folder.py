"""OUTPUT_DIR: one run in one folder, and nothing of an older run overwritten."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode

from lambda_det.config import leaves
from lambda_det.errors import ConfigError, listed
from lambda_det.files import replace_text
from lambda_det.training.checkpoint_files import candidates, last_checkpoint
from lambda_det.training.lazy_yaml import read_plain

__all__ = [
    "DETECTION_KEYS",
    "FixedKeys",
    "changed_keys",
    "check_evaluation_folder",
    "check_run_folder",
    "cut_metrics",
    "describe_run",
    "save_config",
]


@dataclass(frozen=True)
class FixedKeys:
    """The keys that a resumed run must keep.

    The weights or the optimiser's saved state depend on them, so that a new value would not fit or,
    worse, be ignored without a word.

    Attributes:
        names: keys, and sections with all that is in them.
        but_not: those within ``names`` that may change nevertheless.
    """

    names: tuple[str, ...]
    but_not: tuple[str, ...]

    def __contains__(self, key: str) -> bool:
        return _within(key, self.names) and not _within(key, self.but_not)


def _within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)


DETECTION_KEYS = FixedKeys(
    names=(
        "MODEL",
        "INPUT.FORMAT",
        "SEED",
        "SOLVER.BASE_LR",
        "SOLVER.BIAS_LR_FACTOR",
        "SOLVER.IMS_PER_BATCH",
        "SOLVER.MOMENTUM",
        "SOLVER.NESTEROV",
        "SOLVER.REFERENCE_WORLD_SIZE",
        "SOLVER.WEIGHT_DECAY",
        "SOLVER.WEIGHT_DECAY_BIAS",
        "SOLVER.WEIGHT_DECAY_NORM",
    ),
    but_not=(
        "MODEL.DEVICE",
        "MODEL.WEIGHTS",
        "MODEL.LAMBDA_RESNET.CHECKPOINT_ACTIVATIONS",
        "MODEL.LAMBDA_RESNET.IMPLEMENTATION",
    ),
)


def check_run_folder(cfg: CfgNode, *, resume: bool, fixed: FixedKeys = DETECTION_KEYS) -> None:
    """Refuse to train in the folder of another run; write nothing.

    Args:
        cfg: as it would be saved to config.yaml.
        resume: continue what is there; a folder without a run is fine, too.
        fixed: what a resumed run must keep.

    Raises:
        ConfigError: OUTPUT_DIR cannot be written to, holds a run and ``resume`` is not set, or
            holds a run of another configuration.
    """
    folder = _writable_folder(cfg)
    if not _holds_run(folder):
        return
    if not resume:
        raise ConfigError(
            f"OUTPUT_DIR {folder} already holds a run: add --resume to continue it, or give "
            "another OUTPUT_DIR."
        )
    weights = sorted(folder.glob("*.pth"), key=lambda path: path.stat().st_mtime)
    if weights and not candidates(cfg.OUTPUT_DIR):
        # Those of a run have names by which they are found even if the pointer is lost
        raise ConfigError(
            f"{folder} holds {listed(path.name for path in weights)}, but no last_checkpoint that "
            "names one to continue, and --resume would start over their run: write a name into "
            f"{folder / 'last_checkpoint'}, or give another OUTPUT_DIR."
        )
    for key, before, now in changed_keys(cfg, folder / "config.yaml"):
        if key in fixed:
            raise ConfigError(
                f"--resume continues the run in {folder}, which has {key} {before!r}; now it is "
                f"{now!r}. Set it back, or give another OUTPUT_DIR."
            )


def check_evaluation_folder(cfg: CfgNode, weights: str) -> None:
    """Refuse to write the results of some weights over those of another run; write nothing.

    Args:
        cfg: OUTPUT_DIR is used.
        weights: the file to evaluate.

    Raises:
        ConfigError: OUTPUT_DIR cannot be written to, or holds a run that ``weights`` is not of.
    """
    folder = _writable_folder(cfg)
    own = "://" not in weights and folder.resolve() in Path(weights).resolve().parents
    if _holds_run(folder) and not own:
        raise ConfigError(
            f"OUTPUT_DIR {folder} holds a run that {weights} is not of, and whose results would be "
            "overwritten: give another OUTPUT_DIR."
        )


def _writable_folder(cfg: CfgNode) -> Path:
    folder = Path(cfg.OUTPUT_DIR)
    if not cfg.OUTPUT_DIR or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"OUTPUT_DIR {cfg.OUTPUT_DIR!r} is not a folder; name one to write to.")
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"OUTPUT_DIR {folder} cannot be written to: {parent} is read-only.")
    return folder


def _holds_run(folder: Path) -> bool:
    return (
        (folder / "last_checkpoint").exists()
        or (folder / "metrics.json").exists()
        or any(folder.glob("*.pth"))
    )


def changed_keys(cfg: CfgNode, saved: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value in the file, value now) for each key that differs from a saved config.

    Raises:
        ConfigError: the file is not a configuration.
    """
    if not saved.exists():
        return
    try:
        before = dict(leaves(read_plain(saved.read_text("utf-8"))))
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
        raise ConfigError(f"{saved} is not a saved configuration; mend or remove it.") from error
    # through YAML as the other was, so that tuples and lists are the same
    for key, value in leaves(read_plain(cfg.dump())):
        if key in before and before[key] != value:
            yield key, before[key], value


def save_config(cfg: CfgNode) -> Path:
    """Write ``cfg`` to config.yaml of its OUTPUT_DIR, which must be there."""
    path = Path(cfg.OUTPUT_DIR) / "config.yaml"
    replace_text(path, cfg.dump())
    return path


def cut_metrics(folder: str, first_iteration: int) -> None:
    """Drop from metrics.json the iterations that a resumed run computes again.

    A last line that was not written to its end goes, too.
    """
    path = Path(folder) / "metrics.json"
    if not path.exists():
        return
    kept = []
    for line in path.read_text("utf-8").splitlines():
        try:
            iteration = json.loads(line)["iteration"]
        except (ValueError, KeyError, TypeError):
            continue
        if iteration < first_iteration:
            kept.append(line + "\n")
    replace_text(path, "".join(kept))


def describe_run(cfg: CfgNode) -> str:
    """One line on where the results of a run are."""
    where = f"Log, configuration, metrics and results are in {cfg.OUTPUT_DIR}"
    checkpoint = last_checkpoint(cfg.OUTPUT_DIR)
    return f"{where}; the last checkpoint is {checkpoint}" if checkpoint else where
