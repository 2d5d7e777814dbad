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
from lambda_det.errors import ConfigError, DataError


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
        cfg: a configuration of :func:`get_classification_config`.

    Raises:
        ConfigError: there is nothing to evaluate on.
        DataError: the data are missing or damaged, or their classes differ.
    """
    data = cfg.DATA
    if data.FORMAT == "folder" and not (data.VAL or data.HELD_OUT):
        raise ConfigError(
            "DATA.VAL is empty and DATA.HELD_OUT is 0, so there is nothing to evaluate on; give "
            "one of them."
        )
    train, val = _FORMATS[data.FORMAT](data)
    if val is not None:
        check_same_classes(
            train.classes, val.classes, f"DATA.TRAIN {data.TRAIN}", f"DATA.VAL {data.VAL}"
        )
    if data.FRACTION < 1:
        train = Subset(train, take_fraction(train, data.FRACTION, cfg.SEED))
    held_out = None
    if data.HELD_OUT:
        kept, held = split_held_out(train, data.HELD_OUT, cfg.SEED)
        if not len(held):
            raise DataError(
                f"No class of DATA.TRAIN {data.TRAIN} has two images, so none can be held out: "
                "set DATA.HELD_OUT 0, or a larger DATA.FRACTION."
            )
        train, held_out = Subset(train, kept), Subset(train, held)
    return Sources(train, held_out, val)


# By DATA.FORMAT the images to train and to validate on, of the section DATA
_FORMATS: dict[str, Callable[[CfgNode], tuple[Source, Source | None]]] = {
    "folder": lambda data: (
        FolderSource(data.TRAIN),
        FolderSource(data.VAL) if data.VAL else None,
    ),
    "cifar10": lambda data: (Cifar10Source(data.TRAIN, True), Cifar10Source(data.TRAIN)),
}
