"""The folder of the images of a file in COCO's format."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from lambda_det.detection.data.coco_format import IMAGES, read_lists
from lambda_det.detection.data.image_folder import ImageFolder, walk
from lambda_det.errors import DataError, listed, printable


def folder_of_coco(file: Path, above: Path, is_of_part: Callable[[Path], bool]) -> Path:
    """The folder from which the names in a file of COCO's format lead to its images.

    Args:
        file: in COCO's format.
        above: the folder that is searched.
        is_of_part: whether a folder belongs to the same part of the data as the file; such folders
            come first.

    Raises:
        DataError: no folder holds its images, or several hold the same names; or the file has no
            list of images.
    """
    names = _names(file)
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


def _names(file: Path) -> list[str]:
    """The names of the images."""
    images = read_lists(str(file), IMAGES)["images"]
    return list(dict.fromkeys(filter(None, (image["file_name"] for image in images))))


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
            f"{file}: its image {name!r} is in no folder of {above}; name the folder with "
            f"--train {file} --images DIR."
        )
    for name, paths in places.items():
        if len(paths) > 1 and file.parent / name not in paths:
            raise _several(file, name, [path.parent for path in sorted(paths)])
    found = [path.parent for paths in places.values() for path in paths]
    return Path(os.path.commonpath(found))


def _several(file: Path, name: str, folders: Iterable[Path]) -> DataError:
    return DataError(
        f"{file}: its image {printable(name)!r} is in each of {listed(folders)}; name the folder "
        f"with --train {file} --images DIR."
    )
