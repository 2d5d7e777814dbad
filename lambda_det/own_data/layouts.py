"""Where the labels and pictures of a data set's parts are, in the folders of usual tools.

Those of Roboflow and Ultralytics (train, valid, test, with images and labels), of Pascal VOC
(Annotations, JPEGImages, ImageSets/Main), of COCO (annotations beside train2017 and val2017), and
one folder of pictures with a file of labels each.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lambda_det.detection.data.coco_format import keep_json
from lambda_det.detection.data.picture_folder import PICTURES, walk
from lambda_det.errors import DataError
from lambda_det.own_data.held_out import part_of
from lambda_det.own_data.labels import COCO, only, read_labels, recognise
from lambda_det.own_data.labels.yolo import has_labels, yolo_content

__all__ = ["Part", "find_images", "find_parts"]

# Words for the parts, those that are evaluated on in the order in which they are preferred
_WORDS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}


class Part(NamedTuple):
    """Labels, see :func:`lambda_det.own_data.labels.read_labels`, and folder of pictures."""

    labels: Path
    images: Path


def find_parts(place: str | Path, images: str | Path | None = None) -> tuple[str, list[Part]]:
    """The format of a data set, what to train on, and what to evaluate on if that is apart.

    Args:
        place: its folder, or YOLO's data.yaml in it.
        images: the folder of the pictures, by parts or not; None if they are in ``place``.

    Raises:
        DataError: nothing there is of a known format, or it is not clear what belongs together.
    """
    place = Path(place)
    kind, files = recognise(place)
    root = place if place.is_dir() else place.parent
    home = Path(images) if images else root
    parts = _BY_KIND.get(kind, _in_folders)(root, files, home)
    if images and kind not in (COCO, "CVAT"):
        found = _folders(_pictures(home), home)
        parts = {name: Part(part.labels, found.get(name, home)) for name, part in parts.items()}
    train = parts.get("train")
    if train is None:
        return kind, [Part(place, _images_of(files[0], root, home) if kind == COCO else home)]
    others = [parts[name] for name in _WORDS if parts.get(name, train) != train]
    return kind, [train, *others[:1]]


def find_images(labels: str | Path) -> Path:
    """The folder of the pictures of labels, where none is named: in or beside them.

    Raises:
        DataError: no folder there holds the first picture of a file in COCO's format.
    """
    labels = Path(labels)
    kind, files = recognise(labels)
    root = labels if labels.is_dir() else labels.parent
    return _images_of(files[0], root, root) if kind == COCO else root


def _part_of(path: Path, root: Path) -> str:
    """The part that a path below a folder is of, by the last of its words that names one; or ""."""
    words = re.findall("[a-z]+", path.relative_to(root).as_posix().lower())
    names = {word: name for name, known in _WORDS.items() for word in known}
    return next((names[word] for word in reversed(words) if word in names), "")


def _folders(paths: Iterable[Path], root: Path) -> dict[str, Path]:
    """By part, the folder of those paths that have one of its own."""
    groups: dict[str, list[Path]] = {}
    for path in paths:
        groups.setdefault(_part_of(path.parent, root), []).append(path.parent)
    return {name: Path(os.path.commonpath(found)) for name, found in groups.items() if name}


def _refuse_strays(root: Path, files: list[Path]) -> None:
    """A folder of a class may be called train, and is not all of the data then."""
    if strays := [file for file in files if not _part_of(file.parent, root)]:
        raise DataError(
            f"{root}: {len(strays)} of {len(files)} files that are labels or have them are in no "
            f"folder called {', '.join(_WORDS)}, such as {strays[0]}; to use all, give --train "
            f"{root} --images {root}."
        )


def _pictures(root: Path) -> Iterator[Path]:
    return (path for path in walk(root) if path.suffix.lower() in PICTURES)


def _images_of(file: Path, root: Path, home: Path) -> Path:
    """The folder in or beside ``home`` with the first picture of a file in COCO's format."""
    first = re.search(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")', file.read_bytes())
    name = ""
    with contextlib.suppress(ValueError):
        name = json.loads(first[1]) if first else ""
    above = home.parent if home.name == "annotations" else home
    folders = [Path(folder) for folder, _, _ in os.walk(above) if Path(folder, name).is_file()]
    if not name or not folders:
        raise DataError(
            f"{file}: its picture {name!r} is in no folder of {above}; name the folder with "
            f"--train {file} --images DIR."
        )
    wanted = _part_of(file.with_suffix(""), root)
    return min(folders, key=lambda path: (_part_of(path, above) != wanted, path != file.parent))


# ------------------------------------------------------------------------ parts by format of labels
def _of_coco(root: Path, files: list[Path], home: Path) -> dict[str, Part]:
    # COCO's own files of keypoints, captions, stuff and segments stand beside those of instances
    instances = [file for file in files if file.name.startswith("instances")]
    groups: dict[str, list[Path]] = {}
    for file in instances or files:
        groups.setdefault(_part_of(file.with_suffix(""), root), []).append(file)
    named = {name: Path(only(root, found)) for name, found in groups.items() if name}
    return {name: Part(file, _images_of(file, root, home)) for name, file in named.items()}


def _of_yolo(root: Path, files: list[Path], home: Path) -> dict[str, Part]:
    file, parts = Path(only(root, files)), {}
    content = yolo_content(file)
    homes = (file.parent / str(content.get("path") or ""), file.parent)
    for name in _WORDS:
        values = content.get(name) or []
        values = list(map(str, values if isinstance(values, list) else [values]))
        places = [place for value in values if (place := _place(value, homes))]
        if places and len(places) < len(values):
            raise DataError(f"{file}: of {name}, {values}, some are not there; correct the paths.")
        if len(places) == 1 and places[0].is_dir():
            parts[name] = Part(file, places[0])
        elif len(places) == 1 and _is_beside(places[0], file):
            parts[name] = Part(places[0], file.parent)
        elif places:
            parts[name] = _gathered(file, name, places, homes)
    if parts:
        return parts
    found = _folders(_pictures(home), home)
    if "train" in found:
        _refuse_strays(home, [path for path in _pictures(home) if has_labels(path)])
    return {name: Part(file, folder) for name, folder in found.items()}


def _place(value: str, homes: Iterable[Path]) -> Path | None:
    """The folder or list of pictures that data.yaml names; Roboflow's are one level too high."""
    for home, text in itertools.product(homes, (value, value.replace("../", ""))):
        path = Path(os.path.abspath(home / text))
        if path.is_dir() or (path.suffix == ".txt" and path.is_file()):
            return path
    return None


def _is_beside(list_file: Path, file: Path) -> bool:
    """Whether a list is where data.yaml is, and names nothing that is there but outside of it."""
    home = Path(os.path.abspath(file.parent))
    lines = list_file.read_text("utf-8-sig", "replace").splitlines()
    named = (Path(os.path.abspath(home / line.strip())) for line in lines)
    return list_file.parent == home and all(
        path.is_relative_to(home) or not path.is_file() for path in named
    )


def _gathered(file: Path, name: str, places: list[Path], homes: Iterable[Path]) -> Part:
    """A part of several folders, or of lists that are elsewhere, as a file in COCO's format.

    Raises:
        DataError: a picture of a list is not there, or there is none.
    """
    paths: set[Path] = set()
    for place in places:
        if place.is_dir():
            paths.update(_pictures(place))
            continue
        for number, line in enumerate(place.read_text("utf-8-sig", "replace").splitlines(), 1):
            if not (text := line.strip()) or text.startswith("#"):
                continue
            tried = (Path(os.path.abspath(home / text)) for home in (place.parent, *homes))
            path = next(filter(Path.is_file, tried), None)
            if path is None:
                raise DataError(f"{place}, line {number}: there is no picture {text}; correct it.")
            paths.add(path)
    if not paths:
        raise DataError(f"{file}: {name} names no picture.")
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    content = read_labels(file, folder, paths=paths)
    return Part(Path(keep_json(content, "labels", f"{file.stem}_{name}.json")), folder)


def _in_folders(root: Path, files: list[Path], home: Path) -> dict[str, Part]:
    """By the lists of Pascal VOC, or else folders of labels with pictures in them or apart."""
    lists = {path.stem: path for path in sorted(root.rglob("ImageSets/Main/*.txt"))}
    if train := lists.get("train", lists.get("trainval")):
        images = train.parents[2] / "JPEGImages"
        images = images if images.is_dir() else train.parents[2]
        found = {name: lists[name] for name in _WORDS if name in lists}
        return {name: Part(path, images) for name, path in ({"train": train} | found).items()}
    pictures = _folders(_pictures(home), home)
    labels = _folders(files, root)
    if "train" in labels:
        _refuse_strays(root, files)
    return {name: Part(path, pictures.get(name, home)) for name, path in labels.items()}


def _of_cvat(root: Path, files: list[Path], home: Path) -> dict[str, Part]:
    """Folders, or the subsets that a project's file has."""
    parts = _in_folders(root, files, home)
    if parts or not any(b' subset="' in file.read_bytes() for file in files):
        return parts
    content = read_labels(root if len(files) > 1 else files[0], home)
    places = {
        image["id"]: home / Path(image.get("subset", "")).name / Path(image["file_name"]).name
        for image in content["images"]
    }
    named = {id: _part_of(place.parent, home) for id, place in places.items()}
    if "train" in named.values():
        _refuse_strays(home, list(places.values()))
        for name in set(named.values()):
            ids = {id for id, part in named.items() if part == name}
            file = keep_json(part_of(content, ids), "labels", f"{files[0].stem}_{name}.json")
            parts[name] = Part(Path(file), home)
    return parts


_BY_KIND = {COCO: _of_coco, "YOLO": _of_yolo, "CVAT": _of_cvat}
