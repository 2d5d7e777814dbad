"""YOLO's labels: a text file for each image, and a file with the names of the classes."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lambda_det.detection.data.image_folder import images_below, normal, walk
from lambda_det.detection.data.report import CLASS, Report
from lambda_det.errors import DataError, listed
from lambda_det.files import decoded, read_text
from lambda_det.own_data.labels.findings import (
    EMPTY_FILE,
    FAR,
    NO_IMAGE,
    OTHER_LIST,
    POSES,
    SHARED,
    UNREAD,
)
from lambda_det.own_data.labels.images import NamedImages
from lambda_det.own_data.labels.objects import (
    LabelledImage,
    LabelledObject,
    polygon,
    reading,
    size_of,
)
from lambda_det.own_data.labels.table import LISTS
from lambda_det.own_data.part_names import named_part

Listing = Callable[[Path], dict[str, Path]]  # see _text_files
_SLACK = 0.01  # of an image, by which points may lie outside of their box
_OF_POSES = 0.9  # least share of the lines whose points are in their box
_HEAD = 1000  # bytes of a file that show its kind
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def read_yolo(file: Path, images: NamedImages, report: Report) -> Iterator[LabelledImage]:
    """Read the labels of all images; an image without a label file has no object."""
    names, has_points = yolo_names(file), "kpt_shape" in yolo_content(file)
    _find_equal_names(file, names, report)
    listing, home = functools.cache(_text_files), file.parent
    label_files = {
        image: next(_label_files(image, images.folder, home, listing), None)
        for image in images.paths
    }
    if not any(label_files.values()):
        label_files = _far_labels(images, home, report)
    lines = {labels: _lines(labels) for labels in filter(None, label_files.values())}
    if not has_points and _are_poses([words for file in lines.values() for _, words in file]):
        has_points = True
        report.add(POSES, str(file))
    first: dict[Path, Path] = {}  # the image of each label file
    for image in images.paths:
        labels, objects = label_files.get(image), []
        if labels and not lines[labels]:
            report.add(EMPTY_FILE, str(labels))
        elif labels:
            if first.setdefault(labels, image) != image:
                report.add(SHARED, f"{labels}: {first[labels]} and {image}")
            size = np.array(size_of(image))
            for where, words in lines[labels]:
                words = words[:5] if has_points else words  # a box, before points of a pose
                try:
                    objects.append(_object(words, size, names, where))
                except DataError as error:
                    report.add(UNREAD, str(error))
        yield LabelledImage(labels or image, str(image.absolute()), objects)
    _compare_names(file, names, {labels.parent for labels in first}, report)
    for labels in _unused(images.folder, home, {*label_files.values()}, listing):
        report.add(NO_IMAGE, str(labels))


def _lines(labels: Path) -> list[tuple[str, list[str]]]:
    """The place and the words of each line of a label file that has words."""
    # none is a comment: nobody would see that its object is gone
    lines = enumerate(read_text(labels).splitlines(), 1)
    return [(f"{labels}, line {number}", line.split()) for number, line in lines if line.strip()]


def _are_poses(lines: Sequence[Sequence[str]]) -> bool:
    """Whether lines are a class, a box and the points of a pose rather than polygons."""
    # All have as many points, two or more, which lie in the box. By chance the corners of polygons
    # also lie in the box that their first two would make, but are not spread over it.
    try:
        numbers = np.array([words[1:] for words in lines], float)
    except ValueError:  # another number of words in some lines
        return False
    if numbers.ndim < 2 or numbers.shape[1] < 8:
        return False
    centre, sides, rest = numbers[:, None, :2], numbers[:, None, 2:4], numbers[:, 4:]
    is_box = ((sides > 0) & (abs(centre - 0.5) + sides / 2 < 0.5 + _SLACK)).all((1, 2))
    for each in (each for each in (3, 2) if rest.shape[1] % each == 0):
        points = rest.reshape(len(rest), -1, each)
        if each == 3 and not np.isin(points[..., 2], (0, 1, 2)).all():  # its visibility
            continue
        places = points[..., :2]
        is_seen = places.any(-1, keepdims=True)
        is_inside = (abs(places - centre) <= sides / 2 + _SLACK) | ~is_seen
        ends = np.where(is_seen, places, -1).max(1), np.where(is_seen, places, 2).min(1)
        is_spread = (2 * (ends[0] - ends[1]) >= sides[:, 0]).any(1)
        if (is_box & is_inside.all((1, 2)) & is_spread).mean() >= _OF_POSES:
            return True
    return False


def yolo_content(file: Path) -> dict[str, Any]:
    """The content of data.yaml, whose values are texts, lists and dictionaries of texts; of a list
    of names, such as classes.txt, that as ``names``.

    Raises:
        DataError: it cannot be read.
    """
    if file.suffix in (".yaml", ".yml"):
        with reading(file):
            # no numbers, dates, or yes and no: names of classes are what is written
            content = yaml.load(read_text(file), _Loader)
            return content if isinstance(content, dict) else {}
    return {"names": [name.strip() for name in read_text(file).rstrip().splitlines()]}


class _Loader(yaml.BaseLoader):
    """Refuses a key that is written twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        result = super().construct_mapping(node, deep)
        if len(result) < len(node.value):
            keys = [key.value for key, _ in node.value]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.YAMLError(f"the key {twice} stands there twice")
        return result


def yolo_names(file: Path) -> dict[int, str]:
    """The names of the classes by their numbers.

    Raises:
        DataError: there are no names, or they are of another type.
    """
    names = yolo_content(file).get("names")
    if not names or not isinstance(names, (list, dict)):
        raise DataError(f"{file} has no list of names, as YOLO's data.yaml has; add it.")
    with reading(f"{file}: names"):
        pairs = enumerate(names) if isinstance(names, list) else names.items()
        numbered = {int(key): name for key, name in pairs}
        if len(numbered) < len(names):  # as of 0 and 00
            raise ValueError("two have the same number")
    for number, name in numbered.items():
        if not name or not isinstance(name, str):
            raise DataError(f"{file}: the name of class {number} is no text; write one there.")
    return numbered


def _find_equal_names(file: Path, names: dict[int, str], report: Report) -> None:
    """Add the classes that have one name, and become one."""
    for name in dict.fromkeys(names.values()):
        same = [number for number, other in names.items() if other == name]
        if len(same) > 1:
            report.add(CLASS, f"{file}: {name!r} is the name of {listed(same)}, which become one")


def _compare_names(
    file: Path, names: dict[int, str], folders: Iterable[Path], report: Report
) -> None:
    """Look for another list of names, beside this one or the labels, that contradicts it."""
    # labelImg writes classes.txt beside the labels, and it numbers the classes in that order
    places = {file.parent, *folders, *(f.parent for f in folders if f.parent.name == "labels")}
    for path in sorted(place / name for place in places for name in os.listdir(place)):
        if path.name.lower().endswith(LISTS) and is_list_of_names(path):
            for number, other in yolo_names(path).items():
                name = names.get(number, other)
                if name.strip().casefold() != other.strip().casefold():
                    words = f"class {number} is {name!r}, and {other!r} in {path}"
                    report.add(OTHER_LIST, f"{file}: {words}")
                    break


def _far_labels(images: NamedImages, home: Path, report: Report) -> dict[Path, Path]:
    """The only label file of the name of each image below the data, in its part or in none."""
    root = Path(os.path.commonpath([images.folder.absolute(), home.absolute()]))
    named: dict[str, set[Path]] = {}
    for path in (*walk(images.folder), *walk(home)):
        if looks_like_labels(path) or (path.suffix.lower() == ".txt" and not _head(path).strip()):
            named.setdefault(normal(path.stem), set()).add(path.absolute())
    found = {}
    for image in images.paths:
        parts = ("", named_part(image.absolute().parent, root))
        own = named.get(normal(image.stem), set())
        own = sorted(path for path in own if named_part(path.parent, root) in parts)
        if len(own) > 1:
            raise DataError(
                f"{image} has {len(own)} files of labels, {listed(own)}; remove those that do not "
                "count, or name the folder of those that do, with their classes.txt: --train "
                f'"{own[0].parent}" --images "{image.parent}".'
            )
        if own:
            found[image] = own[0]
            report.add(FAR, f"{own[0]}: {image}")
    return found


def _label_files(image: Path, images: Path, home: Path, listing: Listing) -> Iterator[Path]:
    """The label files of an image: in labels/ for images/ or labels_1/ for images_1/, beside it,
    and beside the names.
    """
    folder = image.absolute().parent
    beside_names = (home / image.relative_to(images)).absolute().parent
    places = [*_among_labels(folder), folder, beside_names]
    if not folder.is_relative_to(home.absolute()):  # as of corrected labels, which are named
        places.insert(0, beside_names)
    for place in places:
        if labels := listing(place).get(normal(image.stem)):
            yield labels


def _among_labels(folder: Path) -> list[Path]:
    """The folder with labels in place of its last images: as a whole name, and within any name."""
    path = folder.absolute().as_posix()
    return [Path(re.sub(old, r"\1labels", path)) for old in ("(.*/)images(?=/|$)", "(.*)images")]


def _text_files(folder: Path) -> dict[str, Path]:
    """The files .txt of a folder by their names without ending, in the normal form of Unicode."""
    if not folder.is_dir():
        return {}
    # Where there are both, a.txt comes after a.TXT and counts
    files = (folder / name for name in sorted(os.listdir(folder)))
    return {normal(file.stem): file for file in files if file.suffix.lower() == ".txt"}


def _unused(folder: Path, home: Path, used: set[Path | None], listing: Listing) -> Iterator[Path]:
    """The label files without an image below a folder, and beside those that are in use."""
    beside = {labels.parent for labels in filter(None, used)}
    # a folder may have the labels of other parts as well
    images = {normal(image.stem) for place in {folder, home} for image in images_below(place)}
    for image in images_below(folder):
        used.update(_label_files(image, folder, home, listing))
    files = [pair for place in beside for pair in listing(place).items()]
    below = [*walk(folder), *(file for name, file in files if name not in images)]
    for among in filter(Path.is_dir, {*_among_labels(folder)} - {folder.absolute()}):
        below += walk(among)
    for path in dict.fromkeys(path.absolute() for path in below):
        if path not in used and looks_like_labels(path):
            yield path


def looks_like_labels(file: Path) -> bool:
    """Whether it is a text whose first line with words is an object: a number and four or more."""
    if file.suffix.lower() != ".txt":
        return False
    words = next(filter(None, map(str.split, _head(file).splitlines())), [])
    return len(words) > 4 and all(map(_NUMBER.fullmatch, words[:5]))


def is_list_of_names(file: Path) -> bool:
    """Whether a text file may be a list of the names of classes: some short lines of words."""
    text = _head(file)
    lines = list(filter(None, map(str.strip, text.splitlines())))
    return len(lines) > 0 and len(text) <= _HEAD and all(len(line.split()) <= 4 for line in lines)


def _head(file: Path) -> str:
    """The first bytes of a file, one more than a list of names may have."""
    with file.open("rb") as opened:
        return decoded(opened.read(_HEAD + 1))


def _object(
    words: list[str], size: np.ndarray, names: dict[int, str], where: str
) -> LabelledObject:
    with reading(where, "correct it"):
        number, numbers = float(words[0]), np.array(words[1:], float)
        if not np.isfinite(numbers).all():
            raise ValueError("its numbers are not finite")
    if number not in names:
        raise DataError(f"{where}: class {words[0]} is not among the {len(names)} names.")
    name = names[int(number)]
    if len(numbers) == 4:
        centre, sides = numbers[:2] * size, numbers[2:] * size
        box = (*(centre - sides / 2).tolist(), *(centre + sides / 2).tolist())
        return LabelledObject(name, box, where=where)
    if len(numbers) < 6 or len(numbers) % 2:
        raise DataError(
            f"{where}: a class and {len(numbers)} numbers; a box has 4, a polygon two for each of "
            "its corners, which are 3 at least, and a pose a box and the points that kpt_shape of "
            "data.yaml counts."
        )
    return polygon(name, numbers.reshape(-1, 2) * size)._replace(where=where)
