"""How the format of files of labels is recognised."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from lambda_det.detection.data.image_folder import outputs_below, walk
from lambda_det.errors import DataError, listed
from lambda_det.files import decoded, refuse_missing
from lambda_det.own_data.labels.objects import reading
from lambda_det.own_data.labels.table import COCO, FORMATS
from lambda_det.own_data.labels.xml import root_name
from lambda_det.own_data.labels.yolo import is_list_of_names, looks_like_labels

_OF_SIGN = {sign: name for name, row in FORMATS.items() for sign in row.signs}
_ENDINGS = (".json", ".xml", ".txt")  # of files of labels, but for YOLO's lists of names


def recognise(place: Path) -> tuple[str, list[Path]]:
    """Find the format of a file or folder, and its files of labels.

    Raises:
        DataError: nothing there is of a known format.
    """
    refuse_missing(place)
    if place.is_file() and place.suffix.lower() in _ARCHIVES:
        raise DataError(f"{place} is an archive; unpack it, and name the folder that comes out.")
    there = list(walk(place)) if place.is_dir() else [place]
    for name, row in FORMATS.items():
        # a file that is named is recognised by its content, whatever its ending is
        by_content = place.is_file() and row.signs
        files = [file for file in there if by_content or file.name.lower().endswith(row.endings)]
        if row.signs:
            files = [file for file in files if format_of(file) == name]
        if files:
            return name, [file for file in files if file.name == "data.yaml"] or files
    if place.is_file() and _OPENING_OF_JSON.match(decoded(place.read_bytes())):
        return COCO, [place]  # the reader of COCO's format says what is wrong with the file
    seen = _seen(place, there)
    refusal = f"{place} holds no labels of a known format ({', '.join(FORMATS)}); {seen}"
    if place.is_dir() and (outputs := outputs_below(place)):
        refusal += (
            f"; {listed(outputs)}, which this program wrote, is read only where it is named itself"
        )
    raise DataError(f"{refusal}.")


_OPENING_OF_JSON = re.compile(r"\s*[{\[]")
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")


def other_labels(place: Path, name: str) -> dict[str, Path]:
    """A file of labels in each other format than ``name`` that a folder holds, by the formats.

    Only the first ``_SAMPLED`` files of each ending are read, because there may be many large ones.
    """
    there = walk(place)
    found: dict[str | None, Path] = {}
    for ending in _ENDINGS:
        for file in [file for file in there if file.suffix.lower() == ending][:_SAMPLED]:
            with contextlib.suppress(DataError, OSError):  # a file that is not used may be broken
                if looks_like_labels(file):
                    found.setdefault("YOLO", file)
                elif ending != ".txt":  # any text, which may be large
                    found.setdefault(format_of(file), file)
    read = FORMATS[name].read
    return {one: file for one, file in found.items() if one and FORMATS[one].read is not read}


_SAMPLED = 20


# ----------------------------------------------------------------------------------- signs of files
def format_of(file: Path) -> str | None:
    """The format whose sign the content of a file has; None for none.

    Raises:
        DataError: it cannot be read.
    """
    with reading(file, "make it readable"):
        status = file.stat()
        return _OF_SIGN.get(_sign(file, status.st_mtime_ns, status.st_size))


@functools.cache
def _sign(file: Path, *version: int) -> str | None:
    """The first sign of a format that is at the top of a file; ``version`` tells a changed one."""
    # The file may be broken behind it, and is read as far as it takes
    content = file.read_bytes()
    if file.suffix.lower() in (".yaml", ".yml"):
        return "names:" if _YOLO.search(decoded(content)) else None
    if root := root_name(content):
        return f"<{root}>"
    keys = (f'"{key}"' for key in _json_keys(decoded(content)))
    return next(filter(_OF_SIGN.__contains__, keys), None)


# names, or in older files their number together with a part: "train" alone also occurs in files of
# other programs
_YOLO = re.compile(
    r"^[\"']?names[\"']?\s*:|\A\s*{(?:[^\0]*[{,\s])?[\"']?names[\"']?\s*:"
    r"|\A(?=[^\0]*^nc\s*:)[^\0]*^train\s*:",
    re.MULTILINE,
)


def _json_keys(text: str) -> Iterator[str]:
    """The keys of a JSON object in their order, and ``*.key`` for the keys of its entries."""
    # A value is parsed only when the next key is asked for; at a mistake the keys end
    decoder, start = json.JSONDecoder(), _OPENING.match(text)
    with contextlib.suppress(ValueError, RecursionError):
        while start:
            key, end = decoder.raw_decode(text, start.end())
            yield key
            colon = _COLON.match(text, end)
            if not colon:
                return
            value, end = decoder.raw_decode(text, colon.end())
            if isinstance(value, dict):
                yield from (f"*.{inner}" for inner in value)
            start = _COMMA.match(text, end)


_OPENING, _COLON, _COMMA = (re.compile(rf"\s*{sign}\s*") for sign in ("{", ":", ","))


def _seen(place: Path, there: list[Path]) -> str:
    """What files of no known format look like, for the end of a sentence."""
    labels = list(filter(looks_like_labels, there))
    if labels:
        lists = [file for file in there if file.suffix.lower() == ".txt" and is_list_of_names(file)]
        home = place if place.is_dir() else place.parent
        add = f"write it to {home / 'classes.txt'}, one name a line in the order of their numbers"
        names = f"{listed(lists)} may be it: call it classes.txt" if lists else add
        return (
            f"{len(labels)} files such as {labels[0]} look like YOLO's labels, but a list of the "
            f"names of their classes is missing; {names}"
        )
    return f"there are {endings_of(there)}"


def endings_of(files: Iterable[Path]) -> str:
    """How many files of each ending there are, for a message."""
    counts = Counter(file.suffix.lower() or "without an ending" for file in files)
    return listed(f"{count} {ending}" for ending, count in counts.most_common())
