"""The parts of a data set, to train and to evaluate on, in the folders of usual tools.

Those of Roboflow and Ultralytics (train, valid, test, with images and labels), of Pascal VOC
(Annotations, JPEGImages, ImageSets/Main), of COCO (annotations beside train2017 and val2017), and
one folder of images with a file of labels each. Anything without a word for a part is the
training part. The words stand in :mod:`.part_names`. YOLO's data.yaml names its parts itself, which
is read in :mod:`.yolo_parts`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lambda_det.detection.data.coco import paths_of
from lambda_det.detection.data.coco_format import IMAGES, READER, read_lists
from lambda_det.detection.data.copies import equal_files
from lambda_det.detection.data.image_folder import (
    SUFFIXES,
    ImageFolder,
    images_below,
    normal,
    outputs_below,
    walk,
)
from lambda_det.detection.data.report import REFUSED, Report
from lambda_det.errors import DataError, counted, listed, printable
from lambda_det.files import UNREAD_SUFFIXES
from lambda_det.own_data.coco_files import stem_with_part, write_coco
from lambda_det.own_data.held_out import part_of
from lambda_det.own_data.labels.conversion import give_all_classes, is_list, only, read_labels
from lambda_det.own_data.labels.formats import other_labels, recognise
from lambda_det.own_data.labels.table import COCO, FORMATS
from lambda_det.own_data.labels.yolo import read_yolo
from lambda_det.own_data.part_names import (
    PART_OF_WORD,
    PART_WORDS,
    is_part_alone,
    named_part,
    part_in,
)
from lambda_det.own_data.yolo_parts import Content, contents_of_yolo

logger = logging.getLogger(__name__)

# the beginnings of the names of COCO's own files
_OF_COCO = ("instances", "person_keypoints", "captions", "stuff", "panoptic", "image_info")


class Part(NamedTuple):
    """A part of a data set.

    Attributes:
        labels: a file in COCO's format.
        images: the folder of its images.
        source: the user's own labels, for messages.
    """

    labels: str
    images: str
    source: str


def find_parts(
    place: str | Path,
    images: str | Path | None = None,
    *,
    folder: Path,
    to_train: bool = True,
) -> tuple[str, dict[str, Part], list[Path]]:
    """The format of a data set, its parts, and images in it that nothing is learnt from.

    Args:
        place: its folder, or YOLO's data.yaml in it.
        images: the folder of the images, with or without parts; None if they are in ``place``.
        folder: for files in COCO's format that are made from labels of other formats.
        to_train: whether one of the parts must be there to train on.

    Returns:
        The name of the format, and the parts by their names in the order train, val, test; those
        that are there. Labels that are converted get the classes of all parts. And the images that
        have labels in another format alone, or are of a format that is not read, or in a folder
        called train or val without labels.

    Raises:
        DataError: nothing there is of a known format, or it is not clear what belongs together.
    """
    place = Path(place)
    name, files = recognise(place)
    root = place if place.is_dir() else place.parent
    if place.is_dir():
        _log_folders(place)
    home = Path(images) if images else root
    if name == COCO:
        parts = _of_coco(root, files, home, to_train)
    else:
        contents = _contents(name, place, root, files, home, to_train)
        if to_train:
            contents = _with_train(root, contents)
            # YOLO has images without label files as well
            if "test" in contents and not any(map(_has_labels, contents["test"][0]["images"])):
                del contents["test"]
        give_all_classes([content for content, _ in contents.values()])
        parts, stem = {}, Path(os.path.abspath(root)).name
        for part, (content, pictures) in contents.items():
            file = write_coco(content, folder, f"{stem}_{part}")
            parts[part] = Part(file, str(pictures), content[READER]["labels"])
    found = {part: parts[part] for part in PART_WORDS if part in parts}
    return name, found, _unread(place, name, found.values()) if place.is_dir() else []


def _log_folders(root: Path) -> None:
    """Log what this program wrote among the data, and folders that only look like parts."""
    if outputs := outputs_below(root):
        logger.info(f"{root}: not read, as this program wrote them: {listed(outputs)}")
    names = {name for path in images_below(root) for name in path.relative_to(root).parts[:-1]}
    if unclear := [name for name in sorted(names) if part_in(name) and not is_part_alone(name)]:
        logger.warning(
            f"{root}: folders called {listed(unclear)} are no parts of the data, because other "
            "words stand there as well; if they are, call them train, val and test"
        )


def _labelled(parts: Iterable[Part]) -> dict[str, str]:
    """The images with labels of their own: their names without endings, by their real paths."""
    labelled: dict[str, str] = {}
    for part in parts:
        entries = filter(_has_labels, read_lists(part.labels, IMAGES)["images"])
        paths = paths_of([image["file_name"] for image in entries], Report("", part.images))
        labelled |= {os.path.realpath(path): normal(Path(path).stem) for path in paths.values()}
    return labelled


def _has_labels(image: Mapping[str, Any]) -> bool:
    """Whether the source of an image is a file of labels, and not the image itself."""
    return not str(image.get("source")).lower().endswith(SUFFIXES)


def _unread(place: Path, name: str, parts: Iterable[Part]) -> list[Path]:
    """The images of a folder from which nothing is learnt, which are logged: those that have other
    labels alone, or are not read, or are in a folder called train or val without any labels.
    """
    there = {path: normal(path.stem) for path in walk(place)}
    images = {path: stem for path, stem in there.items() if path.suffix.lower() in SUFFIXES}
    labelled = _labelled(parts)
    left: list[Path] = []
    if others := other_labels(place, name):
        endings = {file.suffix.lower() for file in others.values()}
        stems = {stem for path, stem in there.items() if path.suffix.lower() in endings}
        # Those that are there in a format that is read as well do not count
        stems -= set(labelled.values())
        left = [path for path, stem in images.items() if stem in stems]
        # an image that is read may lie there once more, such as beside labels of both formats
        both = {os.path.realpath(path): path for path in (*map(Path, labelled), *left)}
        read = {
            name
            for same in equal_files(both)
            if not labelled.keys().isdisjoint(same)
            for name in same
        }
        left = [path for path in left if os.path.realpath(path) not in read]
        alone = f"; {counted(len(left), 'image')} with those alone: {listed(left)}"
        logger.warning(
            f"{place}: labels of {name} are read, and not others such as "
            f"{listed(f'{file} of {other}' for other, file in others.items())}"
            f"{alone if left else ''}"
        )
    for part in PART_WORDS:
        bare = [path for path in images if named_part(path.parent, place) == part]
        if bare and labelled.keys().isdisjoint(map(os.path.realpath, bare)):
            # a contest keeps the labels of its test part
            advice = "" if part == "test" else "; add them, or call the folder otherwise"
            logger.warning(
                f"{place}: {counted(len(bare), 'image')} of {part} that no labels name, such as "
                f"{bare[0]}{advice}"
            )
            left += bare if advice else []
    read = set(images.values())
    unread = [
        path
        for path, stem in there.items()
        if path.suffix.lower() in UNREAD_SUFFIXES and stem not in read
    ]
    if unread:
        logger.warning(
            f"{place}: {counted(len(unread), 'image')} of formats that are not read, such as "
            f"{unread[0]}; write them as JPEG or PNG"
        )
    return [*left, *unread]


def as_coco(
    *places: tuple[str, str | None], folder: Path, classes: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """Files in COCO's format with the folders of their images, from labels of any format.

    Args:
        places: labels as in :func:`read_labels` with the folder of their images, or None where it
            is in or beside them; of the parts of one data set: all get the classes of all. Files of
            COCO's format and addresses are returned as they are.
        folder: for the files that are made from the others.
        classes: of a run, as for :func:`give_all_classes`.

    Raises:
        DataError: as :func:`read_labels` and :func:`give_all_classes`; or no folder holds the
            images of a file in COCO's format, or several do.
    """
    found = [(place, images or str(_find_images(Path(place)))) for place, images in places]
    contents = {}
    for index, (place, images) in enumerate(found):
        path = Path(place)
        if not path.exists():  # an address, which Detectron2 may know
            continue
        name, files = ("", []) if is_list(path) else recognise(path)
        if name == COCO:
            found[index] = str(only(path, files)), images
        else:
            contents[index] = read_labels(path, images)
    give_all_classes(contents.values(), classes)
    for index, content in contents.items():
        # They are named by the user's folder; the temporary folder has another name each time
        place, images = found[index]
        found[index] = write_coco(content, folder, stem_with_part(place)), images
    return found


def _find_images(labels: Path) -> Path:
    """The folder of the images of labels, in or beside them, where none is named."""
    name, files = recognise(labels)
    root = labels if labels.is_dir() else labels.parent
    return _images_of(files[0], root, root) if name == COCO else root


def _with_train(root: Path, groups: Mapping[str, Any]) -> dict[str, Any]:
    """Groups by part with one to train on: the only one, whatever it is called."""
    if "train" in groups:
        return dict(groups)
    if len(groups) > 1:
        raise DataError(
            f"{root} has parts called {' and '.join(sorted(groups, reverse=True))}, and nothing to "
            "train on; name what is to be trained on with --train."
        )
    ((part, group),) = groups.items()
    logger.warning(f"{root}: its one part is called {part}, and is the one to train on")
    return {"train": group}


# ---------------------------------------------------------------------------------------- of COCO's
def _of_coco(root: Path, files: list[Path], home: Path, to_train: bool) -> dict[str, Part]:
    # COCO's own files of keypoints, captions, stuff and segments lie beside the files of instances
    instances = [file for file in files if file.name.startswith("instances")]
    others = [file for file in files if not file.name.startswith(_OF_COCO)]
    if instances and others:
        logger.warning(f"{root}: not used beside instances_*: {listed(others)}")
    groups: dict[str, list[Path]] = {}
    for file in instances or files:
        groups.setdefault(named_part(file.with_suffix(""), root, is_file=True), []).append(file)
    if "train" in groups and "" in groups:
        logger.warning(f"{root}: not used, as they name no part: {listed(groups.pop(''))}")
    if "" in groups:
        groups["train"] = groups.pop("")
    parts = {}
    for part, candidates in (_with_train(root, groups) if to_train else groups).items():
        file = only(root, candidates)
        try:
            images = _images_of(file, root, home)
        except DataError:
            if part != "test" or "val" not in groups:
                raise
            # a training does not need it
            logger.warning(
                f"{file}: no test part: it is broken, or its images are in no folder or in several"
            )
            continue
        parts[part] = Part(str(file), str(images), str(file))
    return parts


def _images_of(file: Path, root: Path, home: Path) -> Path:
    """The folder in or beside ``home`` from which the names in a file of COCO's format lead to its
    images. Folders of the file's part of the data come first.
    """
    above = home.parent if home.name == "annotations" else home
    part = named_part(file.with_suffix(""), root, is_file=True)

    def is_of_part(folder: Path) -> bool:
        return named_part(folder, above) == part

    images = read_lists(str(file), IMAGES)["images"]
    names = list(dict.fromkeys(filter(None, (image["file_name"] for image in images))))
    whole = [
        folder
        for folder in _folders(above)
        if names and all((folder / name).is_file() for name in names)
    ]
    if not whole:
        return _spread(file, above, names, is_of_part)
    whole = list(filter(is_of_part, whole)) or whole
    if file.parent in whole:
        return file.parent
    if len(whole) > 1:
        raise _several(file, names[0], whole)
    return whole[0]


def _folders(above: Path) -> list[Path]:
    """The folder and the folders below it, at any depth, that hold files."""
    folders = {above: None}
    for path in walk(above):
        for folder in path.parents:
            if folder in folders:
                break
            folders[folder] = None
    return sorted(folders)


def _spread(
    file: Path, above: Path, names: Collection[str], is_of_part: Callable[[Path], bool]
) -> Path:
    """The folder above the images to which the ends of some names lead."""
    images, places = ImageFolder(above), {}
    for name in names:
        found = images.named(name)[1]
        if paths := {path for path in found if is_of_part(path.parent)} or found:
            places[name] = paths
    if not places:
        name = printable(next(iter(names), ""))
        raise DataError(
            f"{file}: its image {name!r} is in no folder of {above}; name the folder: lambda-det "
            f"check {file} DIR, or train --train {file} --images DIR."
        )
    for name, paths in places.items():
        if len(paths) > 1 and file.parent / name not in paths:
            raise _several(file, name, [path.parent for path in sorted(paths)])
    found = [path.parent for paths in places.values() for path in paths]
    return Path(os.path.commonpath(found))


def _several(file: Path, name: str, folders: Iterable[Path]) -> DataError:
    return DataError(
        f"{file}: its image {printable(name)!r} is in each of {listed(folders)}; name the folder: "
        f"lambda-det check {file} DIR, or train --train {file} --images DIR."
    )


# --------------------------------------------------------------------------------- of other formats
def _contents(
    name: str, place: Path, root: Path, files: list[Path], home: Path, to_train: bool
) -> dict[str, Content]:
    """The labels of each part."""
    if FORMATS[name].read is read_yolo:
        if contents := contents_of_yolo(only(root, files), to_train):
            return contents
    elif lists := _lists_of_voc(root):
        contents = {}
        for part, file in lists.items():
            images = file.parents[2] / "JPEGImages"
            images = images if images.is_dir() else file.parents[2]
            contents[part] = (read_labels(file, images), images)
        return contents
    content = read_labels(place, home)
    of_one = FORMATS[name].images != "some"
    return {part: (labels, home) for part, labels in _split(content, root, home, of_one).items()}


def _split(
    content: dict[str, Any], root: Path, home: Path, of_one: bool
) -> dict[str, dict[str, Any]]:
    """Divide content into parts: by the folder of labels, their subset, or the image's folder."""
    # A file of labels of one image has no part in its own name
    ids: dict[str, set[int]] = {}
    labelled: dict[str, list[Path]] = {}
    for image in content["images"]:
        source, picture = Path(image["source"]), home / image["file_name"]
        labels = source.parent if of_one else source.with_suffix("")
        named = [
            named_part(labels, root, is_file=not of_one),
            named_part(root / image.get("subset", ""), root),
            named_part(picture.parent, home),
        ]
        part = next(filter(None, named), "")
        ids.setdefault(part, set()).add(image["id"])
        if _has_labels(image):
            labelled.setdefault(part, []).append(source)
    if "" in ids and "" not in labelled and len(ids) > 1:
        del ids[""]  # images without labels, beside the images of parts
    if "" in ids and "train" in ids:
        raise DataError(
            f"{root}: {len(labelled[''])} of {sum(map(len, labelled.values()))} labels are in no "
            f"folder called {', '.join(PART_WORDS)}, such as {labelled[''][0]}; to use "
            f"all, give --train {root} --images {home}."
        )
    if "" in ids:
        ids["train"] = ids.pop("")
    if len(ids) < 2:
        return dict.fromkeys(ids, content)
    # they belong to all parts; what is refused may be of any one, which would lack it silently
    found = content[READER]["findings"]
    others = [finding for finding in found if finding["severity"] != REFUSED]
    refused = [
        {**finding, "text": f"{finding['text']}, in all parts together"}
        for finding in found
        if finding not in others
    ]
    parts = {}
    for part, chosen in ids.items():
        parts[part] = part_of(content, chosen)
        findings = refused + (others if part == "train" else [])
        read = {"labels": f"{root} ({part})", "findings": findings}
        parts[part][READER] = content[READER] | read
    return parts


def _lists_of_voc(root: Path) -> dict[str, Path]:
    """Pascal VOC's lists of the images of each part."""
    lists: dict[str, list[Path]] = {}
    for path in walk(root):
        if path.match("ImageSets/Main/*.txt"):
            name = re.sub("[-_ ]", "", path.stem.lower())
            lists.setdefault(PART_OF_WORD.get(name, name), []).append(path)
    if "trainval" in lists and "train" not in lists:
        lists["train"] = lists["trainval"]
        lists.pop("val", None)
    return {part: only(root, lists[part]) for part in PART_WORDS if part in lists}
