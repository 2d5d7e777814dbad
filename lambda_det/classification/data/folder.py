"""Images in folders, one folder for each class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from lambda_det.classification.data.decode import decode_image
from lambda_det.classification.data.names import PackedNames
from lambda_det.errors import DataError, listed

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


class FileSource:
    """Image files below one folder, with labels.

    Args:
        root: the folder that names start from.
        names: paths below it.
        labels: integers [names], indices of ``classes``.
        classes: names of the classes.
    """

    def __init__(
        self, root: str | Path, names: PackedNames, labels: np.ndarray, classes: list[str]
    ) -> None:
        self.classes = classes
        self._root = str(root)
        self._names = names
        # A tensor goes to spawned workers through shared memory, an array as a copy for each.
        self._labels = torch.from_numpy(labels.astype(np.int64, copy=False))

    @property
    def labels(self) -> np.ndarray:
        """int64 [images]"""
        return self._labels.numpy()

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        return self._names[index]

    def load(self, index: int) -> np.ndarray:
        """The image, uint8 RGB [H, W, 3]; a DataError names the file if it cannot be read."""
        path = os.path.join(self._root, self._names[index])
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.readall()
        except OSError as error:
            raise DataError(
                f"The image {path} cannot be read ({error.strerror}); put it back, or take it out "
                "of the data."
            ) from error
        return decode_image(data, path)


class FolderSource(FileSource):
    """A folder of class folders, such as ImageNet's as it is unpacked.

    The classes are the folders' names, sorted, and images lie in them at any depth. Hidden files,
    and those that are no images by their extension, are not looked at.

    Args:
        root: the folder of class folders.

    Raises:
        DataError: ``root`` is no folder, holds no class folders, or some without an image.
    """

    def __init__(self, root: str | Path) -> None:
        classes = _class_folders(root)
        counts = np.zeros(len(classes), dtype=np.int64)

        def all_names() -> Iterator[str]:
            for label, folder in enumerate(classes):
                names = sorted(image_files(os.path.join(root, folder)))  # one class at a time
                counts[label] = len(names)
                yield from (os.path.join(folder, name) for name in names)

        names = PackedNames(all_names())
        empty = [folder for folder, count in zip(classes, counts, strict=True) if not count]
        if empty:
            raise DataError(
                f"{len(empty)} of the {len(classes)} class folders of {root} hold no image "
                f"({listed(empty)}); fill or remove them."
            )
        super().__init__(root, names, np.repeat(np.arange(len(classes)), counts), classes)


def image_files(root: str | Path) -> Iterator[str]:
    """Paths below ``root`` of all images in it, at any depth and in no order.

    Raises:
        DataError: ``root``, or a folder in it, cannot be listed.
    """
    pending = [""]
    while pending:
        folder = pending.pop()
        for name, is_folder in _entries(os.path.join(root, folder)):
            path = os.path.join(folder, name)
            if is_folder:
                pending.append(path)
            elif is_image(name):
                yield path


def is_image(name: str) -> bool:
    """Whether a file is taken for an image, by its extension."""
    return name.lower().endswith(_EXTENSIONS)


def _class_folders(root: str | Path) -> list[str]:
    entries = _entries(root)
    folders = sorted(name for name, is_folder in entries if is_folder)
    if not folders:
        has_images = any(is_image(name) for name, _ in entries)
        found = "images, but no class folders" if has_images else "no class folders"
        raise DataError(
            f"{root} holds {found}; put the images of each class into a folder of its own there."
        )
    return folders


def _entries(folder: str | Path) -> list[tuple[str, bool]]:
    """Name, and whether it is a folder, of all that is not hidden."""
    try:
        with os.scandir(folder) as entries:
            return [(e.name, e.is_dir()) for e in entries if not e.name.startswith(".")]
    except OSError as error:  # links that go round in circles are one, too
        raise DataError(
            f"The image folder {folder} cannot be read ({error.strerror}); check its path."
        ) from error
