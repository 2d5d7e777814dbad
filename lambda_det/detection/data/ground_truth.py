"""The ground truth of annotation files, which is read once and then kept in memory.

Each evaluation needs the ground truth of its test set up to three times: for the images, for their
losses, and to measure by. A training needs it for the recipe and then for the loader.

What is kept is pickled, in memory only. It then takes a fraction of the memory of the records,
forked loader processes share it, and whoever asks gets records of its own, which it may change.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from typing import NamedTuple

from detectron2.utils.file_io import PathManager

from lambda_det.detection.data.coco import GroundTruth, read_coco
from lambda_det.detection.data.report import Report
from lambda_det.errors import DataError

_MOST = 8  # ground truths, for programs that go on to other data


class _Kept(NamedTuple):
    """A ground truth that was read."""

    version: tuple[int, ...]  # of the file and its folder
    folders: dict[str, int]  # of the images, with the times of their last changes
    report: bytes  # pickled
    records: bytes | None  # pickled; None once they are forgotten


# By file, folder, and a number of keypoints that the file does not name. That asked for last is at
# the end.
_kept: dict[tuple[str, str, int | None], _Kept] = {}


def ground_truth(
    json_file: str | os.PathLike,
    image_root: str | os.PathLike = "",
    keypoints: int | None = None,
) -> GroundTruth:
    """:func:`read_coco`, which reads again only if file or folder have changed.

    Args:
        json_file, image_root, keypoints: as for that.

    Returns:
        A copy, which may be changed.

    Raises:
        DataError: as that.
    """
    if keypoints and keypoints == len(file_report(json_file, image_root).keypoints):
        keypoints = None  # what is kept for the report is the same
    place = os.fspath(json_file), os.fspath(image_root), keypoints
    kept = _find(place)
    if kept is not None and kept.records is not None:
        return GroundTruth(pickle.loads(kept.records), pickle.loads(kept.report))
    version = _version_of(*place[:2])  # before it is read, during which it may change
    truth = read_coco(*place)
    folders = _times({os.path.dirname(record["file_name"]) for record in truth.records})
    _kept.pop(place, None)
    _kept[place] = _Kept(version, folders, *(pickle.dumps(one, -1) for one in truth[::-1]))
    for oldest in list(_kept)[:-_MOST]:
        del _kept[oldest]
    return truth


def file_report(json_file: str | os.PathLike, image_root: str | os.PathLike = "") -> Report:
    """The report of :func:`ground_truth`, of which only that is copied.

    Raises:
        DataError: as that.
    """
    kept = _find((os.fspath(json_file), os.fspath(image_root), None))
    return pickle.loads(kept.report) if kept else ground_truth(json_file, image_root).report


def forget_records(*, but: Iterable[tuple[str, str]]) -> None:
    """Forget all records that are kept, but not the reports.

    Args:
        but: annotation files with their folders, whose records will be asked for again.
    """
    needed = set(but)
    for place, kept in _kept.items():
        if place[:2] not in needed:
            _kept[place] = kept._replace(records=None)


def _find(place: tuple[str, str, int | None]) -> _Kept | None:
    """What is kept of a file and its folder as they are; it is then the last to be forgotten."""
    kept = _kept.get(place)
    if (
        kept is None
        or kept.version != _version_of(*place[:2])
        or kept.folders != _times(kept.folders)
    ):
        return None
    _kept[place] = _kept.pop(place)
    return kept


def _version_of(json_file: str, image_root: str) -> tuple[int, ...]:
    """What changes if the file is written, or images come into the folder or leave it."""
    if not PathManager.isfile(json_file):
        raise DataError(f"The annotation file {json_file} does not exist; correct the path.")
    file = os.stat(PathManager.get_local_path(json_file))
    return file.st_mtime_ns, file.st_size, file.st_ino, *_times([image_root]).values()


def _times(folders: Iterable[str]) -> dict[str, int]:
    """When files were last added to folders or removed; 0 for a folder that does not exist."""
    return {path: os.stat(path).st_mtime_ns if os.path.isdir(path) else 0 for path in folders}
