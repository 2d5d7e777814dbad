"""What is wrong with the file of an image or a semantic mask, in one sentence that names it."""

from __future__ import annotations

import os
import stat
from typing import Any

import numpy as np
from detectron2.data import detection_utils

from lambda_det.errors import printable, reason

__all__ = ["image_fault", "label_fault", "mask_fault", "no_file"]


def image_fault(record: dict[str, Any], image_format: str = "BGR") -> str | None:
    """Read the image of a dataset dict and say in one sentence what is wrong with it.

    Args:
        record: with "file_name" and, where the size is to be checked, "width" and "height".
        image_format: as in ``INPUT.FORMAT``.
    """
    path = record["file_name"]
    if fault := no_file(path):
        return fault
    try:
        image = detection_utils.read_image(path, format=image_format)
    except FileNotFoundError:
        return (
            f"The image {printable(path)} does not exist; put it there or take it out of the "
            "annotations."
        )
    except Exception as error:
        return (
            f"The image {printable(path)} cannot be read ({reason(error)}); fetch it again or take "
            "it out of the annotations."
        )
    height, width = image.shape[:2]
    said = (record.get("width", width), record.get("height", height))
    if said != (width, height):
        return (
            f"The image {printable(path)} is {width}x{height} (width x height, turned as its EXIF "
            f"data say), but the annotations say {said[0]}x{said[1]}; correct one of them."
        )
    return None


def no_file(path: str | None) -> str | None:
    """What is wrong with a path where something lies that is no file; None where nothing lies."""
    try:
        if path is None or stat.S_ISREG(os.stat(path).st_mode):
            return None
    except (OSError, ValueError):  # absent, on another machine, or no path: for the reader to say
        return None
    return (
        f"The image {printable(path)} is not a file but a folder, pipe or device; put the image "
        "there or take it out of the annotations."
    )


def mask_fault(record: dict[str, Any]) -> str | None:
    """What is wrong with the semantic mask of a dataset dict whose image is sound."""
    path = record.get("sem_seg_file_name")
    if path is None:
        return None
    mask_record = {"file_name": path}
    if "width" in record:
        mask_record |= {"width": record["width"], "height": record["height"]}
    fault = image_fault(mask_record, "L")
    return fault and fault.replace("The image", "The semantic mask", 1)


def label_fault(path: str, labels: np.ndarray, classes: int, ignored: int) -> str | None:
    """What is wrong with the labels of a semantic mask: the loss and the mean IoU would fail.

    Args:
        path: the file of the mask.
        labels: whole numbers of any shape.
        classes: of the model; their labels start at 0.
        ignored: the label of pixels that do not count.
    """
    foreign = labels[(labels >= classes) & (labels != ignored)]
    if not foreign.size:
        return None
    return (
        f"The semantic mask {printable(path)} holds the label {foreign[0]}, but there are "
        f"{classes} classes, from 0, and {ignored} for what does not count; correct the mask or "
        "MODEL.SEM_SEG_HEAD.NUM_CLASSES."
    )
