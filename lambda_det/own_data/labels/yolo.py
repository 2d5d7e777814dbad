"""YOLO's labels: a text file for each image, and a file with the names of the classes."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lambda_det.detection.data.image_folder import SUFFIXES, normal, walk
from lambda_det.detection.data.report import CLASS
from lambda_det.errors import DataError, listed
from lambda_det.files import decoded, read_text
from lambda_det.own_data.labels.findings import (
    COUNT,
    FAR,
    NO_FILE,
    NO_IMAGE,
    OTHER_LIST,
    POSES,
    SHARED,
    Findings,
)
from lambda_det.own_data.labels.images import NamedImages
from lambda_det.own_data.labels.objects import (
    LabelledImage,
    LabelledObject,
    polygon,
    reading,
    size_of,
)
from lambda_det.own_data.part_names import named_part

__all__ = [
    "has_labels",
    "is_list_of_names",
    "looks_like_labels",
    "read_yolo",
    "yolo_content",
    "yolo_names",
]

Listing = Callable[[Path], dict[str, Path]]  # see _text_files
_NAMING = ("classes.txt", ".names", ".yaml", ".yml")  # ends of the names of lists of classes
_HEAD = 1000  # bytes of a file that show its kind
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


class _Loader(yaml.SafeLoader):
    """Refuses merge keys, whose nested aliases grow without limit."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.YAMLError("it has a merge key, <<")
        super().flatten_mapping(node)


def read_yolo(file: Path, images: NamedImages, findings: Findings) -> Iterator[LabelledImage]:
    """Read the labels of all images; an image without a label file has no object."""
    names, has_points = yolo_names(file), "kpt_shape" in yolo_content(file)
    _count_names(file, names, findings)
    label_files, are_far = _label_files(images, file.parent)
    if not has_points and _are_poses(dict.fromkeys(filter(None, label_files.values()))):
        has_points = True
        findings.add(POSES, str(file))
    first: dict[Path, Path] = {}  # the image of each label file
    for image in images.paths:
        labels = label_files.get(image)
        objects = []
        if not labels:
            findings.add(NO_FILE, str(image))
        else:
            if are_far:
                findings.add(FAR, f"{labels}: {image}")
            if first.setdefault(labels, image) != image:
                findings.add(SHARED, f"{labels}: {first[labels]} and {image}")
            size = np.array(size_of(image))
            for number, words in _lines(labels):
                # a box, and the points of a pose
                words = words[:5] if has_points else words
                objects.append(_object(words, size, names, f"{labels}, line {number}"))
        yield LabelledImage(labels or image, str(image.absolute()), objects)
    _compare_names(file, names, {labels.parent for labels in first}, findings)
    for labels, reason in _unused(images.folder, file.parent, label_files.values()):
        findings.add(NO_IMAGE, f"{labels}{reason}")


def _lines(labels: Path) -> Iterator[tuple[int, list[str]]]:
    """The lines of a label file that have words: the number of the line, and its words."""
    for number, line in enumerate(read_text(labels).splitlines(), 1):
        if words := line.split():
            yield number, words


def _are_poses(label_files: Iterable[Path]) -> bool:
    """Whether each line is a class, a box and the points of a pose, and not a polygon.

    Then all have the same number of words, and the points lie in the boxes. A point may have a
    third number, its visibility, which is 0, 1 or 2. Without it, a box with one point, and fewer
    lines than ``_LEAST_POSES``, may as well be polygons, and are taken for them.
    """
    lines: list[list[str]] = []
    for labels in label_files:
        for _, words in _lines(labels):
            if len(words) < 8 or len(words) != len((lines or [words])[0]):
                return False
            lines.append(words)
    try:
        numbers = np.array([words[1:] for words in lines], float).reshape(len(lines), -1)
    except ValueError:
        return False
    return len(lines) > 0 and (_have_points(numbers, 3) or _have_points(numbers, 2))


_LEAST_POSES = 4
_OF_POSES = 0.9  # least share of the lines whose points are in their box


def _have_points(numbers: np.ndarray, each: int) -> bool:
    """Whether lines [N, 4 + K * each] are boxes with K points of 2 or 3 numbers each."""
    if (numbers.shape[1] - 4) % each:
        return False
    centre, sides = numbers[:, None, :2], numbers[:, None, 2:4]
    points = numbers[:, 4:].reshape(len(numbers), -1, each)
    if each == 3 and not np.isin(points[..., 2], (0, 1, 2)).all():
        return False
    places = points[..., :2]
    seen = places.any(-1, keepdims=True)
    seen = seen & (points[..., 2:] > 0) if each == 3 else seen
    slack = 0.01  # of the image
    fit = (sides > 0) & (centre - sides / 2 > -slack) & (centre + sides / 2 < 1 + slack)
    fit = fit & ((abs(places - centre) <= sides / 2 + slack) | ~seen)
    fits = fit.all((1, 2))
    if each == 2:
        # the points of a pose are spread over its box; it is by chance that corners of a polygon
        # lie in the box that its first two would make, and then close together
        spread = np.where(seen, places, -np.inf).max(1) - np.where(seen, places, np.inf).min(1)
        fits &= (2 * spread >= sides[:, 0]).any(1) & (len(numbers) >= _LEAST_POSES)
    return bool(fits.mean() >= _OF_POSES)


def yolo_content(file: Path) -> dict[str, Any]:
    """The content of data.yaml; or a list of names, such as classes.txt, with the parts of a
    ``.data`` file of Darknet beside it.

    Raises:
        DataError: it cannot be read.
    """
    if file.suffix in (".yaml", ".yml"):
        with reading(file):
            text = read_text(file)
            content = yaml.load(text, _Loader)
            if not isinstance(content, dict):
                return {}
            if "names" in content:
                # the last of equal keys counts, as for the loader
                nodes = {key.value: value for key, value in yaml.compose(text, _Loader).value}
                content["names"] = _as_written(content["names"], nodes["names"])
            return content
    content: dict[str, Any] = {}
    for beside in sorted(file.parent.glob("*.data")):
        lines = (line.partition("=") for line in read_text(beside).splitlines())
        content |= {key.strip(): value.strip() for key, sign, value in lines if sign}
    return {**content, "names": [n.strip() for n in read_text(file).rstrip().splitlines()]}


def _as_written(names: Any, node: yaml.Node) -> Any:
    """Names of classes, with the text of those that YAML takes for numbers, dates or yes and no.

    Args:
        names: as YAML has them: a list, or a dictionary by number.
        node: the same as it is written.

    Raises:
        ValueError: a number stands there twice.
    """

    def text_of(name: Any, written: yaml.Node) -> Any:
        return written.value if isinstance(written, yaml.ScalarNode) and name is not None else name

    if isinstance(names, list):
        return list(map(text_of, names, node.value))
    if isinstance(names, dict):
        if len(names) < len(node.value):
            raise ValueError("two of its names have the same key")
        pairs = zip(names.items(), node.value, strict=True)
        return {key: text_of(name, written) for (key, name), (_, written) in pairs}
    return names


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
        if len(numbered) < len(names):  # as of 0 and "0"
            raise ValueError("two have the same number")
    for number, name in numbered.items():
        # the text of nested aliases can exceed any memory
        if isinstance(name, (list, dict, set, tuple)) or name is None:
            kind = "nothing" if name is None else f"a {type(name).__name__}"
            raise DataError(f"{file}: the name of class {number} is {kind}; write a text there.")
    return {number: str(name) for number, name in numbered.items()}


def _count_names(file: Path, names: dict[int, str], findings: Findings) -> None:
    """Add the doubts about the names of the classes."""
    numbers: dict[str, list[int]] = {}
    for number, name in names.items():
        numbers.setdefault(name, []).append(number)
    for name, same in numbers.items():
        if len(same) > 1:
            findings.add(CLASS, f"{file}: {name!r} is the name of {listed(same)}, which become one")
    count = yolo_content(file).get("nc")
    if isinstance(count, int) and count != len(names):
        findings.add(COUNT, f"{file}: nc is {count}, and there are {len(names)} names")


def _compare_names(
    file: Path, names: dict[int, str], folders: Iterable[Path], findings: Findings
) -> None:
    """Look for another list of names, beside this one or the labels, that contradicts it.

    labelImg writes classes.txt beside the labels, and it numbers the classes in that order.
    """
    places = {file.parent, *folders}
    places |= {f.parent for f in folders if "labels" in (f.name, f.parent.name)}
    lists = [place / name for place in places for name in os.listdir(place)]
    for path in sorted(path for path in lists if path.name.lower().endswith(_NAMING)):
        others = _names_in(path)
        for number in sorted(names.keys() & others.keys()):
            if names[number].strip().casefold() != others[number].strip().casefold():
                words = f"class {number} is {names[number]!r}, and {others[number]!r} in {path}"
                findings.add(OTHER_LIST, f"{file}: {words}")
                break


def _names_in(file: Path) -> dict[int, str]:
    """The names in a file that may be a list of them; {} where it is none."""
    is_yaml = file.suffix.lower() in (".yaml", ".yml")
    with contextlib.suppress(DataError, OSError):
        if is_yaml or is_list_of_names(file):
            return yolo_names(file)
    return {}


def has_labels(image: Path) -> bool:
    """Whether an image has a label file in one of the places where all tools look for it."""
    return _label_file(image, image, _text_files) is not None


def _label_files(images: NamedImages, home: Path) -> tuple[dict[Path, Path], bool]:
    """The label file of each image that has one, and whether they are far from the images.

    They are in the places where all tools look for them. Where no image has one there, it is the
    only one of the image's name that lies below the folders of images and names, and belongs to
    no other image. Where some images have, the others are background: a file of their name
    elsewhere may be a prediction.

    Args:
        images: of the data set.
        home: the folder of the list of names.

    Raises:
        DataError: there are several of an image's name.
    """
    listing = functools.cache(_text_files)
    found: dict[Path, Path] = {}
    for image in images.paths:
        name = image.relative_to(images.folder).as_posix()
        if labels := _label_file(image, home / name, listing):
            found[image] = labels
    if found:
        return found, False
    return _elsewhere(images.paths, images.folder, home), True


def _elsewhere(images: Iterable[Path], folder: Path, home: Path) -> dict[Path, Path]:
    """The label files of images that have none in the usual places, see :func:`_label_files`."""
    listing = functools.cache(_text_files)
    root = Path(os.path.commonpath([folder.absolute(), home.absolute()]))
    there = dict.fromkeys(path.absolute() for path in (*walk(folder), *walk(home)))
    # An image of another part may have the same name, and labels in a usual place
    others = [path for path in there if path.suffix.lower() in SUFFIXES]
    taken = {_label_file(path, path, listing) for path in others}
    named: dict[str, list[Path]] = {}
    for path in there:
        is_text = path.suffix == ".txt" and path not in taken
        if is_text and looks_like_labels(path):
            named.setdefault(normal(path.stem), []).append(path)
    claimed: dict[Path, list[Path]] = {}
    for image in images:
        part = named_part(image.absolute().parent, root)
        candidates = [
            path
            for path in named.get(normal(image.stem), ())
            if named_part(path.parent, root) in ("", part)
        ]
        # labels of the same part come before labels of no part
        own = [path for path in candidates if named_part(path.parent, root) == part]
        candidates = own or candidates
        if len(candidates) > 1:
            raise DataError(
                f"{image} has {len(candidates)} files of labels, {listed(candidates)}; remove "
                "those that do not count, or name the folder of those that do, with their "
                f'classes.txt: --train "{candidates[0].parent}" --images "{image.parent}".'
            )
        for path in candidates:
            claimed.setdefault(path, []).append(image)
    return {claims[0]: path for path, claims in claimed.items() if len(claims) == 1}


def _label_file(image: Path, beside_names: Path, listing: Listing) -> Path | None:
    for place in _places(image, beside_names):
        if labels := listing(place.parent).get(normal(place.stem)):
            return labels
    return None


def _places(image: Path, beside_names: Path) -> tuple[Path, Path, Path]:
    """The places of a label file: labels/ where the path of an image has images/, beside it, or
    beside the names.
    """
    return _among_labels(image), image.absolute(), beside_names.absolute()


def _among_labels(path: Path) -> Path:
    """The path with labels/ in place of its last images/."""
    names = list(path.absolute().parts)
    if "images" in names:
        names[len(names) - 1 - names[::-1].index("images")] = "labels"
    return Path(*names)


def _text_files(folder: Path) -> dict[str, Path]:
    """The files .txt of a folder by their names without ending, in the normal form of Unicode."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(".txt")]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {normal(name.removesuffix(".txt")): folder / name for name in names}


def _unused(folder: Path, home: Path, of_images: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """The label files without an image below a folder, with what is in the image's place."""
    listing = functools.cache(_text_files)
    below = list(walk(folder))
    labels_folder = _among_labels(folder)
    if labels_folder != folder.absolute() and labels_folder.is_dir():
        below += walk(labels_folder)
    used, others = {path.absolute() for path in of_images}, {}
    for path in below:
        if path.suffix.lower() in SUFFIXES:
            places = _places(path, home / path.relative_to(folder))
            used.update(listing(place.parent).get(normal(place.stem)) for place in places)
        elif path.suffix.lower() != ".txt":
            others.update((normal(str(p.with_suffix(""))), path.name) for p in _places(path, path))
    for path in below:
        if (
            path.suffix.lower() == ".txt"
            and path.absolute() not in used
            and looks_like_labels(path)
        ):
            other = others.get(normal(str(path.with_suffix("").absolute())))
            yield path, f", beside {other}" if other else ""


def looks_like_labels(file: Path) -> bool:
    """Whether the first line with words is an object: a number and at least four more."""
    with file.open("rb") as opened:
        lines = decoded(opened.read(_HEAD)).splitlines()
    words = next(filter(None, map(str.split, lines)), [])
    return len(words) > 4 and all(map(_NUMBER.fullmatch, words[:5]))


def is_list_of_names(file: Path) -> bool:
    """Whether a text file may be a list of the names of classes: some short lines of words."""
    with file.open("rb") as opened:
        lines = decoded(opened.read(_HEAD + 1))
    words = list(filter(None, map(str.strip, lines.splitlines())))
    return len(words) > 0 and len(lines) <= _HEAD and all(len(w.split()) <= 4 for w in words)


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
            f"{where}: a class and {len(numbers)} numbers; a box has 4, and a polygon two for each "
            "of its corners, which are 3 at least."
        )
    return polygon(name, numbers.reshape(-1, 2) * size)._replace(where=where)
