"""A share of a training file's images held out to evaluate on, chosen by their names."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lambda_det.detection.data.annotations import check_coco
from lambda_det.detection.data.coco_format import keep_json, read_json
from lambda_det.errors import ConfigError, DataError, listed, printable

__all__ = ["hold_out", "is_held_out"]

logger = logging.getLogger(__name__)


def is_held_out(file_name: str, share: float) -> bool:
    """Whether the image is one of the ``share`` that is held out.

    Only the name decides, so images that are added later do not move others.
    """
    digest = hashlib.sha256(file_name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def hold_out(json_file: str, image_folder: str, share: float) -> tuple[str, str]:
    """Split an annotation file in two, which are kept in the cache of Detectron2's files.

    Args:
        json_file: annotations in COCO's format.
        image_folder: of its images.
        share: of the images that are held out, above 0 and below 1.

    Returns:
        The files to train on and to evaluate on. The same content and share give the same files.

    Raises:
        ConfigError: the share is not between 0 and 1.
        DataError: the file is not in COCO's format; or no image would be held out, none would
            remain, or none of a class would remain.
    """
    if not 0 < share < 1:
        raise ConfigError(
            f"--val-share (DATASETS.VAL_SHARE) is {share:g}; give a share between 0 and 1, such as "
            "0.1."
        )
    report = check_coco(json_file, image_folder, files="none")
    names, labels, content = report.categories, report.json_file, read_json(json_file)
    images = content["images"]
    held_out = {i["id"] for i in images if is_held_out(str(i["file_name"]), share)}
    option = f"--val-share {share:g} (DATASETS.VAL_SHARE) of {labels}"
    if len(held_out) in (0, len(images)):
        raise DataError(
            f"{option} would hold out {len(held_out)} of {len(images)} images; give another share, "
            "or a file with --test-json."
        )
    train, val = (_part(content, held_out, keep) for keep in (False, True))
    if gone := _classes(content) - _classes(train):
        raise DataError(
            f"{option} would leave no image of {_named(gone, names)} to train on; give a smaller "
            "share, or a file with --test-json."
        )
    logger.info(
        f"Held out to evaluate on: {len(held_out)} of {len(images)} images of {labels}, by the "
        "hash of their names"
    )
    if unseen := _classes(content) - _classes(val):
        logger.warning(
            f"{option} holds out no image of {_named(unseen, names)}, whose AP remains unknown; "
            "give a larger share, or a file with --test-json"
        )
    stem = f"{Path(json_file).stem}_{share!r}"
    return (
        keep_json(train, "held_out", f"{stem}_train.json", whole=content),
        keep_json(val, "held_out", f"{stem}_val.json", whole=content),
    )


def _part(content: Mapping[str, Any], held_out: set[Any], keep: bool) -> dict[str, Any]:
    """The file with only the images that are held out, or without them."""
    return {
        **content,
        "images": [i for i in content["images"] if (i["id"] in held_out) is keep],
        "annotations": [a for a in content["annotations"] if (a["image_id"] in held_out) is keep],
    }


def _classes(content: Mapping[str, Any]) -> set[Any]:
    """The categories that occur."""
    return {annotation["category_id"] for annotation in content["annotations"]}


def _named(categories: set[Any], names: Mapping[Any, str]) -> str:
    return listed(printable(str(names.get(c, c))) for c in sorted(categories))
