"""Labels as annotation tools write them, read into COCO's format.

YOLO (boxes, polygons and rotated boxes), Pascal VOC, LabelMe, VIA and CVAT's XML for images. A
format is recognised by what lies in the folder. The readers are ours: labelformat 0.1.17 has none
for LabelMe and VIA, needs the class names of Pascal VOC beforehand, and reads only the boxes of
CVAT. Each object keeps its file and line, which messages then name.
"""

from __future__ import annotations

import base64
import io
import logging
import math
import os
import re
from codecs import BOM_UTF8
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree
from xml.parsers import expat

import numpy as np
import pycocotools.mask
import yaml
from PIL import Image

from lambda_det.detection.data.coco_format import keep_json, read_json
from lambda_det.detection.data.picture_folder import PictureFolder
from lambda_det.detection.data.records import upright_size
from lambda_det.detection.data.truth import area_of, rectangle
from lambda_det.errors import DataError, listed, printable, refused

__all__ = ["COCO", "FORMATS", "as_coco", "read_labels", "recognise", "refuse_address"]

logger = logging.getLogger(__name__)

COCO = "COCO"
_CIRCLE = 32  # corners of the polygon that takes a circle's place
_IGNORED = "__ignore__"  # no class: LabelMe's own exporters leave it out


class Thing(NamedTuple):
    """An object: its class, its box (x0, y0, x1, y1) in pixels, and polygons or run-lengths.

    ``where`` is its place: a file, and what in it.
    """

    label: str
    box: tuple[float, float, float, float]
    mask: list[list[float]] | dict[str, Any] | None = None
    where: str = ""


class Labelled(NamedTuple):
    """A picture: the file of its labels, its name there, its objects, and a part it belongs to."""

    source: Path
    picture: str
    things: list[Thing]
    subset: str = ""


class _Pictures(PictureFolder):
    """The pictures below a folder, or those that a list names.

    Attributes:
        left_out: where shapes were that no box or mask can be made of, by their kind.
    """

    def __init__(
        self, folder: Path, list_file: Path | None = None, paths: Iterable[Path] | None = None
    ) -> None:
        if not folder.is_dir():
            raise DataError(f"There is no image folder {folder}; name it with --images.")
        super().__init__(folder, paths)
        self.left_out: dict[str, list[str]] = defaultdict(list)
        if list_file:
            lines = enumerate(map(str.strip, _text(list_file).splitlines()), 1)
            named = {f"{list_file}, line {n}": t for n, t in lines if t[:1] not in ("", "#")}
            self.paths = [self.find(where, list_file.parent, named[where]) for where in named]

    def find(self, where: str, home: Path, *names: str) -> Path:
        """The picture of the first name that is there; of a path, its last parts do as well.

        Args:
            where: what names it, for messages.
            home: the folder of the file that names it.
            names: as labels have them, which may be paths of another machine.

        Raises:
            DataError: there is none, or there are several.
        """
        beside = {Path(os.path.normpath(home / name)) for name in names}
        for name in names:
            end, pictures = self.named(name)
            if len(pictures) > 1:  # such as drawings of Pascal VOC's labels
                own = {path for path in pictures if path.parent.name == "JPEGImages"}
                pictures = pictures & beside or own or pictures
            if len(pictures) > 1:
                raise DataError(
                    f"{where}: {len(pictures)} pictures below {self.folder} are named "
                    f"{printable(end)}; name the folder of these labels' pictures."
                )
            if pictures:
                return pictures.pop()
        raise DataError(
            f"{where}: its picture {printable(names[0])!r} is not below {self.folder}; name the "
            "folder of the pictures with --images."
        )


def _reading(what: object, advice: str = "write it again") -> AbstractContextManager[None]:
    """Errors of what the libraries and we make of a file, as one that names it."""
    return refused(DataError, f"{what} cannot be read", advice, *_ERRORS)


_ERRORS = (
    *(AttributeError, LookupError, OSError, TypeError, ValueError),
    *(expat.ExpatError, yaml.YAMLError, Image.DecompressionBombError),
)


def _text(file: Path) -> str:
    with _reading(file):
        return file.read_text("utf-8-sig")


def _size(picture: Path) -> tuple[int, int]:
    """Width and height of a picture, upright as training and annotation tools show it."""
    with _reading(picture, "remove or mend it"), Image.open(picture) as image:
        return upright_size(image)


def _around(points: np.ndarray) -> tuple[float, float, float, float]:
    return (*points.min(0).tolist(), *points.max(0).tolist())


def _area(thing: Thing) -> float:
    """Of the mask where there is one, as COCO has it."""
    if isinstance(thing.mask, dict):
        return float(pycocotools.mask.area(thing.mask))
    return sum(map(area_of, thing.mask or ())) or area_of(rectangle(*thing.box))


def _polygon(label: str, points: Iterable[Iterable[float]]) -> Thing:
    corners = np.array(list(points), float).reshape(-1, 2)
    return Thing(label, _around(corners), [corners.ravel().tolist()])


def _of_mask(label: str, mask: np.ndarray) -> Thing | None:
    """The object of a mask [H, W]; None if it is empty."""
    rows, columns = np.nonzero(mask)
    if not len(rows):
        return None
    runs = pycocotools.mask.encode(np.asfortranarray(mask, np.uint8))
    box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    return Thing(label, tuple(map(float, box)), {**runs, "counts": runs["counts"].decode()})


# --------------------------------------------------------------------------------------- Pascal VOC
def _xml(file: Path) -> ElementTree.Element:
    """The root of a file, in which each element knows its line."""
    builder, parser = ElementTree.TreeBuilder(), expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = lambda tag, values: builder.start(
        tag, {**values, _LINE: str(parser.CurrentLineNumber)}
    )
    parser.EndElementHandler, parser.CharacterDataHandler = builder.end, builder.data
    with _reading(file):
        parser.Parse(file.read_bytes(), True)
        return builder.close()


_LINE = " line"  # no attribute has a space in its name


def _read_voc(file: Path, _: _Pictures) -> Iterator[Labelled]:
    """Corners count as they are written: today's tools do not add the one of the VOC devkit."""
    root, things = _xml(file), []
    for node in root.iter("object"):
        where = f"{file}, line {node.get(_LINE)}"
        with _reading(f"{where}: an object", "it needs a name and a bndbox of four numbers"):
            corners = tuple(
                float(node.find(f"bndbox/{side}").text) for side in ("xmin", "ymin", "xmax", "ymax")
            )
            things.append(Thing(node.find("name").text.strip(), corners, where=where))
    yield Labelled(file, root.findtext("filename") or file.stem, things)


# --------------------------------------------------------------------------------------------- CVAT
def _read_cvat(file: Path, pictures: _Pictures) -> Iterator[Labelled]:
    nodes = list(_xml(file).iter("image"))
    if not nodes:
        raise DataError(f"{file} has no image; export it as CVAT for images 1.1, not for video.")
    for node in nodes:
        things = []
        for shape in node:
            where = f"{file}, line {shape.get(_LINE)}"
            with _reading(f"{where}: a {shape.tag}", "export it again as CVAT for images 1.1"):
                thing = _cvat_shape(shape, node)
            if thing:
                things.append(thing._replace(where=where))
            else:
                pictures.left_out[shape.tag].append(where)
        yield Labelled(file, node.get("name", ""), things, node.get("subset", ""))


def _cvat_shape(shape: ElementTree.Element, picture: ElementTree.Element) -> Thing | None:
    value = shape.attrib
    if shape.tag == "box":
        left, top, right, bottom = (float(value[key]) for key in ("xtl", "ytl", "xbr", "ybr"))
        angle = math.radians(float(value.get("rotation", 0)))
        if not angle:
            return Thing(value["label"], (left, top, right, bottom))
        turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        corners = np.reshape(rectangle(left, top, right, bottom), (-1, 2))
        return _polygon(value["label"], (corners - corners.mean(0)) @ turn + corners.mean(0))
    if shape.tag == "polygon":
        return _polygon(value["label"], (p.split(",") for p in value["points"].split(";")))
    if shape.tag == "mask":  # runs of a part of the image, row by row, from zeros on
        left, top, width, height = (int(value[key]) for key in ("left", "top", "width", "height"))
        runs = [int(run) for run in value["rle"].split(",")]
        part = np.repeat(np.arange(len(runs)) % 2, runs).reshape(height, width)
        mask = np.zeros((int(picture.get("height")), int(picture.get("width"))), np.uint8)
        mask[top : top + height, left : left + width] = part
        return _of_mask(value["label"], mask)
    return None


# ------------------------------------------------------------------------------------------ LabelMe
def _read_labelme(file: Path, pictures: _Pictures) -> Iterator[Labelled]:
    content = read_json(str(file))
    picture, shapes = str(content.get("imagePath") or file.stem), content.get("shapes") or []
    if not isinstance(shapes, list):
        raise DataError(f"{file} has no list of shapes; write it again.")
    yield Labelled(file, picture, _shapes(file, picture, shapes, pictures))


def _shapes(
    file: Path,
    picture: str,
    shapes: Iterable[Any],
    pictures: _Pictures,
    place: str = "",
    convert: Callable[[Any], dict[str, Any]] = dict,
) -> list[Thing]:
    """The objects of shapes, each of which ``convert`` makes one of LabelMe's."""
    groups: dict[Any, list[Thing]] = {}
    for number, shape in enumerate(shapes):
        where = f"{file}: {place}shape {number}"
        with _reading(where):
            shape = convert(shape)
            points = np.array(shape["points"], float).reshape(-1, 2)
            label = str(shape["label"])
            kind = label if label == _IGNORED else shape.get("shape_type", "polygon")
            if kind == "rectangle":
                thing = Thing(label, _around(points))
            elif kind == "circle":
                radius = np.hypot(*(points[1] - points[0]))
                thing = _polygon(label, _ellipse(points[0], radius, radius))
            elif kind == "mask":  # a PNG of a part of the image
                part = np.array(Image.open(io.BytesIO(base64.b64decode(shape["mask"])))) > 0
                mask = Image.new("1", _size(pictures.find(where, file.parent, picture)))
                mask.paste(Image.fromarray(part), tuple(points[0].round().astype(int).tolist()))
                thing = _of_mask(label, np.array(mask))
            elif kind in ("polygon", "rotation"):  # X-AnyLabeling's turned boxes
                thing = _polygon(label, points)
            else:
                thing = None
        if thing is None:
            pictures.left_out[kind].append(where)
            continue
        group = shape.get("group_id")  # polygons of one object
        alone = group is None or isinstance(thing.mask, dict)
        key = number if alone else (label, str(group))
        groups.setdefault(key, []).append(thing._replace(where=where))
    return list(map(_joined, groups.values()))


def _ellipse(centre: Iterable[float], rx: float, ry: float, angle: float = 0.0) -> np.ndarray:
    """Corners [_CIRCLE, 2] of an ellipse that is turned by an angle in radians, clockwise."""
    turn = np.linspace(0, 2 * np.pi, _CIRCLE, endpoint=False)
    ring = (rx * np.cos(turn) + 1j * ry * np.sin(turn)) * np.exp(1j * angle)
    return np.c_[ring.real, ring.imag] + centre


def _joined(parts: list[Thing]) -> Thing:
    if len(parts) == 1:
        return parts[0]
    corners = np.array([part.box for part in parts]).reshape(-1, 2)
    masks = [part.mask for part in parts]
    polygons = [part for mask in masks for part in mask] if all(masks) else None
    return parts[0]._replace(box=_around(corners), mask=polygons)


# ---------------------------------------------------------------------------------------------- VIA
def _read_via(file: Path, pictures: _Pictures) -> Iterator[Labelled]:
    """A file for all pictures of a folder, or a project."""
    content = read_json(str(file))
    with _reading(file, "export it again as JSON"):
        entries = [
            (str(one["filename"]), list(r.values() if isinstance(r := one["regions"], dict) else r))
            for one in content.get("_via_img_metadata", content).values()
        ]
    for name, regions in entries:
        things = _shapes(file, name, regions, pictures, f"{name}, ", _of_region)
        yield Labelled(file, name, things)


def _of_region(region: dict[str, Any]) -> dict[str, Any]:
    """A shape of LabelMe's. Its class is the first attribute that has a value, or "object"."""
    shape, label = region["shape_attributes"], "object"
    for value in reversed(list((region.get("region_attributes") or {}).values())):
        if isinstance(value, dict):  # a box to tick for each class
            value = next((key for key, is_ticked in value.items() if is_ticked), "")
        label = str(value or "").strip() or label
    kind, columns = shape["name"], (shape.get(f"all_points_{x}", ()) for x in "xy")
    points = list(zip(*columns, strict=True))
    if kind == "rect":
        x, y = shape["x"], shape["y"]
        kind, points = "rectangle", [[x, y], [x + shape["width"], y + shape["height"]]]
    elif kind in ("circle", "ellipse"):
        kind, radii = "polygon", (shape.get(f"r{x}", shape.get("r")) for x in "xy")
        points = _ellipse((shape["cx"], shape["cy"]), *radii, shape.get("theta", 0))
    return {"label": label, "points": points, "shape_type": kind}


# --------------------------------------------------------------------------------------------- YOLO
def _read_yolo(file: Path, pictures: _Pictures) -> Iterator[Labelled]:
    names, has_points = _yolo_names(file), "kpt_shape" in yolo_content(file)
    for picture in pictures.paths:
        name = picture.relative_to(pictures.folder)
        labels = yolo_file(picture, file.parent / name)
        lines = _text(labels).splitlines() if labels.is_file() else []
        size = np.array(_size(picture))
        things = []
        for number, line in enumerate(lines, 1):
            if words := line.split():
                # A box and the points of its pose
                words = words[:5] if has_points else words
                things.append(_yolo_line(words, size, names, f"{labels}, line {number}"))
        yield Labelled(labels, name.as_posix(), things)


def yolo_content(file: Path) -> dict[str, Any]:
    """What data.yaml says; of a list of names, such as classes.txt, only them.

    Raises:
        DataError: it cannot be read.
    """
    if file.suffix not in (".yaml", ".yml"):
        return {"names": [line.strip() for line in _text(file).rstrip().splitlines()]}
    with _reading(file):
        content = yaml.safe_load(_text(file))
    return content if isinstance(content, dict) else {}


def _yolo_names(file: Path) -> dict[int, str]:
    names = yolo_content(file).get("names")
    if not names or not isinstance(names, (list, dict)):
        raise DataError(f"{file} has no list of names, as YOLO's data.yaml has; add it.")
    with _reading(f"{file}: names"):
        pairs = enumerate(names) if isinstance(names, list) else names.items()
        return {int(key): name for key, name in pairs}


def yolo_file(picture: Path, beside_names: Path) -> Path:
    """In labels/ where the path of a picture has images/, beside it, or beside the names."""
    parts = list(picture.absolute().parts)
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    places = [path.with_suffix(".txt") for path in (Path(*parts), picture, beside_names)]
    return next(filter(Path.is_file, places), places[1])


def _yolo_line(words: list[str], size: np.ndarray, names: dict[int, str], where: str) -> Thing:
    with _reading(where, "correct it"):
        label, numbers = int(words[0]), np.array(words[1:], float)
        if not np.isfinite(numbers).all():
            raise ValueError("its numbers are not finite")
    if label not in names:
        raise DataError(f"{where}: class {label} is not among the {len(names)} names.")
    name = str(names[label])
    if len(numbers) == 4:
        centre, sides = numbers[:2] * size, numbers[2:] * size
        box = (*(centre - sides / 2).tolist(), *(centre + sides / 2).tolist())
        return Thing(name, box, where=where)
    if len(numbers) < 6 or len(numbers) % 2:
        raise DataError(
            f"{where}: a class and {len(numbers)} numbers; a box has 4, and a polygon two for each "
            "of its corners, which are 3 at least."
        )
    return _polygon(name, numbers.reshape(-1, 2) * size)._replace(where=where)


# ------------------------------------------------------------------------------------------ formats
def _begins(file: Path, pattern: str) -> bool:
    """Whether a pattern is in the first part of a file, which may be large or broken."""
    with _reading(file, "make it readable"), file.open("rb") as opened:
        return bool(
            re.search(pattern.encode(), opened.read(_HEAD).removeprefix(BOM_UTF8), re.MULTILINE)
        )


_HEAD = 2**16  # bytes
_VIA = "via_region_data.json"  # beside which others are copies


class Format(NamedTuple):
    """A row of the table of formats.

    Attributes:
        patterns: of the files of labels in a folder.
        sign: what such a file begins with, as a regular expression.
        read: the pictures with their objects; None for COCO's own.
    """

    patterns: tuple[str, ...]
    sign: str
    read: Callable[[Path, _Pictures], Iterator[Labelled]] | None


# Names, or as the older ones their number with a part: train alone is in files of other programs
_YOLO = r"^[\"']?names[\"']?\s*:|\A(?=[^\0]*^nc\s*:)[^\0]*^train\s*:"
FORMATS = {
    "YOLO": Format(("*.yaml", "*.yml"), _YOLO, _read_yolo),
    COCO: Format(("*.json",), r'\A\s*{[^\0]*"(images|annotations)"\s*:', None),
    "CVAT": Format(("*.xml",), r"<annotations\b", _read_cvat),
    "Pascal VOC": Format(("*.xml",), r"<annotation\b", _read_voc),
    "LabelMe": Format(("*.json",), r'"shapes"\s*:', _read_labelme),
    "YOLO with a list of names": Format(("classes.txt", "obj.names"), "", _read_yolo),
    "VIA": Format(("*.json",), r'"(_via_settings|file_attributes)"\s*:', _read_via),
}


def recognise(place: Path) -> tuple[str, list[Path]]:
    """The format of a file or folder, and its files of labels.

    Raises:
        DataError: nothing there is of a known format.
    """
    refuse_address(place)
    if not place.exists():
        raise DataError(f"There is no file or folder of labels {place}.")
    there = sorted(filter(Path.is_file, place.rglob("*"))) if place.is_dir() else [place]
    for name, row in FORMATS.items():
        # A file that is named counts by its content, whatever its ending is
        by_content = place.is_file() and row.sign
        files = [path for path in there if by_content or any(map(path.match, row.patterns))]
        if files := [path for path in files if _begins(path, row.sign)]:
            folders = {path.parent for path in files if path.name == _VIA}
            kept = [path for path in files if path.name == _VIA or path.parent not in folders]
            return name, [path for path in files if path.name == "data.yaml"] or kept
    if place.is_file() and place.suffix not in (".xml", ".yaml", ".yml"):
        return COCO, [place]  # whose own reader says what is wrong with it
    raise DataError(f"{place} holds no labels of a known format: {', '.join(FORMATS)}.")


def refuse_address(place: str | Path) -> None:
    """
    Raises:
        DataError: it is an address, and no file or folder.
    """
    if re.match(r"\w{2,}:/", str(place)):
        raise DataError(
            f"{place} is an address, and data to train or evaluate on have to be files here: copy "
            "them, as aws s3 sync and gcloud storage rsync do, or mount them."
        )


def _is_list(place: Path) -> bool:
    """Whether it is a list of pictures, and not names of classes, nor COCO's of another ending."""
    names = FORMATS["YOLO with a list of names"].patterns
    is_text = place.match("*.txt") and place.name not in names
    return is_text and not (place.is_file() and _begins(place, FORMATS[COCO].sign))


def read_labels(
    place: str | Path, images: str | Path | None = None, paths: Iterable[Path] | None = None
) -> dict[str, Any]:
    """The labels of a file or folder in COCO's format.

    Args:
        place: a folder of Pascal VOC, LabelMe, VIA or CVAT files, such a file, YOLO's data.yaml, a
            file of COCO's, or a list of pictures (``.txt``) in or below the folder of their labels.
        images: the folder of the pictures; by default that of the labels. Names are relative to it.
        paths: of YOLO's pictures, those that are meant; by default all.

    Returns:
        ``images`` with the sizes of the pictures themselves, ``annotations`` and ``categories``:
        those of data.yaml in its order, others by name. Objects with polygons or masks have a
        ``segmentation``, and all have a ``source``: their file, and what in it.

    Raises:
        DataError: a file cannot be read, or its picture is missing.
    """
    place = Path(place)
    list_file, home = None, place
    if _is_list(place):
        list_file = place
        home = place.parents[2] if place.match("ImageSets/Main/*") else place.parent
    kind, files = recognise(home)
    read = FORMATS[kind].read
    if read is None:
        return read_json(only(home, files))
    if read is _read_yolo:
        only(home, files)
    folder = Path(images or (home if home.is_dir() else home.parent))
    pictures = _Pictures(folder, list_file, paths)
    if list_file:
        stems = {path.stem for path in pictures.paths}
        files = [file for file in files if read is _read_yolo or file.stem in stems]
    rows = [row for file in files for row in read(file, pictures)]
    if not rows:
        raise DataError(f"{place}: of {len(pictures.paths)} pictures in {folder}, none has labels.")
    for shape, where in pictures.left_out.items():
        logger.warning(f"{len(where)} x {shape} left out, or without a pixel; first: {where[0]}")
    classes = sorted({thing.label for row in rows for thing in row.things})
    if read is _read_yolo:
        classes = list(map(str, _yolo_names(files[0]).values()))
    content: dict[str, Any] = {"info": {"labels": str(place)}, "images": [], "annotations": []}
    content["categories"] = [{"id": number, "name": name} for number, name in enumerate(classes, 1)]
    ids = {name: number for number, name in enumerate(classes, 1)}
    taken: dict[Path, Path] = {}
    for number, row in enumerate(rows, 1):
        names = [f"{row.subset}/{row.picture}"] * bool(row.subset) + [row.picture, row.source.stem]
        path = pictures.find(str(row.source), row.source.parent, *names)
        other = taken.setdefault(path, row.source)
        if other != row.source:
            raise DataError(
                f"{row.source} and {other} both name {path}; correct the name in one of them, or "
                "give one of the files alone."
            )
        width, height = _size(path)
        image = {"id": number, "file_name": path.relative_to(pictures.folder).as_posix()}
        image |= {"subset": row.subset} if row.subset else {}
        content["images"].append({**image, "width": width, "height": height})
        for thing in row.things:
            x0, y0, x1, y1 = thing.box
            annotation = {
                "id": len(content["annotations"]) + 1,
                "image_id": number,
                "category_id": ids[thing.label],
                "bbox": [x0, y0, x1 - x0, y1 - y0],
                "area": _area(thing),
                "iscrowd": 0,
                "source": thing.where,
            }
            if thing.mask is not None:
                annotation["segmentation"] = thing.mask
            content["annotations"].append(annotation)
    counts = Counter(thing.label for row in rows for thing in row.things)
    found = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    folders = {path.parent for path in taken}
    rest = len({path for path in pictures.paths if path.parent in folders} - taken.keys())
    unused = f"; {rest} other pictures in their folders have no labels here" * bool(rest)
    logger.info(f"{place}: {kind}, {len(rows)} pictures with {found or 'no object'}{unused}")
    return content


def only(place: Path, files: list[Path]) -> str:
    """The file of labels where there is to be one.

    Raises:
        DataError: there are several.
    """
    if len(files) > 1:
        raise DataError(f"{place} holds {listed(map(str, files))}; name one of them.")
    return str(files[0])


def as_coco(*places: tuple[str, str]) -> list[str]:
    """Files in COCO's format for labels of any, kept in the cache of Detectron2's files.

    Args:
        places: labels as in :func:`read_labels` and the folder of their pictures, of the parts of
            one data set: all get the classes of all. Those of COCO's format stay themselves, as
            does what is not there.

    Raises:
        DataError: as :func:`read_labels`.
    """
    files, contents = [place for place, _ in places], {}
    for index, (place, images) in enumerate(places):
        path = Path(place)
        kind, found = recognise(path) if path.exists() and not _is_list(path) else ("", [])
        if kind == COCO:
            files[index] = only(path, found)
        elif path.exists():
            contents[index] = read_labels(path, images)
    names = [str(c["name"]) for content in contents.values() for c in content["categories"]]
    ids = {name: number for number, name in enumerate(dict.fromkeys(names), 1)}
    if contents and not ids:
        raise DataError(f"{listed(files)}: no object is labelled, so there is no class to learn.")
    for index, content in contents.items():
        new = {category["id"]: ids[category["name"]] for category in content["categories"]}
        for annotation in content["annotations"]:
            annotation["category_id"] = new[annotation["category_id"]]
        content["categories"] = [{"id": number, "name": name} for name, number in ids.items()]
        files[index] = keep_json(content, "labels", f"{Path(files[index]).stem}.json")
    return files
