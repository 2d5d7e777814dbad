"""Checks of an annotation file in COCO's format and of its images."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from detectron2.utils.file_io import PathManager
from PIL import Image
from tqdm import tqdm

from lambda_det.detection.data.ground_truth import file_report
from lambda_det.detection.data.records import (
    decoding_fault,
    orientation,
    size_fault,
    upright_size,
)
from lambda_det.detection.data.report import BROKEN, IMAGE, TURNED, Kind, Report
from lambda_det.errors import printable

_FEW_FILES = 1000  # images that are opened within some seconds


def check_coco(
    json_file: str | os.PathLike,
    image_root: str | os.PathLike,
    *,
    files: Literal["all", "few", "sample", "none"] = "all",
    progress: bool = False,
) -> Report:
    """Check an annotation file in COCO's format and its images.

    Args:
        json_file: the annotations.
        image_root: the folder of the images.
        files: "all" opens every image and compares its size; "sample" looks at the heads of the
            last image and of up to 1,000 before it; "few" is "all" for up to 1,000 images and
            "sample" for more; "none" looks at no image.
        progress: show on a terminal how many images have been opened.

    Returns:
        The report of :func:`lambda_det.detection.data.read_coco`, with what the images show.

    Raises:
        DataError: the file is missing, is not JSON or not in COCO format.
    """
    report = file_report(json_file, image_root)
    if files == "none":
        return report
    look, chosen = _whole_fault, report.files
    if files == "sample" or (files == "few" and report.images > _FEW_FILES):
        # from the last one on, which a copy that was not finished lacks
        look, chosen = _head_fault, chosen[:: -((report.images - 1) // _FEW_FILES + 1)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes without Python's lock
        faults = pool.map(look, chosen)
        disable = None if progress else True  # None: unless it is a terminal
        faults = tqdm(faults, "images opened", len(chosen), leave=False, disable=disable)
        for fault in filter(None, faults):
            report.add(*fault)
    return report


def _whole_fault(file: dict[str, Any]) -> tuple[Kind, str] | None:
    """The fault of an image, which is read as a whole, or its turn."""
    if fault := _head_fault(file):
        return fault
    if fault := decoding_fault(file):
        return BROKEN, fault
    path = file["file_name"]
    with PathManager.open(path, "rb") as opened, Image.open(opened) as image:
        # a size in the labels shows a turn by 90 degrees, unless the image is a square
        is_turned = orientation(image) != 1 and (
            file["own_size"] or image.size[0] == image.size[1] or upright_size(image) == image.size
        )
    return (TURNED, file["name"]) if is_turned else None


def _head_fault(file: dict[str, Any]) -> tuple[Kind, str] | None:
    """The fault that the head of an image's file shows."""
    path = file["file_name"]
    if not PathManager.isfile(path):
        return IMAGE, f"{printable(path)} does not exist"
    fault = size_fault(file)
    return fault and (IMAGE, fault)
