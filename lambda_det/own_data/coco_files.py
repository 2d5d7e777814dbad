"""Files in COCO's format on the way from labels to a training."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from lambda_det.errors import DataError, refused

# Names of files that lie in the folders of several parts; the first is Roboflow's
_OF_ALL_PARTS = ("_annotations.coco", "annotations", "labels", "result")


def stem_with_part(file: str) -> str:
    """The name of a file without its ending, which tells its part in the log and on the page.

    Tools give the files of all parts one name, so that begins with the name of their folder.
    """
    path = Path(os.path.abspath(file))  # without "." and "..", which name no folder
    if path.stem in _OF_ALL_PARTS:
        return f"{path.parent.name}_{path.stem.lstrip('_')}"
    return path.stem


def identifying_stem(file: str) -> str:
    """The name of a file without its ending, and once a digest of the content."""
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:8]
    return f"{stem_with_part(file).removesuffix(f'_{digest}')}_{digest}"


def write_coco(content: Any, folder: Path, stem: str) -> str:
    """Write a file in COCO's format into a folder, under a new name.

    Raises:
        DataError: it cannot be written.
    """
    path, number = folder / f"{stem}.json", 1
    while path.exists():
        path, number = folder / f"{stem}_{number}.json", number + 1
    with refused(DataError, f"{path} cannot be written", "", OSError):
        path.write_text(json.dumps(content), "utf-8")
    return str(path)
