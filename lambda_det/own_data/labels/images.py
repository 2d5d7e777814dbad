"""Find the image that a file of labels means."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from lambda_det.detection.data.image_folder import ImageFolder, normal
from lambda_det.errors import DataError, listed, printable
from lambda_det.files import read_text


class MissingImage(DataError):
    """The image of a file of labels is missing."""


def lines_of_text(file: Path) -> Iterator[tuple[str, str]]:
    """The place and the text of each line of a list of images, without comments."""
    for number, line in enumerate(map(str.strip, read_text(file).splitlines()), 1):
        if line and not line.startswith("#"):
            yield f"{file}, line {number}", line


class NamedImages(ImageFolder):
    """The images below a folder, or some of them, found by the names that labels have."""

    def __init__(self, folder: Path, paths: Iterable[Path] | None = None) -> None:
        """
        Args:
            folder: where they are; their names are relative to it.
            paths: of the images to consider; None for all below the folder.

        Raises:
            DataError: there is no such folder.
        """
        if not folder.is_dir():
            raise DataError(f"There is no image folder {folder}; name it with --images.")
        super().__init__(folder, paths)
        self._by_path = {_absolute(path): path for path in self.paths}

    def find(self, where: str, home: Path, *names: str) -> Path:
        """The image of the first name that exists.

        A path below ``home`` comes first, then the last parts of a path.

        Args:
            where: the file that names it, for messages.
            home: the folder of the file that names it.
            names: as labels have them, which may be paths of another machine.

        Raises:
            MissingImage: there is none.
            DataError: there are several.
        """
        for name in names:
            if path := self._by_path.get(_absolute(home / name)):
                return path
            end, images = self.named(name)
            images = _nearest(images, home)
            if len(images) > 1:
                raise DataError(
                    f"{where}: {len(images)} images below {self.folder} are named "
                    f"{printable(end)}, {listed(sorted(images), 2)}; name the folder of these "
                    "labels' images."
                )
            if images:
                return images.pop()
        raise MissingImage(
            f"{where}: its image {printable(names[0])!r} is not below {self.folder}, as JPEG, "
            "PNG or another image that can be read; name the folder of the images: lambda-det "
            "check LABELS DIR, or --images DIR of other commands."
        )


def _nearest(images: set[Path], home: Path) -> set[Path]:
    """The images that share most names of folders with a file of labels."""
    # Pascal VOC has drawings of its labels beside JPEGImages
    images = {path for path in images if path.parent.name == "JPEGImages"} or images
    names = set(home.absolute().parts)
    shared = {path: len(names.intersection(path.absolute().parts)) for path in images}
    return {path for path in images if shared[path] == max(shared.values())}


def _absolute(path: Path) -> str:
    return normal(os.path.abspath(path))
