"""The parts that YOLO's data.yaml names, or lists of images beside it.

The file is often copied to another machine or written one folder too high, so its paths are tried
from several folders.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from lambda_det.detection.data.coco_format import READER
from lambda_det.detection.data.image_folder import SUFFIXES, images_below, in_any_form
from lambda_det.errors import DataError, listed
from lambda_det.own_data.labels.conversion import read_labels
from lambda_det.own_data.labels.images import NamedImages, lines_of_text
from lambda_det.own_data.labels.yolo import yolo_content
from lambda_det.own_data.part_names import PART_OF_WORD, part_in

logger = logging.getLogger(__name__)

Content = tuple[dict[str, Any], Path]  # in COCO's format, and the folder of the images

_KEYS = ("train", "val", "valid", "validation", "test")  # of data.yaml for parts
_NOTHING = ("", "null", "~")


def contents_of_yolo(file: Path, to_train: bool) -> dict[str, Content]:
    """The labels of the parts that data.yaml names, or lists beside it; {} if there are none.

    Args:
        file: data.yaml.
        to_train: whether one of them must be there to train on.

    Raises:
        DataError: a path is missing, or it names parts, but none to train on.
    """
    content = yolo_content(file)
    home = content.get("path")
    homes = [file.parent]
    if isinstance(home, str):  # of the author's machine, of which the last folder may be here
        last = PureWindowsPath(home).name
        homes = [file.parent / home, file.parent, file.parent / last]
    if not any(map(content.get, _KEYS)):
        content |= _lists_beside(file)
    images: dict[str, tuple[list[Path], Path]] = {}
    for key in filter(content.get, _KEYS):
        part = PART_OF_WORD[key]
        if part not in images and (places := _places(file, part, key, content[key], homes)):
            images[part] = _images_in(file, part, places, homes)
    if to_train and images and "train" not in images:
        raise DataError(
            f"{file} names images for {' and '.join(images)}, but not for train; its keys are "
            f"{listed(content, 9)}."
        )
    # as in examples that overfit on purpose
    for part, other in (("test", "val"), ("test", "train"), ("val", "train")):
        if part in images and images[part] == images.get(other):
            logger.warning(f"{file}: {part} names the images of {other}, so it is no part")
            del images[part]
    contents = {}
    for part, (paths, folder) in images.items():
        labels = read_labels(file, folder, paths)
        labels[READER]["labels"] = f"{file} ({part})"
        contents[part] = (labels, folder)
    return contents


def _lists_beside(file: Path) -> dict[str, str]:
    """Lists of images with names of parts, such as train.txt, beside the names of classes."""
    lists = {}
    for path in sorted(file.parent.glob("*.[tT][xX][tT]")):
        if path.stem.lower() in _KEYS:
            _, line = next(lines_of_text(path), ("", ""))
            if Path(line).suffix.lower() in SUFFIXES:
                lists[path.stem.lower()] = path.name
    return lists


def _places(file: Path, part: str, key: str, value: Any, homes: Iterable[Path]) -> list[Path]:
    """The folders and lists that data.yaml names for a part."""
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{file}: the value of {key} is a {type(value).__name__} that is no path; write the "
            "path of a folder or of a list of images there, or several of them."
        )
    places = {text: _place(text, homes) for text in texts if text.strip() not in _NOTHING}
    missing = [text for text, place in places.items() if place is None]
    if missing and part == "test" and len(missing) == len(places):
        # Roboflow also writes the names of parts without images
        logger.warning(f"{file}: its test part is not there ({listed(missing)})")
        return []
    if missing:
        folders = dict.fromkeys(
            image.parent.relative_to(file.parent).as_posix() for image in images_below(file.parent)
        )
        raise DataError(
            f"{file}: {part} names {listed(missing)}, which is not there; write the folder of its "
            f"images there, or several as [a, b], of these: {listed(folders, 8)}."
        )
    return [place for place in places.values() if place is not None]


def _place(value: str, homes: Iterable[Path]) -> Path | None:
    """The folder or list of images that data.yaml names, from one of the folders ``homes``."""
    # Roboflow's paths are one level too high, where another data set may be. For a path of another
    # machine the last parts suffice, if they have the word for the part.
    text = value.strip().replace("\\", "/")
    texts = [text.replace("../", ""), text]
    parts = [part for part in text.split("/") if part not in ("", ".", "..")]
    if text.startswith("/") or ":" in text or ".." in text.split("/"):
        ends = [parts[start:] for start in range(1, len(parts))]
        texts += ["/".join(end) for end in ends if _word(end) == _word(parts)]
    for text, home in itertools.product(texts, homes):
        path = in_any_form(Path(os.path.abspath(home / text)))
        if path.is_dir() or (path.suffix.lower() == ".txt" and path.is_file()):
            return path
    return None


def _word(names: Sequence[str]) -> str:
    """The part that the last of the names with a word for one tells; or ""."""
    return next(filter(None, map(part_in, reversed(names))), "")


def _images_in(
    file: Path, part: str, places: list[Path], homes: Iterable[Path]
) -> tuple[list[Path], Path]:
    """The images of folders and lists, and a folder that holds all of them."""
    paths: set[Path] = set()
    for place in places:
        is_list = place.is_file()
        paths.update(_listed(place, file.parent, homes) if is_list else images_below(place))
    if not paths:
        raise DataError(f"{file}: {part} names no image.")
    if len(places) == 1 and places[0].is_dir():
        return sorted(paths), places[0]
    return sorted(paths), Path(os.path.commonpath([path.parent for path in paths]))


def _listed(list_file: Path, root: Path, homes: Iterable[Path]) -> Iterator[Path]:
    """The images of a list: whole paths, or from one of the folders ``homes``, or by their ends."""
    # Ends are of paths of another machine
    images = None
    for where, text in lines_of_text(list_file):
        tried = (Path(os.path.abspath(home / text)) for home in (list_file.parent, *homes))
        path = next(filter(Path.is_file, tried), None)
        if path is None:
            images = images or NamedImages(Path(os.path.abspath(root)))
            path = images.find(where, list_file.parent, text)
        yield path
