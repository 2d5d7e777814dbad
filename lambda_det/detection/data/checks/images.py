"""Whether the image files of a data set are there, can be read and have the size that is said."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from detectron2.utils.file_io import PathManager

from lambda_det.detection.data.checks.report import Report
from lambda_det.detection.data.image_files import image_fault

_SAMPLED_FILES = 32


def check_existence(report: Report) -> None:
    places = np.linspace(0, report.images - 1, _SAMPLED_FILES).round().astype(int)
    for index in np.unique(places):
        path = os.path.join(report.image_root, report.files[index]["file_name"])
        if not PathManager.isfile(path):
            report.add("image file missing", [path], 1)


def check_images(report: Report, progress: Callable[[int, int], None] | None) -> None:
    def fault(file: dict[str, Any]) -> tuple[str, str] | None:
        path = os.path.join(report.image_root, file["file_name"])
        if not PathManager.isfile(path):
            return "image file missing", path
        sentence = image_fault({**file, "file_name": path})
        return sentence and ("image file unreadable or of another size", sentence)

    # Pillow decodes outside Python's lock, so threads are enough.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, found in enumerate(pool.map(fault, report.files), start=1):
            if found:
                report.add(found[0], [found[1]], 1)
            if progress:
                progress(done, report.images)
