"""The check of one annotation file in COCO's format and its images."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from copy import deepcopy
from typing import Literal

from detectron2.utils.file_io import PathManager

from lambda_det.detection.data.checks.annotations import inspect_annotations
from lambda_det.detection.data.checks.images import check_existence, check_images
from lambda_det.detection.data.checks.report import Report
from lambda_det.errors import DataError


def check_coco(
    json_file: str | os.PathLike,
    image_root: str | os.PathLike,
    *,
    files: Literal["all", "sample", "none"] = "all",
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Look over an annotation file in COCO's format and its images.

    Args:
        json_file: the annotations.
        image_root: the folder of the images.
        files: "all" opens every image and compares its size; "sample" only sees whether the
            first, the last and some others between exist; "none" looks at no image.
        progress: called with (images done, images) while they are opened.

    Returns:
        Counts and findings. The annotations are read again only after the file has changed.

    Raises:
        DataError: the file or folder is missing, not JSON, or not COCO's format at all.
    """
    json_file, image_root = os.fspath(json_file), os.fspath(image_root)
    if not PathManager.isfile(json_file):
        raise DataError(f"The annotation file {json_file} does not exist; correct the path.")
    if files != "none" and not PathManager.isdir(image_root):
        raise DataError(f"The image folder {image_root} does not exist; correct the path.")
    status = os.stat(PathManager.get_local_path(json_file))
    report = deepcopy(_kept_report(json_file, status.st_mtime_ns, status.st_size))
    report.image_root = image_root
    if files == "sample":
        check_existence(report)
    elif files == "all":
        check_images(report, progress)
    return report


@functools.lru_cache(maxsize=4)
def _kept_report(json_file: str, mtime_ns: int, size: int) -> Report:
    """The report on the annotations alone; the file's time and size only tell versions apart."""
    return inspect_annotations(json_file)
