"""The sources that the DATA section of a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from detectron2.config import CfgNode

from lambda_det.classification.data.sources import (
    Cifar10Source,
    FolderSource,
    Source,
    check_same_classes,
)
from lambda_det.classification.data.subset import Subset, split_held_out, take_fraction
from lambda_det.errors import ConfigError, DataError, suggest


@dataclass
class Sources:
    """The images of a run.

    Attributes:
        train: to train on.
        held_out: labelled training images that choose the best checkpoint, or None.
        val: to validate on, or None if DATA.VAL is empty.
    """

    train: Source
    held_out: Source | None
    val: Source | None


def build_sources(cfg: CfgNode) -> Sources:
    """Open the images that a configuration names.

    DATA.FRACTION applies to the training images, and DATA.HELD_OUT to what it leaves.

    Args:
        cfg: a configuration of :func:`get_classification_config`. A SEED of -1 splits as 0 does,
            because all processes and a resumed run must split alike.

    Raises:
        ConfigError: a key of DATA has an invalid value.
        DataError: the data are missing or damaged, or their classes differ.
    """
    _check(cfg)
    train, val = _FORMATS[cfg.DATA.FORMAT](cfg)
    if val is not None:
        check_same_classes(
            train.classes, val.classes, f"DATA.TRAIN {cfg.DATA.TRAIN}", f"DATA.VAL {cfg.DATA.VAL}"
        )
    seed = max(cfg.SEED, 0)
    if cfg.DATA.FRACTION < 1:
        train = Subset(train, take_fraction(train, cfg.DATA.FRACTION, seed))
    held_out = None
    if cfg.DATA.HELD_OUT:
        kept, held = split_held_out(train, cfg.DATA.HELD_OUT, seed)
        if not len(held):
            raise DataError(
                f"No class of DATA.TRAIN {cfg.DATA.TRAIN} has two images, so none can be held out: "
                "set DATA.HELD_OUT 0, or a larger DATA.FRACTION."
            )
        train, held_out = Subset(train, kept), Subset(train, held)
    return Sources(train, held_out, val)


def _folders(cfg: CfgNode) -> tuple[Source, Source | None]:
    return FolderSource(cfg.DATA.TRAIN), FolderSource(cfg.DATA.VAL) if cfg.DATA.VAL else None


# By DATA.FORMAT the images to train and to validate on
_FORMATS: dict[str, Callable[[CfgNode], tuple[Source, Source | None]]] = {
    "folder": _folders,
    "cifar10": lambda cfg: (Cifar10Source(cfg.DATA.TRAIN, True), Cifar10Source(cfg.DATA.TRAIN)),
}


def _check(cfg: CfgNode) -> None:
    data = cfg.DATA
    if data.FORMAT not in _FORMATS:
        hint = suggest(data.FORMAT, _FORMATS)
        raise ConfigError(f"DATA.FORMAT {data.FORMAT!r} is not known{hint}")
    if not (data.VAL or data.HELD_OUT) and data.FORMAT == "folder":
        raise ConfigError(
            "DATA.VAL is empty and DATA.HELD_OUT is 0, so there is nothing to evaluate on; give "
            "one of them."
        )
