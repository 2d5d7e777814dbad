"""Copies of one image, and frames of one film, which make AP too high on both sides of a split.

They are files of the same bytes; Roboflow's variants of an image, which it calls
NAME_jpg.rf.HASH.jpg (NAME_png.rf.HASH.jpg is of another image); and files beside it with its name
and another ending, or with a word for a change after or before its name, such as NAME_flip.jpg.
Before a name that is only a number or very short, such a word is no sign of a copy: crop_3.jpg may
be the third of images that are no copies.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lambda_det.detection.data.records import small_grey

_END = 1024  # in this number of bytes at their ends nearly all different images differ
_CHANGES = "|".join(
    (
        *("aug", "augment", "augmented", "augmentation", "copy", "variant"),
        *("flip", "flipped", "hflip", "vflip", "flip[-_ ]?(?:lr|ud|h|v)", "mirror", "mirrored"),
        *("rot", "rotate", "rotated", "rotation", "crop", "cropped", "zoom", "zoomed"),
        *("scale", "scaled", "shear", "shift", "shifted", "translate", "translated"),
        *("bright", "brighter", "brightness", "dark", "darker", "contrast", "hue", "saturation"),
        *("noise", "noisy", "blur", "blurred", "gray", "grey", "grayscale"),
    )
)
_ONE = rf"(?:{_CHANGES})[-_ ]?[0-9]*"
# With a letter, or a number as long as those that COCO and KITTI give to images
_NAME = r"(?:\d{6,}|(?=.*[^\W\d_]).{3,})"
_CHANGED = re.compile(
    rf"(?P<a>.+?)(?:[-_ ]+{_ONE})+|(?:{_ONE}[-_ ]+)+(?P<b>{_NAME})", re.IGNORECASE
)
_COPY = re.compile(r"(.+?\.rf)\.[\w-]+(\.\w+)?", re.IGNORECASE)
REMEDY = (  # for what parts share, in the words of every command
    "Keep each image with its copies, and each film, in one part: remove those of the other part, "
    "or train with --val-share and --group-by, which hold out whole films of the images to train "
    "on (docs/own_data.md)."
)


def copies(images: Mapping[str, Path], groups: Mapping[str, str] | None = None) -> dict[str, str]:
    """A group for each image: its copies and itself, or itself alone.

    Args:
        images: by name; a missing one is identified by its name alone.
        groups: of the images, by name, which are united where they share copies.
    """
    groups = groups or {name: _source(name) for name in images}
    same: dict[str, str] = {}  # a second group of the same images

    def first(group: str) -> str:
        while group in same:
            group = same[group]
        return group

    for equal in [*equal_files(images), *_variants(images)]:
        kept, *others = sorted({first(groups[name]) for name in equal})
        same.update(dict.fromkeys(others, kept))
    return {name: first(group) for name, group in groups.items()}


def shared_copies(parts: Mapping[str, Iterable[str]]) -> tuple[dict[str, str], str]:
    """An image of an earlier part for each image that is its copy, or a frame of the same film; and
    how many are which.

    Args:
        parts: the files of the images of each part of a data set, by its name.
    """
    files = [file for images in parts.values() for file in images]
    group_of = copies({file: Path(file) for file in files})
    equal: dict[str, str] = {}
    originals: dict[str, tuple[str, str]] = {}  # the first of each group, with its part
    for part, images in parts.items():
        for file in images:
            earlier, original = originals.setdefault(group_of[file], (part, file))
            if part != earlier:
                equal[file] = original
    shared = _shared_films(parts) | equal
    frames = f"{len(shared) - len(equal)} as frames of the same films"
    return shared, f"{len(equal)} as the same file or a copy, {frames}"


def _shared_films(parts: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """The nearest frame of an earlier part for each frame of a film that was mixed into parts.

    Of a film that was cut into one piece for each part, only a frame beside that of an earlier
    part counts. It is {} for a few frames.
    """
    number_of = {file: n for n, images in enumerate(parts.values()) for file in images}
    runs = numbered_runs(number_of, by_folder=False)
    runs = [run for run in runs if len({number_of[file] for file in run}) > 1]
    nearest: dict[str, str] = {}
    for run in runs:
        numbers = [number_of[file] for file in run]
        cuts = sum(one != other for one, other in itertools.pairwise(numbers))
        reach = len(run) if cuts >= len({*numbers}) else 1
        for number in {*numbers} - {min(numbers)}:
            earlier = [place for place, other in enumerate(numbers) if other < number]
            for place in (place for place, other in enumerate(numbers) if other == number):
                after = bisect(earlier, place)
                beside = earlier[max(after - 1, 0) : after + 1]
                distance, frame = min((abs(other - place), run[other]) for other in beside)
                if distance <= reach:
                    nearest[run[place]] = frame
    return nearest if len(nearest) >= _LEAST_PAIRS and are_frames(runs) else {}


def numbered_runs(files: Iterable[str], *, by_folder: bool) -> list[list[str]]:
    """Files whose names differ by a number alone, in its order.

    Args:
        files: that are images.
        by_folder: files of two folders are apart.
    """
    named = defaultdict(list)
    for file in files:
        path = Path(file)
        # opening a named pipe would wait for its writer
        if (match := _NUMBERED.fullmatch(path.name)) and path.is_file():
            named[by_folder and path.parent, match[1]].append((int(match[2]), file))
    return [[file for _, file in sorted(run)] for run in named.values() if len(run) > 1]


def are_frames(runs: Iterable[Sequence[str]]) -> bool:
    """Whether the images of :func:`numbered_runs` look like frames of films: neighbours are far
    more alike than others.
    """
    pairs = [pair for run in runs for pair in itertools.pairwise(run)]
    if len(pairs) < _LEAST_PAIRS:
        return False
    pairs = pairs[:: -(-len(pairs) // _MOST_PAIRS)]
    try:
        seen = np.array([[small_grey(file) for file in pair] for pair in pairs])
    except Exception:  # an image that cannot be read is named elsewhere
        return False
    far = np.roll(seen[:, 1], len(pairs) // 2, axis=0)
    alike, others = (np.median(abs(seen[:, 0] - other).mean((1, 2))) for other in (seen[:, 1], far))
    return bool(alike <= _FRAMES * others)


_NUMBERED = re.compile(r"(.*?)(\d+)\.\w+")
_LEAST_PAIRS, _MOST_PAIRS = 8, 24  # of neighbours that are compared
# difference of neighbours, as a share of that of others: 0.07 in a real set of films, and 0.7 to 1
# in five sets of photographs whose names are numbers
_FRAMES = 0.5


def _source(name: str) -> str:
    """The name without Roboflow's addition for a copy."""
    match = _COPY.fullmatch(Path(name).name)
    return match[1] if match else name


def _variants(images: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of an image and a variant by their names, in its folder or of Roboflow."""
    originals: dict[str, str] = {}
    pairs = []
    for name in images:
        place = os.path.splitext(_source(name).replace("\\", "/"))[0]
        other = originals.setdefault(place, name)
        pairs += [(other, name)] if other != name else []
    for place, name in originals.items():
        folder, slash, last = place.rpartition("/")
        if match := _CHANGED.fullmatch(last):
            original = originals.get(folder + slash + (match["a"] or match["b"]))
            pairs += [(original, name)] if original else []
    return pairs


def equal_files(images: Mapping[str, Path]) -> list[list[str]]:
    """Groups of files with the same bytes; of those of one size and with one end all is read."""
    groups = [list(images)]
    for feature in (os.path.getsize, _end, _digest):
        equal: dict[Any, list[str]] = defaultdict(list)
        for number, names in enumerate(groups):
            for name in names:
                with contextlib.suppress(OSError, ValueError):  # it is reported elsewhere
                    if images[name].is_file():  # opening a named pipe would wait for its writer
                        equal[number, feature(images[name])].append(name)
        groups = [names for names in equal.values() if len(names) > 1]
    return groups


def _end(image: Path) -> bytes:
    with image.open("rb") as file:
        file.seek(max(os.path.getsize(image) - _END, 0))
        return file.read()


def _digest(image: Path) -> bytes:
    return hashlib.sha256(image.read_bytes()).digest()
