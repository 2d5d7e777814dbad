"""Folders that this package wrote, whose images and labels are not data where they lie among
those of a user.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection
from pathlib import Path

from lambda_det.files import relative_path, writing_to

MARK = ".lambda_det.json"  # a file in such a folder
_LOGS = ("log.txt", "metrics.json")  # a run has its config.yaml beside one of them
_CONFIGURATION = re.compile(r"^\s*(OUTPUT_DIR|output_dir):", re.MULTILINE)


def mark_output(folder: str | os.PathLike, source: str | os.PathLike | None = None) -> None:
    """Mark a folder as written by this package, unless it holds files of somebody else.

    Args:
        folder: it is made where it is missing.
        source: the labels that were written in another format to it. Such a folder is data where
            those labels are not.

    Raises:
        ConfigError: it cannot be written to.
    """
    folder = Path(folder)
    mark = folder / MARK
    with writing_to(mark):
        if mark.is_file() or not any(folder.iterdir()):
            place = None if source is None else relative_path(source, folder)
            text = json.dumps({"written by": "lambda-det, and not read as data", "labels": place})
            mark.write_text(text, "utf-8")


def is_output(folder: Path, names: Collection[str], root: Path) -> bool:
    """Whether a folder has the mark, or is a run's, also of another trainer of Detectron2.

    Args:
        folder: below the root.
        names: of all its entries.
        root: the folder of the data.
    """
    if MARK in names:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if source := json.loads((folder / MARK).read_text("utf-8"))["labels"]:
                labels = Path(os.path.abspath(folder / source))
                return labels.exists() and labels.is_relative_to(os.path.abspath(root))
        return True
    if "config.yaml" in names and any(name in names for name in _LOGS):
        with contextlib.suppress(OSError):
            text = (folder / "config.yaml").read_text("utf-8", "replace")
            return _CONFIGURATION.search(text) is not None
    return False
