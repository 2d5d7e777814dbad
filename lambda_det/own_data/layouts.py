"""The parts of a data set, to train and to evaluate on, in the folders of usual tools.

Those of Roboflow and Ultralytics (train, valid, test, with images and labels), of Pascal VOC
(Annotations, JPEGImages, ImageSets/Main), of COCO (annotations beside train2017 and val2017), and
one folder of pictures with a file of labels each. Anything without a word for a part is the
training part.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lambda_det.detection.data.coco_format import READER
from lambda_det.detection.data.picture_folder import PICTURES, in_any_form, outputs_below, walk
from lambda_det.errors import DataError, counted, listed
from lambda_det.files import read_text
from lambda_det.own_data.drafts import write_draft
from lambda_det.own_data.held_out import part_of
from lambda_det.own_data.labels import (
    COCO,
    FORMATS,
    give_all_classes,
    only,
    other_labels,
    read_labels,
    recognise,
)
from lambda_det.own_data.labels.pictures import Pictures
from lambda_det.own_data.labels.yolo import read_yolo, yolo_content
from lambda_det.own_data.part_names import PART_OF_WORD, PART_WORDS, named_part
from lambda_det.own_data.picture_folders import folder_of_coco

__all__ = ["Part", "find_images", "find_parts"]

logger = logging.getLogger(__name__)

# the beginnings of the names of COCO's own files
_OF_COCO = ("instances", "person_keypoints", "captions", "stuff", "panoptic", "image_info")
_YOLO_KEYS = ("train", "val", "valid", "validation", "test")  # keys of data.yaml for parts
_OTHER_KEYS = ("best", "dest", "latest", "rest", "text")  # of other programs, which resemble them


class Part(NamedTuple):
    """A part of a data set.

    Attributes:
        labels: a file in COCO's format.
        images: the folder of its pictures.
        source: the user's own labels, for messages.
        name: "train", "val" or "test".
    """

    labels: Path
    images: Path
    source: str
    name: str


def find_parts(
    place: str | Path,
    images: str | Path | None = None,
    *,
    folder: Path,
) -> tuple[str, list[Part]]:
    """The format of a data set and its parts.

    Args:
        place: its folder, or YOLO's data.yaml in it.
        images: the folder of the pictures, with or without parts; None if they are in ``place``.
        folder: for files in COCO's format that are made from labels of other formats.

    Returns:
        The name of the format, and the parts in the order train, val, test; those that are there.
        Labels that are converted get the classes of all parts.

    Raises:
        DataError: nothing there is of a known format, or it is not clear what belongs together.
    """
    place = Path(place)
    name, files = recognise(place)
    root = place if place.is_dir() else place.parent
    if place.is_dir() and (others := other_labels(place, name)):
        left = listed(f"{file} of {other}" for other, file in others.items())
        logger.warning(f"{place}: labels of {name} are read, and not others such as {left}")
    if place.is_dir() and (outputs := outputs_below(place)):
        logger.info(f"{place}: not read, as this program wrote them: {listed(outputs)}")
    home = Path(images) if images else root
    if name == COCO:
        parts = _of_coco(root, files, home)
    else:
        contents = _contents(name, place, root, files, home)
        give_all_classes([content for content, _ in contents.values()])
        parts = {}
        stem = os.path.basename(os.path.abspath(root))
        for part, (content, pictures) in contents.items():
            file = write_draft(content, folder, f"{stem}_{part}")
            parts[part] = Part(Path(file), pictures, content[READER]["labels"], part)
    return name, [parts[part] for part in PART_WORDS if part in parts]


def find_images(labels: str | Path) -> Path:
    """The folder of the pictures of labels, in or beside them, where none is named.

    Raises:
        DataError: no folder there holds the pictures of a file in COCO's format, or several do.
    """
    labels = Path(labels)
    name, files = recognise(labels)
    root = labels if labels.is_dir() else labels.parent
    return _images_of(files[0], root, root) if name == COCO else root


def _with_train(root: Path, groups: Mapping[str, Any]) -> dict[str, Any]:
    """Groups by part with one to train on: the group without a part, if no other is.

    Raises:
        DataError: there are groups of parts, but none to train on.
    """
    groups = dict(groups)
    rest = groups.pop("", None)
    if rest is not None:
        groups.setdefault("train", rest)
    if len(groups) > 1 and "train" not in groups:
        parts = " and ".join(part for part in PART_WORDS if part in groups)
        raise DataError(
            f"{root} has parts called {parts}, and nothing to train on; name what is to be trained "
            "on with --train."
        )
    if "train" not in groups:
        for part, group in groups.items():
            logger.info(f"{root}: its one part is called {part}, and is the one to train on")
            return {"train": group}
    return groups


# ---------------------------------------------------------------------------------------- of COCO's
def _of_coco(root: Path, files: list[Path], home: Path) -> dict[str, Part]:
    # COCO's own files of keypoints, captions, stuff and segments lie beside those of instances
    instances = [file for file in files if file.name.startswith("instances")]
    others = [file for file in files if not file.name.startswith(_OF_COCO)]
    if instances and others:
        logger.warning(f"{root}: not used beside instances_*: {listed(others)}")
    groups: dict[str, list[Path]] = {}
    for file in instances or files:
        groups.setdefault(named_part(file.with_suffix(""), root), []).append(file)
    if "train" in groups and "" in groups:
        logger.warning(f"{root}: not used, as they name no part: {listed(groups.pop(''))}")
    parts = {}
    for part, candidates in _with_train(root, groups).items():
        file = Path(only(root, candidates))
        try:
            images = _images_of(file, root, home)
        except DataError:
            if part != "test" or "val" not in groups:
                raise
            # a training does not need it
            logger.warning(f"{file}: no test part, as its pictures are in no folder or in several")
            continue
        parts[part] = Part(file, images, str(file), part)
    return parts


def _images_of(file: Path, root: Path, home: Path) -> Path:
    """The folder in or beside ``home`` with the pictures of a file in COCO's format."""
    above = home.parent if home.name == "annotations" else home
    part = named_part(file.with_suffix(""), root)
    return folder_of_coco(file, above, lambda folder: named_part(folder, above) == part)


# --------------------------------------------------------------------------------- of other formats
Content = tuple[dict[str, Any], Path]  # in COCO's format, and the folder of the pictures


def _contents(
    name: str, place: Path, root: Path, files: list[Path], home: Path
) -> dict[str, Content]:
    """The labels of each part."""
    contents: dict[str, Content] = {}
    if FORMATS[name].read is read_yolo:
        contents = _named_by_yolo(Path(only(root, files)))
    elif lists := _lists_of_voc(root):
        for part, file in lists.items():
            images = file.parents[2] / "JPEGImages"
            images = images if images.is_dir() else file.parents[2]
            contents[part] = (read_labels(file, images), images)
    if contents:
        return contents
    content = read_labels(place, home)
    of_one = FORMATS[name].pictures != "some"
    return {part: (labels, home) for part, labels in _split(content, root, home, of_one).items()}


def _split(
    content: dict[str, Any], root: Path, home: Path, of_one: bool
) -> dict[str, dict[str, Any]]:
    """Divide content into parts: by the folder of the labels, their subset, or the folder of the
    picture.

    Args:
        content: of all labels.
        root: the folder of the labels.
        home: the folder of the pictures.
        of_one: whether a file of labels belongs to one picture, so its own name does not count.

    Raises:
        DataError: there is a part to train on, and labels of no part beside it.
    """
    ids: dict[str, set[int]] = {}
    labelled: dict[str, list[Path]] = {}
    for image in content["images"]:
        source, picture = Path(image["source"]), home / image["file_name"]
        places = (
            source.parent if of_one else source.with_suffix(""),
            root / image.get("subset", ""),
        )
        named = [*(named_part(path, root) for path in places), named_part(picture.parent, home)]
        part = next(filter(None, named), "")
        ids.setdefault(part, set()).add(image["id"])
        if source.suffix.lower() not in PICTURES:
            labelled.setdefault(part, []).append(source)
    if "" in ids and "" not in labelled and len(ids) > 1:
        del ids[""]  # pictures without labels, beside the pictures of parts
    if "" in ids and "train" in ids:
        raise DataError(
            f"{root}: {len(labelled[''])} of {sum(map(len, labelled.values()))} labels are in no "
            f"folder called {', '.join(PART_WORDS)}, such as that of {labelled[''][0]}; to use "
            f"all, give --train {root} --images {home}."
        )
    if len(ids) < 2:
        return {"train": content}
    parts = {}
    for part, chosen in _with_train(root, ids).items():
        parts[part] = part_of(content, chosen)
        # they belong to all parts
        findings = content[READER]["findings"] if part == "train" else []
        name = _common_folder(labelled.get(part, []), root) or f"{root} ({part})"
        parts[part][READER] = {**content[READER], "labels": name, "findings": findings}
    return parts


def _common_folder(files: Iterable[Path], root: Path) -> str:
    """The folder of files below another one; "" if there is none."""
    folders = {os.path.abspath(file.parent) for file in files}
    common = Path(os.path.commonpath(folders)) if folders else root
    below = os.path.relpath(common, os.path.abspath(root)) if folders else "."
    return "" if below.startswith(".") else str(root / below)


def _lists_of_voc(root: Path) -> dict[str, Path]:
    """Pascal VOC's lists of the pictures of each part.

    Raises:
        DataError: there are several for a part, or none to train on.
    """
    lists: dict[str, list[Path]] = {}
    for path in walk(root):
        if path.match("ImageSets/Main/*.txt"):
            name = re.sub("[-_ ]", "", path.stem.lower())
            lists.setdefault(PART_OF_WORD.get(name, name), []).append(path)
    if "trainval" in lists and "train" not in lists:
        lists["train"] = lists["trainval"]
        lists.pop("val", None)
    groups = {part: lists[part] for part in PART_WORDS if part in lists}
    return {part: Path(only(root, files)) for part, files in _with_train(root, groups).items()}


# ------------------------------------------------------------------------------------ of data.yaml
def _named_by_yolo(file: Path) -> dict[str, Content]:
    """The labels of the parts that data.yaml names, or lists beside it; {} if there are none.

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
                paths[part], folders[part] = _pictures_in(file, part, places, homes)
    if paths and "train" not in paths:
        raise DataError(
            f"{file} names pictures for {' and '.join(paths)}, but not for train; its keys are "
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
    if word in _YOLO_KEYS or any(_place(text, homes) for text in _texts(value)):
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
            "path of a folder or of a list of pictures there, or several of them."
        )
    return _texts(value)


def _lists_beside(file: Path) -> dict[str, str]:
    """Lists of pictures with names of parts, such as train.txt, beside the names of classes."""
    lists = {}
    for path in sorted(file.parent.glob("*.txt")):
        if path.stem.lower() in PART_OF_WORD:
            lines = filter(None, map(str.strip, read_text(path).splitlines()))
            if Path(next(lines, "")).suffix.lower() in PICTURES:
                lists[path.stem] = path.name
    return lists


def _log_unlisted(file: Path, paths: Mapping[str, Iterable[Path]]) -> None:
    """Say which pictures are in no list."""
    used = {os.path.abspath(path) for part in paths.values() for path in part}
    pictures = (path for path in walk(file.parent) if path.suffix.lower() in PICTURES)
    rest = [path for path in pictures if os.path.abspath(path) not in used]
    if rest:
        logger.warning(
            f"{file}: in no list ({', '.join(paths)}), beside it: {counted(len(rest), 'picture')}, "
            f"such as {rest[0]}"
        )


def _refuse_typing_error(file: Path, key: Any, value: Any, homes: Iterable[Path]) -> None:
    """
    Raises:
        DataError: a key that is nearly one of YOLO's for parts names pictures, or something like a
            path.
    """
    if not isinstance(key, str) or key.lower() in (*PART_OF_WORD, *_OTHER_KEYS):
        return
    if not any("/" in text or _place(text, homes) for text in _texts(value)):
        return
    near = [word for word in _YOLO_KEYS if sorted(word) == sorted(key.lower())]
    near += difflib.get_close_matches(key.lower(), _YOLO_KEYS, 1, cutoff=0.8)
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
        # Roboflow also writes the names of parts without pictures
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
    """Where pictures are, for the end of a sentence."""
    pictures = (path for path in walk(folder) if path.suffix.lower() in PICTURES)
    folders = dict.fromkeys(path.parent.relative_to(folder).as_posix() for path in pictures)
    return f"there are pictures in {listed(folders, 8)}"


def _place(value: str, homes: Iterable[Path], is_elsewhere: bool = False) -> Path | None:
    """The folder or list of pictures that data.yaml names.

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


def _pictures_in(
    file: Path, part: str, places: list[Path], homes: Iterable[Path]
) -> tuple[list[Path], Path]:
    """The pictures of folders and lists, and a folder that holds all of them.

    Raises:
        DataError: a picture of a list is missing, or there is none.
    """
    paths: dict[Path, None] = {}
    for place in places:
        if place.is_dir():
            paths.update(dict.fromkeys(p for p in walk(place) if p.suffix.lower() in PICTURES))
        else:
            paths.update(dict.fromkeys(_listed(place, file.parent, homes)))
    if not paths:
        raise DataError(f"{file}: {part} names no picture.")
    if len(places) == 1 and places[0].is_dir():
        return sorted(paths), places[0]
    return sorted(paths), Path(os.path.commonpath([path.parent for path in paths]))


def _listed(list_file: Path, root: Path, homes: Iterable[Path]) -> Iterator[Path]:
    """The pictures of a list, by whole paths, from its own folder, from that of data.yaml, or by
    the last parts of paths of another machine."""
    pictures = None
    for number, line in enumerate(read_text(list_file).splitlines(), 1):
        if not (text := line.strip()) or text.startswith("#"):
            continue
        tried = (Path(os.path.abspath(home / text)) for home in (list_file.parent, *homes))
        path = next(filter(Path.is_file, tried), None)
        if path is None:
            pictures = pictures or Pictures(Path(os.path.abspath(root)))
            path = pictures.find(f"{list_file}, line {number}", list_file.parent, text)
        yield path
