"""Where the labels and pictures of a data set's parts are, in the folders of usual tools.

Those of Roboflow and Ultralytics (train, valid, test, with images and labels), of Pascal VOC
(Annotations, JPEGImages, ImageSets/Main), of COCO (annotations beside train2017 and val2017), and
one folder of pictures with a file of labels each.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lambda_det.detection.data.labels import COCO, PICTURES, recognise, yolo_content
from lambda_det.errors import DataError, listed

__all__ = ["Layout", "Part", "find_images", "find_layout"]

# What parts are called, those that are evaluated on in the order in which they are preferred
_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}


class Part(NamedTuple):
    """Labels, see :func:`lambda_det.detection.data.labels.read_labels`, and folder of pictures."""

    labels: Path
    images: Path


class Layout(NamedTuple):
    """A data set.

    Attributes:
        kind: the format of its labels.
        train: what to train on.
        test: what to evaluate on; None where the data set has no parts.
    """

    kind: str
    train: Part
    test: Part | None


def find_layout(place: str | Path) -> Layout:
    """The parts of a data set in a folder, or in the folder of YOLO's data.yaml.

    Raises:
        DataError: nothing there is of a known format, or it is not clear what belongs together.
    """
    place = Path(place)
    kind, files = recognise(place)
    root = place if place.is_dir() else place.parent
    if kind == COCO:
        parts = _coco_parts(root, files)
    elif kind.startswith("YOLO"):
        parts = _yolo_parts(root, files)
    else:
        parts = _listed_parts(root) or _folder_parts(root, files)
    train = parts.get("train")
    if train is None:
        if kind == COCO or kind.startswith("YOLO"):
            place = _only(place, files)
        train, parts = Part(place, find_images(place)), {}
    others = [parts[name] for name in _NAMES if name in parts and parts[name] != train]
    return Layout(kind, train, others[0] if others else None)


def find_images(labels: str | Path) -> Path:
    """The folder of the pictures of labels, where none is named: in or beside them.

    Raises:
        DataError: no folder there holds the first picture of a file in COCO's format.
    """
    labels = Path(labels)
    kind, files = recognise(labels)
    if kind == COCO:
        return _images_of(_only(labels, files), labels if labels.is_dir() else labels.parent)
    return labels if labels.is_dir() else labels.parent


def _only(place: Path, files: list[Path]) -> Path:
    if len(files) > 1:
        raise DataError(f"{place} holds {listed(map(str, files))}; name one of them.")
    return files[0]


def _part_of(path: Path, root: Path) -> str:
    """The part that a path below a folder is of, by the last of its words that names one; or ""."""
    words = re.findall("[a-z]+", path.relative_to(root).as_posix().lower())
    names = {word: name for name, known in _NAMES.items() for word in known}
    return next((names[word] for word in reversed(words) if word in names), "")


def _grouped(paths: Iterable[Path], root: Path) -> dict[str, list[Path]]:
    """Paths by the part that their folder is of."""
    groups: dict[str, list[Path]] = {}
    for path in paths:
        groups.setdefault(_part_of(path.parent, root), []).append(path)
    return groups


def _pictures(root: Path) -> dict[str, Path]:
    """The folder of the pictures of each part that has a folder of its own."""
    found = (path for path in sorted(root.rglob("*")) if path.suffix.lower() in PICTURES)
    groups = _grouped(found, root)
    return {name: _common(paths) for name, paths in groups.items() if name}


def _common(paths: list[Path]) -> Path:
    return Path(os.path.commonpath([path.parent for path in paths]))


# -------------------------------------------------------------------------------- by kind of labels
def _coco_parts(root: Path, files: list[Path]) -> dict[str, Part]:
    groups: dict[str, list[Path]] = {}
    for file in files:
        groups.setdefault(_part_of(file.with_suffix(""), root), []).append(file)
    parts = {}
    for name in filter(None, groups if "train" in groups else ()):
        # Of COCO's own files, not those of keypoints, captions, stuff and segments
        instances = [file for file in groups[name] if file.name.startswith("instances")]
        file = _only(root, instances or groups[name])
        parts[name] = Part(file, _images_of(file, root))
    return parts


def _images_of(file: Path, root: Path) -> Path:
    """The folder in or beside ``root`` with the first picture of a file in COCO's format."""
    first = re.search(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")', file.read_bytes())
    name = json.loads(first[1]) if first else ""
    above = root.parent if root.name == "annotations" else root
    folders = [Path(folder) for folder, _, _ in os.walk(above) if Path(folder, name).is_file()]
    if not name or not folders:
        raise DataError(
            f"{file}: its picture {name!r} is in no folder of {above}; name the folder of the "
            "pictures with --images."
        )
    wanted = _part_of(file.with_suffix(""), above)
    return min(folders, key=lambda path: (_part_of(path, above) != wanted, path != file.parent))


def _yolo_parts(root: Path, files: list[Path]) -> dict[str, Part]:
    file = _only(root, files)
    content = yolo_content(file)
    named = {name: _yolo_path(file, content, content.get(name)) for name in _NAMES}
    parts = {
        name: Part(path, file.parent) if path.suffix == ".txt" else Part(file, path)
        for name, path in named.items()
        if path
    }
    return parts or {name: Part(file, folder) for name, folder in _pictures(file.parent).items()}


def _yolo_path(file: Path, content: dict[str, Any], value: Any) -> Path | None:
    """A folder or list of data.yaml, which Roboflow's has one level too high; None if not there."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if value and not isinstance(value, str):
        raise DataError(f"{file} names several folders, {value}; name one with --images.")
    for home in (file.parent / str(content.get("path") or ""), file.parent):
        for name in (value, value.replace("../", "")) if value else ():
            if (path := home / name).is_dir() or (path.is_file() and path.suffix == ".txt"):
                return Path(os.path.normpath(path))
    return None


def _listed_parts(root: Path) -> dict[str, Part]:
    """The lists of Pascal VOC."""
    lists = {path.stem: path for path in sorted(root.rglob("ImageSets/Main/*.txt"))}
    lists.setdefault("train", lists.get("trainval"))
    parts = {}
    for name in _NAMES:
        if file := lists.get(name):
            home = file.parents[2]
            images = home / "JPEGImages"
            parts[name] = Part(file, images if images.is_dir() else home)
    return parts


def _folder_parts(root: Path, files: list[Path]) -> dict[str, Part]:
    """Folders of labels, each with pictures in it or in a folder of the same part."""
    groups, pictures = _grouped(files, root), _pictures(root)
    labels = {name: _common(paths) for name, paths in groups.items() if name}
    return {name: Part(path, pictures.get(name, root)) for name, path in labels.items()}
