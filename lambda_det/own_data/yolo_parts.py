"""The parts that YOLO's data.yaml names, or lists of images beside it.

The file is often copied to another machine or written one folder too high, so its paths are tried
from several folders.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lambda_det.detection.data.coco_format import READER
from lambda_det.detection.data.image_folder import SUFFIXES, in_any_form, walk
from lambda_det.errors import DataError, counted, listed
from lambda_det.files import read_text
from lambda_det.own_data.labels import read_labels
from lambda_det.own_data.labels.images import NamedImages
from lambda_det.own_data.labels.yolo import yolo_content
from lambda_det.own_data.part_names import PART_OF_WORD, named_part

__all__ = ["Content", "contents_of_yolo"]

logger = logging.getLogger(__name__)

Content = tuple[dict[str, Any], Path]  # in COCO's format, and the folder of the images

_KEYS = ("train", "val", "valid", "validation", "test")  # of data.yaml for parts
_OTHER_KEYS = ("best", "dest", "latest", "rest", "text")  # of other programs, which resemble them


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
    homes = [file.parent / home, file.parent] if isinstance(home, str) else [file.parent]
    lists: dict[str, str] = {}
    if not any(_part_of_key(key, value, homes) for key, value in content.items()):
        content |= (lists := _lists_beside(file))
    paths: dict[str, list[Path]] = {}
    folders: dict[str, Path] = {}
    for key, value in content.items():
        part = _part_of_key(key, value, homes)
        if part is None:
            _refuse_typing_error(file, key, value, homes)
            continue
        values = _values(file, key, value)
        if values and part not in paths:
            places = _places(file, part, values, homes)
            if places:
                paths[part], folders[part] = _images_in(file, part, places, homes)
    if to_train and paths and "train" not in paths:
        raise DataError(
            f"{file} names images for {' and '.join(paths)}, but not for train; its keys are "
            f"{listed(content, 9)}."
        )
    if lists:
        _log_unlisted(file, paths)
    if paths.get("val") == paths.get("train"):  # as in examples that overfit on purpose
        paths.pop("val", None)
    contents = {}
    for part in paths:
        labels = read_labels(file, folders[part], paths[part])
        labels[READER]["labels"] = f"{file} ({part})"
        contents[part] = (labels, folders[part])
    return contents


def _part_of_key(key: Any, value: Any, homes: Iterable[Path]) -> str | None:
    """The part that a key of data.yaml names; None for other keys.

    Words for parts that YOLO itself does not read may be keys of another program, such as
    eval: bbox. They count where the value is a path that exists.
    """
    word = key.lower() if isinstance(key, str) else ""
    if word in _KEYS or any(_place(text, homes) for text in _texts(value)):
        return PART_OF_WORD.get(word)
    return None


def _texts(value: Any) -> list[str]:
    """The texts of a value that is a text or a list."""
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str) and text.strip()]


def _values(file: Path, key: str, value: Any) -> list[str]:
    """The paths of a key of data.yaml that names a part.

    Raises:
        DataError: its value cannot be a path.
    """
    values = value if isinstance(value, list) else [value]
    if value and not all(isinstance(text, str) for text in values):
        raise DataError(
            f"{file}: the value of {key} is a {type(value).__name__} that is no path; write the "
            "path of a folder or of a list of images there, or several of them."
        )
    return _texts(value)


def _lists_beside(file: Path) -> dict[str, str]:
    """Lists of images with names of parts, such as train.txt, beside the names of classes."""
    lists = {}
    for path in sorted(file.parent.glob("*.txt")):
        if path.stem.lower() in PART_OF_WORD:
            lines = filter(None, map(str.strip, read_text(path).splitlines()))
            if Path(next(lines, "")).suffix.lower() in SUFFIXES:
                lists[path.stem] = path.name
    return lists


def _log_unlisted(file: Path, paths: Mapping[str, Iterable[Path]]) -> None:
    """Say which images are in no list."""
    used = {os.path.abspath(path) for part in paths.values() for path in part}
    images = (path for path in walk(file.parent) if path.suffix.lower() in SUFFIXES)
    rest = [path for path in images if os.path.abspath(path) not in used]
    if rest:
        logger.warning(
            f"{file}: in no list ({', '.join(paths)}), beside it: {counted(len(rest), 'image')}, "
            f"such as {rest[0]}"
        )


def _refuse_typing_error(file: Path, key: Any, value: Any, homes: Iterable[Path]) -> None:
    """
    Raises:
        DataError: a key that is nearly one of YOLO's for parts names images, or something like a
            path.
    """
    if not isinstance(key, str) or key.lower() in (*PART_OF_WORD, *_OTHER_KEYS):
        return
    if not any("/" in text or _place(text, homes) for text in _texts(value)):
        return
    near = [word for word in _KEYS if sorted(word) == sorted(key.lower())]
    near += difflib.get_close_matches(key.lower(), _KEYS, 1, cutoff=0.8)
    if near:
        raise DataError(
            f"{file}: the key {key!r} names no part; did you mean {PART_OF_WORD[near[0]]}?"
        )


def _places(file: Path, part: str, values: list[str], homes: Iterable[Path]) -> list[Path]:
    """The folders and lists that data.yaml names for a part.

    Raises:
        DataError: one is missing.
    """
    is_darknet = file.suffix not in (".yaml", ".yml")
    places = {text: _place(text, homes, is_darknet) for text in values}
    missing = [text for text, place in places.items() if place is None]
    if missing and part == "test" and len(missing) == len(places):
        # Roboflow also writes the names of parts without images
        logger.warning(f"{file}: its test part is not there ({listed(missing)})")
        return []
    if missing:
        raise DataError(
            f"{file}: {part} names {listed(missing)}, which is not there; {_seen(file.parent)}."
        )
    for text, place in places.items():
        # Roboflow's paths are one level too high, where another data set may be
        inner = _place(text.replace("../", ""), homes) if ".." in text else place
        if inner not in (None, place):
            raise DataError(
                f"{file}: {part} names {text}, and there are {place} and {inner}; write the whole "
                "path of one of them."
            )
    return [place for place in places.values() if place is not None]


def _seen(folder: Path) -> str:
    """Where images are, for the end of a sentence."""
    images = (path for path in walk(folder) if path.suffix.lower() in SUFFIXES)
    folders = dict.fromkeys(path.parent.relative_to(folder).as_posix() for path in images)
    return f"there are images in {listed(folders, 8)}"


def _place(value: str, homes: Iterable[Path], is_elsewhere: bool = False) -> Path | None:
    """The folder or list of images that data.yaml names.

    Roboflow's paths are one level too high. For a path of another machine the last parts suffice,
    if they have the word for the part.

    Args:
        value: the path.
        homes: folders in which it may begin.
        is_elsewhere: whether it begins in another folder, as the paths of Darknet do.
    """
    text = value.strip().replace("\\", "/")
    texts = [text, text.replace("../", "")]
    parts = [part for part in text.split("/") if part not in ("", ".", "..")]
    if is_elsewhere or text.startswith("/") or ":" in text or ".." in text.split("/"):
        ends = (Path(*parts[start:]) for start in range(1, len(parts)))
        word = named_part(Path(*parts), Path())
        texts += [end.as_posix() for end in ends if named_part(end, Path()) == word]
    for text, home in itertools.product(texts, homes):
        path = in_any_form(Path(os.path.abspath(home / text)))
        if path.is_dir() or (path.suffix == ".txt" and path.is_file()):
            return path
    return None


def _images_in(
    file: Path, part: str, places: list[Path], homes: Iterable[Path]
) -> tuple[list[Path], Path]:
    """The images of folders and lists, and a folder that holds all of them.

    Raises:
        DataError: an image of a list is missing, or there is none.
    """
    paths: dict[Path, None] = {}
    for place in places:
        if place.is_dir():
            paths.update(dict.fromkeys(p for p in walk(place) if p.suffix.lower() in SUFFIXES))
        else:
            paths.update(dict.fromkeys(_listed(place, file.parent, homes)))
    if not paths:
        raise DataError(f"{file}: {part} names no image.")
    if len(places) == 1 and places[0].is_dir():
        return sorted(paths), places[0]
    return sorted(paths), Path(os.path.commonpath([path.parent for path in paths]))


def _listed(list_file: Path, root: Path, homes: Iterable[Path]) -> Iterator[Path]:
    """The images of a list, by whole paths, from its own folder, from the folder of data.yaml, or
    by the ends of paths of another machine."""
    images = None
    for number, line in enumerate(read_text(list_file).splitlines(), 1):
        if not (text := line.strip()) or text.startswith("#"):
            continue
        tried = (Path(os.path.abspath(home / text)) for home in (list_file.parent, *homes))
        path = next(filter(Path.is_file, tried), None)
        if path is None:
            images = images or NamedImages(Path(os.path.abspath(root)))
            path = images.find(f"{list_file}, line {number}", list_file.parent, text)
        yield path
