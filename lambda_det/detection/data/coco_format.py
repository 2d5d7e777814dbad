"""Reading the lists of a COCO-format file; what is not of that format at all is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from detectron2.utils.file_io import PathManager

from lambda_det.errors import DataError, printable


def read_json(json_file: str) -> dict[str, Any]:
    """Read an annotation file.

    Raises:
        DataError: it cannot be read, or is not a JSON object.
    """
    try:
        with PathManager.open(json_file, "r", encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise DataError(
            f"The annotation file {json_file} cannot be read ({error.strerror})."
        ) from error
    except (ValueError, RecursionError) as error:  # ValueError also of text that is not UTF-8
        raise DataError(
            f"The annotation file {json_file} is not JSON ({error}); make or fetch it again."
        ) from error
    if not isinstance(content, dict):
        raise DataError(
            f"{json_file} is not in COCO format: it holds a {type(content).__name__} where an "
            "object with images, annotations and categories is expected."
        )
    return content


def read_entries(
    json_file: str, content: dict[str, Any], name: str, keys: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The list ``content[name]``, whose entries all have ``keys``.

    Raises:
        DataError: it is not such a list.
    """
    entries = content.get(name)
    if not isinstance(entries, list):
        found = f"is a {type(entries).__name__}" if name in content else "is missing"
        raise DataError(f"{json_file} is not in COCO format: the list {name!r} {found}.")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DataError(
                f"{json_file} is not in COCO format: entry {index} of {name!r} is a "
                f"{type(entry).__name__}, not an object."
            )
        for key in keys:
            if key not in entry:
                raise DataError(
                    f"{json_file} is not in COCO format: entry {index} of {name!r} has no {key!r}."
                )
    return entries


def read_numbers(json_file: str, entries: list[dict[str, Any]], name: str, key: str) -> np.ndarray:
    """The integers under ``key``, int64 [entries].

    Raises:
        DataError: one of them is not an integer of 64 bits.
    """
    values = [entry[key] for entry in entries]
    for index, value in enumerate(values):
        if type(value) is not int or abs(value) >= 2**63:
            raise DataError(
                f"{json_file} is not in COCO format: the {key} of entry {index} of {name!r} is "
                f"{value!r:.80}, not an integer."
            )
    return np.array(values, dtype=np.int64)


def check_segments_mode(path: str, mode: str) -> None:
    """Refuse an image of segments of another mode of Pillow, in whose pixels the ids are lost.

    Raises:
        DataError: it is not RGB, with or without transparency.
    """
    if mode not in ("RGB", "RGBA"):
        raise DataError(
            f"The image of segments {printable(path)} is of mode {mode}, and ids are encoded in "
            "the three channels of RGB; fetch it again or save it as RGB."
        )


def read_panoptic(json_file: str) -> tuple[dict[int, dict[str, Any]], dict[int, bool]]:
    """A panoptic file of COCO's format.

    Returns:
        The annotations by the id of their image, with "file_name" and "segments_info", and whether
        a category is of things, by its id.

    Raises:
        DataError: the file is not in that format, or a segment is of a category that it lacks.
    """
    content = read_json(json_file)
    categories = read_entries(json_file, content, "categories", ("id", "isthing"))
    ids = read_numbers(json_file, categories, "categories", "id").tolist()
    is_thing = {i: bool(entry["isthing"]) for i, entry in zip(ids, categories, strict=True)}
    keys = ("image_id", "file_name", "segments_info")
    entries = read_entries(json_file, content, "annotations", keys)
    images = read_numbers(json_file, entries, "annotations", "image_id").tolist()
    for image, entry in zip(images, entries, strict=True):
        where = f"{json_file} is not in COCO's panoptic format: of image {image}"
        if not isinstance(entry["file_name"], str):
            raise DataError(f"{where}, the file_name is {entry['file_name']!r:.80}, not a text.")
        if not isinstance(entry["segments_info"], list):
            raise DataError(
                f"{where}, segments_info is {entry['segments_info']!r:.80}, not a list."
            )
        for segment in entry["segments_info"]:
            numbers = segment if isinstance(segment, dict) else {}
            number, category, crowd = (numbers.get(key) for key in ("id", "category_id", "iscrowd"))
            if type(number) is not int or type(category) is not int or category not in is_thing:
                raise DataError(
                    f"{where}, the segment {segment!r:.80} has no id, or no category_id of the "
                    f"{len(is_thing)} categories of the file; correct it."
                )
            if crowd not in (None, 0, 1):
                raise DataError(f"{where}, the iscrowd of segment {number} is {crowd!r:.80}.")
    return dict(zip(images, entries, strict=True)), is_thing


def read_keypoint_names(json_file: str, category: dict[str, Any]) -> list[str]:
    """The names of the keypoints of a category; empty where it has none.

    Raises:
        DataError: they are not a list of names.
    """
    names = category.get("keypoints") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{json_file}: the keypoints of category {category['name']!r:.80} are not a list of "
            "names; correct or remove them."
        )
    return names
