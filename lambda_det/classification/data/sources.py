"""Sources of labelled images: their common interface; folders and CIFAR-10."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from lambda_det.errors import DataError, listed, refused
from lambda_det.files import SUFFIXES


class Source(ABC):
    """A set of images with one label each, by index from 0.

    It is pickled for the workers of a loader, so it must not hold an object for each image.

    Attributes:
        classes: names, sorted unless the data bring their own order; the index is the label.
    """

    def __init__(self, classes: list[str], labels: np.ndarray) -> None:
        """
        Args:
            classes: their names.
            labels: integers [images], indices of ``classes``.
        """
        self.classes = classes
        # Spawned workers share a tensor's memory, but get a copy of an array each
        self._labels = torch.from_numpy(labels.astype(np.int64, copy=False))

    @property
    def labels(self) -> np.ndarray:
        """int64 [images]"""
        return self._labels.numpy()

    def __len__(self) -> int:
        return len(self._labels)

    @abstractmethod
    def load(self, index: int) -> np.ndarray:
        """The image, uint8 RGB [H, W, 3].

        Raises:
            DataError: the image cannot be read; the text names its file.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """The name of the image in lists and messages. It is the same in every run."""


def check_same_classes(
    classes: Sequence[str], others: Sequence[str], where: str, elsewhere: str
) -> None:
    """Refuse two sets whose labels mean different classes.

    Args:
        classes: of the training data.
        others: of the data that are used with them.
        where: the name of the first in the message.
        elsewhere: the name of the second.

    Raises:
        DataError: only one of them has some class, or the order of the classes differs.
    """
    if list(classes) != list(others):
        in_one = sorted(set(classes) ^ set(others))
        difference = f"only one has {listed(in_one)}" if in_one else "in their order"
        raise DataError(
            f"The classes of {where} and {elsewhere} differ: {difference}; give both the same."
        )


class FileSource(Source):
    """Image files below one folder, with labels.

    Args:
        root: the folder that names start from.
        names: paths below it, as the file system's bytes or as text.
        labels: integers [names], indices of ``classes``.
        classes: names of the classes.
    """

    def __init__(
        self, root: str | Path, names: Sequence[Any], labels: np.ndarray, classes: list[str]
    ) -> None:
        super().__init__(classes, labels)
        self._root = str(root)
        self._names = names

    def name(self, index: int) -> str:
        return os.fsdecode(self._names[index])

    def load(self, index: int) -> np.ndarray:
        return decode_image(os.path.join(self._root, self.name(index)))


class FolderSource(FileSource):
    """A folder of class folders, such as the unpacked ImageNet.

    The classes are the sorted names of the folders. Images lie in them at any depth. Hidden files
    and files without the extension of an image are ignored.

    Args:
        root: the folder of class folders.

    Raises:
        DataError: ``root`` is not a folder, holds no class folder, or an empty one.
    """

    def __init__(self, root: str | Path) -> None:
        classes = sorted(name for name, is_folder in _entries(root) if is_folder)
        if not classes:
            raise DataError(
                f"{root} holds no class folders; put the images of each class into a folder of its "
                "own there."
            )
        files = [sorted(image_files(os.path.join(root, folder))) for folder in classes]
        counts = [*map(len, files)]
        if 0 in counts:
            empty = [folder for folder, count in zip(classes, counts, strict=True) if not count]
            raise DataError(
                f"{len(empty)} of the {len(classes)} class folders of {root} hold no image "
                f"({listed(empty)}); fill or remove them."
            )
        # One array: a list would be copied into every worker of a loader, because to read an
        # element writes its reference count (https://github.com/pytorch/pytorch/issues/13246)
        names = [
            os.fsencode(os.path.join(folder, name))
            for folder, found in zip(classes, files, strict=True)
            for name in found
        ]
        packed = np.array(names, dtype=np.bytes_)
        super().__init__(root, packed, np.repeat(np.arange(len(classes)), counts), classes)


def image_files(root: str | Path) -> Iterator[str]:
    """Paths below ``root`` of all images in it, at any depth and in any order.

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
            elif name.lower().endswith(SUFFIXES):
                yield path


def _entries(folder: str | Path) -> list[tuple[str, bool]]:
    """The name of each entry that is not hidden, and whether it is a folder."""
    what = f"The image folder {folder} cannot be read"
    with refused(DataError, what, "check its path", OSError), os.scandir(folder) as entries:
        return [(e.name, e.is_dir()) for e in entries if not e.name.startswith(".")]


class Cifar10Source(Source):
    """The 50,000 training or the 10,000 test images of CIFAR-10, 32x32, in memory.

    Args:
        root: torchvision's download folder; torchvision checks the MD5 sums of the files.
        train: the training images instead of the test images.

    Raises:
        DataError: the files are missing or damaged.
    """

    def __init__(self, root: str | Path, train: bool = False) -> None:
        try:
            files = CIFAR10(str(root), train=train, download=False)
        except RuntimeError as error:
            raise DataError(
                f"{root} does not hold the undamaged files of CIFAR-10; download them with: "
                'python -c "from torchvision.datasets import CIFAR10; '
                f'CIFAR10({str(root)!r}, download=True)"'
            ) from error
        super().__init__(list(files.classes), np.array(files.targets))
        self._part = "train" if train else "test"
        self._pixels = torch.from_numpy(np.ascontiguousarray(files.data))

    def name(self, index: int) -> str:
        return f"{self._part}/{index:05d}"

    def load(self, index: int) -> np.ndarray:
        """uint8 RGB [32, 32, 3]; not a copy"""
        return self._pixels[index].numpy()


def decode_image(file: str | IO[bytes]) -> np.ndarray:
    """The pixels of ``PIL.Image.open(file).convert("RGB")``; the EXIF rotation is not applied.

    Args:
        file: of an image; messages name it.

    Returns:
        uint8 RGB [H, W, 3], C-contiguous and writable.

    Raises:
        DataError: Pillow cannot read the image, or refuses it as a decompression bomb.
    """
    what, advice = f"The image {file} cannot be read", "fetch it again or take it out of the data"
    # Pillow may raise anything for a broken file
    with refused(DataError, what, advice, Exception), Image.open(file) as image:
        if image.mode.startswith(("I", "F")):  # Pillow cuts their values at 255
            raise DataError(
                f"The image {file} has more than 8 bits a pixel and channel (mode {image.mode}), "
                "and would become white or black; convert it to 8 bits."
            )
        return np.array(image.convert("RGB"))
