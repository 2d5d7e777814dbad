"""Convert labels of any format to the content of one COCO file."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lambda_det.detection.data.coco_format import READER, name_labels, read_lists
from lambda_det.detection.data.image_folder import SUFFIXES, normal, walk
from lambda_det.detection.data.report import NOTED, Report
from lambda_det.errors import DataError, counted, listed, printable
from lambda_det.own_data.coco_files import stem_with_part, write_coco
from lambda_det.own_data.labels.findings import (
    LOST_FILE,
    NO_FILE,
    NO_IMAGE,
    NO_LABELS,
    OTHER_NAME,
    RENAMED,
    UNREAD,
)
from lambda_det.own_data.labels.formats import endings_of, format_of, recognise
from lambda_det.own_data.labels.images import MissingImage, NamedImages, lines_of_text
from lambda_det.own_data.labels.objects import LabelledImage, area, size_of
from lambda_det.own_data.labels.table import COCO, FORMATS, LISTS
from lambda_det.own_data.labels.yolo import read_yolo, yolo_names
from lambda_det.own_data.part_names import named_part
from lambda_det.training.log import show

logger = logging.getLogger(__name__)


def read_labels(
    place: str | Path,
    images: str | Path,
    paths: Iterable[Path] | None = None,
) -> dict[str, Any]:
    """Read the labels of a file or folder into COCO's format.

    Args:
        place: a file of labels, a folder of them, or a list of images (``.txt``) in or below the
            folder of their labels.
        images: the folder of the images, to which names are relative.
        paths: the images to consider; by default all in ``images``.

    Returns:
        ``images``, ``annotations`` and ``categories``: those of data.yaml in its order, others by
        name. The size of an image is the one that its file of labels states, or its own.
        Objects with polygons or masks have a ``segmentation``. Images and objects have a
        ``source``: their file of labels, and the place in it. The entry ``lambda_det`` has the
        findings and how the labels write boxes, as ``READER`` in
        :mod:`lambda_det.detection.data.coco_format` describes.

    Raises:
        DataError: a file cannot be read, or no image is there.
    """
    place = Path(place)
    home = place
    if is_list(place):
        home = place.parents[2] if place.match("ImageSets/Main/*") else place.parent
    name, files = recognise(home)
    row = FORMATS[name]
    if row.read is None:
        raise DataError(f"{place}: labels of COCO need no list of images; name {files[0]}.")
    if row.images == "all":
        files = [only(home, files)]
    folder = Path(images)
    pictures = NamedImages(folder, paths)
    if home != place:
        named = lines_of_text(place)
        pictures = NamedImages(
            folder, [pictures.find(where, place.parent, line) for where, line in named]
        )
        if row.images == "one":
            names = {name for path in pictures.paths for name in _names_of_labels(path.name)}
            files = [file for file in files if normal(file.stem) in names]
    report = Report(str(place))
    rows: list[LabelledImage] = []
    for file in files:
        try:
            rows += row.read(file, pictures, report)
        except DataError as error:
            if len(files) == 1:
                raise
            report.add(UNREAD, f"{error} The rest of the file was not read")
    if not rows:
        if unread := report.findings.get(UNREAD):
            raise DataError(f"{unread.first[0]}.")
        raise DataError(
            f"{place}: of {len(pictures.paths)} images in {folder}, none has labels; there are "
            f"{endings_of(walk(folder))}, and images are read as {' '.join(SUFFIXES)}."
        )
    things = [thing for image in rows for thing in image.objects]
    for thing in things:
        if not thing.label.strip():
            raise DataError(f"{thing.where}: its class has no name; name or remove the object.")
    if row.read is read_yolo:
        classes = list(yolo_names(files[0]).values())
    else:
        classes = sorted({thing.label for thing in things})
    placed = _placed(rows, row.images == "one", pictures, report)
    # drawings of the labels have the names as well, in a folder of the part or of none
    names = {
        (part, normal(path.stem))
        for path in placed
        for part in ("", named_part(path.parent, folder))
    }
    numbers, lacking = Counter(), Counter()  # by the parts that folders of images tell
    for path in pictures.paths:
        image = placed.get(path)
        part = named_part(path.parent, folder)
        # one without labels may be of a file that was not read as a whole
        if image is None and (UNREAD in report.findings or (part, normal(path.stem)) in names):
            continue
        numbers[part] += 1
        if image is None or image.source == path:  # YOLO's are used nevertheless
            report.add(NO_FILE if image else NO_LABELS, str(path))
            lacking[part] += 1
    for part, missing in lacking.items():
        number = numbers[part]
        if part == "test" and missing == number:  # a contest keeps the labels of its test part
            continue
        if row.images != "some" and missing > _MAY_LACK * number:
            report.add(LOST_FILE, f"{missing} of {number} images have no label file", missing)
    content = _content(placed, folder, classes)
    findings = [{**kind._asdict(), **vars(finding)} for kind, finding in report.findings.items()]
    content[READER] = {"labels": str(place), "findings": findings, "boxes": row.boxes}
    what = counted(len(placed), "image"), counted(len(content["annotations"]), "object")
    logger.info(f"{place}: {name}, {' with '.join(what)}")
    # the check of the data says the others
    for kind, finding in report.of(NOTED).items():
        show(f"{finding.count} x {kind.text}; first: {finding.first[0]}")
    return content


# Share of the images that may have no label file, a guess: Ultralytics advises up to a tenth of
# images of background, and of COCO's a hundredth has no file
_MAY_LACK = 0.1


def is_list(place: Path) -> bool:
    """Whether it is a list of images, and not of names of classes, nor a COCO file."""
    is_text = place.is_file() and place.suffix.lower() == ".txt"
    return is_text and not place.name.lower().endswith(LISTS) and format_of(place) != COCO


# ------------------------------------------------------------------ the image of a file of labels
def _placed(
    rows: Iterable[LabelledImage], are_alone: bool, images: NamedImages, report: Report
) -> dict[Path, LabelledImage]:
    """Labelled images that exist, by their files; missing and doubly named ones are refused."""
    # A file of labels of one image may have its name
    missing: MissingImage | None = None
    placed: dict[Path, LabelledImage] = {}
    for row in rows:
        try:
            path = _image_of(row, are_alone, images, report)
        except MissingImage as error:
            report.add(NO_IMAGE, f"{row.source}: {row.name}")
            missing = missing or error
            continue
        if path in placed:
            both = " and ".join(f"{one.source}: {one.name}" for one in (row, placed[path]))
            raise DataError(
                f"{printable(both)} both name {path}; correct the name in one of them, or give one "
                "of the files alone."
            )
        placed[path] = row
    if missing and not placed:
        raise missing
    return placed


def _names_of_labels(image: str) -> tuple[str, str]:
    """What a file of labels of one image may be called, without its own ending."""
    name = image.replace("\\", "/").rpartition("/")[2]
    return normal(Path(name).stem), normal(name)


def _image_of(row: LabelledImage, is_alone: bool, images: NamedImages, report: Report) -> Path:
    """The file of a labelled image."""
    # Images may have been renamed since they were labelled: the name of the file of labels counts
    # where the one in it leads to no image. If both lead to images, nobody knows which is meant.
    where, home, own = str(row.source), row.source.parent, row.source.stem
    names = [f"{row.subset}/{row.name}", row.name] if row.subset else [row.name]
    if not is_alone or normal(own) in _names_of_labels(row.name):
        return images.find(where, home, *names)
    called = None
    with contextlib.suppress(MissingImage):
        called = images.find(where, home, own)
    try:
        named = images.find(where, home, row.name)
    except MissingImage:
        if called is None:
            raise
        report.add(RENAMED, f"{where} names {row.name}, and {called.name} is taken")
        return called
    if called not in (None, named):
        report.add(OTHER_NAME, f"{where} names {row.name}")
    return named


# -------------------------------------------------------------------------------------- the content
def _content(
    placed: Mapping[Path, LabelledImage], folder: Path, classes: Sequence[str]
) -> dict[str, Any]:
    """The lists of a file in COCO's format."""
    # The check and the reader of records find out whether a size that labels state is the image's
    ids = {name: number for number, name in enumerate(classes, 1)}
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, (path, row) in enumerate(placed.items(), 1):
        width, height = row.size or size_of(path)
        name = path.relative_to(folder).as_posix()
        image = {"id": number, "file_name": name, "source": str(row.source)}
        if row.subset:
            image["subset"] = row.subset
        if row.size is None:
            image["own_size"] = True
        images.append({**image, "width": width, "height": height})
        for thing in row.objects:
            x0, y0, x1, y1 = thing.box
            annotation = {
                "id": len(annotations) + 1,
                "image_id": number,
                "category_id": ids[thing.label],
                "bbox": [x0, y0, x1 - x0, y1 - y0],
                "area": area(thing),
                "iscrowd": 0,
                "source": thing.where,
            }
            if thing.mask is not None:
                annotation["segmentation"] = thing.mask
            annotations.append(annotation)
    categories = [{"id": number, "name": name} for name, number in ids.items()]
    return {"images": images, "annotations": annotations, "categories": categories}


def only(place: Path, files: list[Path]) -> Path:
    """The file of labels where there must be a single one. Lists of the same names count as one.

    Raises:
        DataError: there are several.
    """
    are_names = all(file.name.lower().endswith(LISTS) for file in files)
    if len(files) > 1 and not (are_names and len({file.read_bytes() for file in files}) == 1):
        raise DataError(f"{place} holds {listed(map(str, files))}; name one of them.")
    return files[0]


SINGLE_CLASS = "object"  # the class of all objects with --single-class


def as_single_class(file: str, folder: Path) -> str:
    """Make a file in COCO's format in which all objects have one class.

    Args:
        file: in COCO's format.
        folder: for the file that is made from it.

    Raises:
        DataError: it is not in COCO's format.
    """
    content = read_lists(file)
    content["categories"] = [{"id": 1, "name": SINGLE_CLASS}]
    name_labels(content, file)
    for annotation in content["annotations"]:
        annotation["category_id"] = 1
    return write_coco(content, folder, stem_with_part(file))


def give_all_classes(contents: Collection[dict[str, Any]], classes: Sequence[str] = ()) -> None:
    """Give the parts of a data set the classes of all parts, in place.

    Args:
        contents: the parts in COCO's format.
        classes: of a run; if there are any, the parts get these in place of their own.

    Raises:
        DataError: they have none, or objects of classes that the run does not have.
    """
    names = [entry["name"] for content in contents for entry in content["categories"]]
    if contents and not names:
        places = listed(content[READER]["labels"] for content in contents)
        raise DataError(f"{places}: no object is labelled, so there is no class to learn.")
    ids = {name: number for number, name in enumerate(dict.fromkeys(classes or names), 1)}
    for content in contents:
        own = {entry["id"]: entry["name"] for entry in content["categories"]}
        backwards = reversed(content["annotations"])  # so the first place of a class is kept
        places = {own[thing["category_id"]]: thing["source"] for thing in backwards}
        if others := sorted(places.keys() - ids.keys()):
            raise DataError(
                f"{content[READER]['labels']} has objects of {listed(others)}, which the run does "
                f"not have ({listed(classes, 8)}); give them a name of the run, or remove them. "
                f"The first one is in {places[others[0]]}."
            )
        for annotation in content["annotations"]:
            annotation["category_id"] = ids[own[annotation["category_id"]]]
        content["categories"] = [{"id": number, "name": name} for name, number in ids.items()]
