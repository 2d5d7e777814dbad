"""Read the lists of a COCO-format file; a file of another format is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from detectron2.utils.file_io import PathManager

from lambda_det.errors import DataError, printable, refused

COCO_DETECTIONS = 100  # the most detections of an image and a class that COCO's AP counts
# The lists of a file, and the keys that every entry of each must have, with the type of their
# values
IMAGES = {"images": {"file_name": str}}
INSTANCES = {
    "images": {"id": int, "file_name": str},
    "annotations": {"image_id": int, "category_id": int},
    "categories": {"id": int, "name": str},
}
_PANOPTIC = {
    "annotations": {"image_id": int, "file_name": str, "segments_info": list},
    "categories": {"id": int, "isthing": object},
}
_SEGMENT = {"id": int, "category_id": int}


def read_json(json_file: str) -> dict[str, Any]:
    """Read an annotation file.

    Raises:
        DataError: it cannot be read, or is not a JSON object.
    """
    what = f"The annotation file {json_file} cannot be read as JSON"
    advice = (
        "make or fetch it again, and if a tool or an editor wrote it in another encoding, such as "
        "GBK or Latin-1, save it as UTF-8"
    )
    errors = (OSError, ValueError, RecursionError)
    with refused(DataError, what, advice, *errors), PathManager.open(json_file, "rb") as file:
        # UTF-8 or UTF-16, with or without a byte order mark
        content = json.loads(file.read())
    if not isinstance(content, dict):
        raise DataError(
            f"{json_file} is not in COCO format: it holds a {type(content).__name__} where an "
            "object with images, annotations and categories is expected."
        )
    return content


# The entry of a file that our readers made of labels in another format, or of a copy: their place
# "labels"; how they write "boxes", of ``BOX_FORMS``, or None for a copy of COCO's; and "findings",
# what was repaired or left out. Images and annotations of what readers made have a "source", which
# is their place in the labels
READER = "lambda_det"


def name_labels(content: dict[str, Any], file: str) -> dict[str, Any]:
    """The entry that our readers or a copy made; where there is none, one that names the file, by
    which copies of the content name it in their messages.
    """
    made = content.get(READER)
    # another program may write an entry of that name as well, with keys of its own
    if not (isinstance(made, dict) and made.keys() >= {"labels", "boxes", "findings"}):
        made = content[READER] = {"labels": file, "boxes": None, "findings": []}
    return made


def read_lists(
    json_file: str, lists: Mapping[str, Mapping[str, type]] = INSTANCES
) -> dict[str, Any]:
    """Read an annotation file, and check the form of its ``lists``.

    Raises:
        DataError: it cannot be read, or a list, an entry or a key is missing or of another type.
    """
    content = read_json(json_file)
    for name, types in lists.items():
        _check_entries(json_file, content, name, types)
    return content


def _check_entries(
    json_file: str, content: Mapping[str, Any], name: str, types: Mapping[str, type]
) -> None:
    if fault := _fault(content.get(name), types):
        raise DataError(f"{json_file} is not in COCO format: of {name!r}, {fault}.")


def _fault(entries: Any, types: Mapping[str, type]) -> str | None:
    if not isinstance(entries, list):
        return f"the value is {entries!r:.80}, not a list"
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            return f"entry {index} is {entry!r:.80}, not an object"
        for key, kind in types.items():
            value = entry.get(key)
            if kind is int:
                value = entry[key] = whole(value, value)
            # JSON has integers of any length, and True is one of Python's
            if not isinstance(value, kind) or (
                kind is int and (isinstance(value, bool) or abs(value) >= 2**63)
            ):
                return f"the {key} of entry {index} is {value!r:.80}, not of type {kind.__name__}"
    return None


def whole(value: Any, default: Any) -> Any:
    """A number as an integer, also from 1.0 or "1", as tables and spreadsheets write it."""
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    return default


def check_segments_mode(path: str, mode: str) -> None:
    """Refuse an image of segments whose mode in Pillow loses the ids.

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
    content = read_lists(json_file, _PANOPTIC)
    is_thing = {entry["id"]: bool(entry["isthing"]) for entry in content["categories"]}
    for entry in content["annotations"]:
        _check_entries(json_file, entry, "segments_info", _SEGMENT)
        for segment in entry["segments_info"]:
            has_category = segment["category_id"] in is_thing
            if not has_category or segment.get("iscrowd") not in (None, 0, 1):
                raise DataError(
                    f"{json_file}: in image {entry['image_id']}, the segment {segment!r:.80} is of "
                    f"none of the {len(is_thing)} categories of the file, or its iscrowd is not "
                    "0 or 1; correct it."
                )
    return {entry["image_id"]: entry for entry in content["annotations"]}, is_thing
