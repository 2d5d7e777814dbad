"""Labelled images: what every set of them offers, and the sets that are read from files.

Folders of class folders, CIFAR-10 as torchvision downloads it, and noise in place of images; shards
and pseudo-labels have files of their own.
"""

from __future__ import annotations

import io
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from lambda_det.errors import DataError, listed


class Source(Protocol):
    """A set of images with one label each, by index from 0.

    It is pickled to the workers of a loader, so it must not hold an object for each image.

    Attributes:
        classes: names, sorted unless the data bring their own order; the index is the label.
        labels: int64 [images].
    """

    classes: list[str]

    @property
    def labels(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def load(self, index: int) -> np.ndarray:
        """The image, uint8 RGB [H, W, 3].

        Raises:
            DataError: the image cannot be read; the text names its file.
        """
        ...

    def name(self, index: int) -> str:
        """What the image is called in lists and messages; it stays the same from run to run."""
        ...


def check_same_classes(
    classes: Sequence[str], others: Sequence[str], where: str, elsewhere: str
) -> None:
    """Refuse two sets whose labels mean different classes.

    Args:
        classes: of the training data.
        others: of the data to go with them.
        where: what to call the first, for the message.
        elsewhere: what to call the second.

    Raises:
        DataError: classes that only one of them has, or another order of the same.
    """
    if list(classes) == list(others):
        return
    only_here = sorted(set(classes) - set(others))
    only_there = sorted(set(others) - set(classes))
    differences = [
        f"only {place} has {listed(names)}"
        for place, names in ((where, only_here), (elsewhere, only_there))
        if names
    ]
    raise DataError(
        f"The classes of {where} and {elsewhere} differ: "
        f"{' and '.join(differences) or 'they have another order'}; give both the same classes."
    )


_NAMES_AT_ONCE = 1 << 16


class PackedNames:
    """File names, by index from 0, without a Python object for each.

    A list of strings would be copied into every worker of a loader, as reading an element writes
    its reference count (https://github.com/pytorch/pytorch/issues/13246). Tensors are shared with
    workers that are forked, and through shared memory with those that are spawned.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        text, ends = bytearray(), array("q")
        for name in names:
            text += os.fsencode(name)
            ends.append(len(text))
        self._set(text, np.array(ends, dtype=np.int64))

    @classmethod
    def from_bytes(cls, text: bytearray, lengths: np.ndarray) -> PackedNames:
        """Names that lie one behind the other in ``text``, of ``lengths`` [names] bytes each."""
        packed = cls.__new__(cls)
        packed._set(text, np.cumsum(lengths, dtype=np.int64))
        return packed

    def _set(self, text: bytearray, ends: np.ndarray) -> None:
        self._text = torch.from_numpy(np.frombuffer(text, dtype=np.uint8))
        self._ends = torch.from_numpy(ends)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self.encoded(index))

    def encoded(self, index: int) -> bytes:
        """The bytes of a name."""
        if not 0 <= index < len(self):
            raise IndexError(f"name {index} of {len(self)}")
        start = int(self._ends[index - 1]) if index else 0
        return self._text[start : int(self._ends[index])].numpy().tobytes()

    def hashes(self) -> np.ndarray:
        """Python's hash of each name's bytes, int64 [names]; the same in one process only."""
        return np.fromiter(map(hash, self._all_encoded()), np.int64, len(self))

    def _all_encoded(self) -> Iterator[bytes]:
        text = memoryview(self._text.numpy())
        start = 0
        for ends in self._ends.split(_NAMES_AT_ONCE):  # not a list of all of them
            for end in ends.tolist():
                yield bytes(text[start:end])
                start = end


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


class Cifar10Source:
    """The 50,000 training or the 10,000 test images of CIFAR-10, 32x32, in memory.

    Args:
        root: the folder that torchvision has downloaded to; it checks the files' MD5 sums.
        train: the training images instead of the test images.

    Raises:
        DataError: the files are not there, or damaged.
    """

    def __init__(self, root: str | Path, train: bool) -> None:
        try:
            files = CIFAR10(str(root), train=train, download=False)
        except RuntimeError as error:
            raise DataError(
                f"{root} does not hold CIFAR-10, or not undamaged; download it with: "
                'python -c "from torchvision.datasets import CIFAR10; '
                f'CIFAR10({str(root)!r}, download=True)"'
            ) from error
        self.classes = list(files.classes)
        self._part = "train" if train else "test"
        self._pixels = torch.from_numpy(np.ascontiguousarray(files.data))
        self._labels = torch.tensor(files.targets, dtype=torch.int64)

    @property
    def labels(self) -> np.ndarray:
        """int64 [images]"""
        return self._labels.numpy()

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        return f"{self._part}/{index:05d}"

    def load(self, index: int) -> np.ndarray:
        """uint8 RGB [32, 32, 3]; not a copy"""
        return self._pixels[index].numpy()


_IMAGES_IN_MEMORY = 16


class SyntheticSource:
    """As many images as ImageNet has, all of them one of a few random ones made at the start.

    Args:
        size: side of the images in pixels.
        classes: how many classes; labels go round them.
        images: how many images; ImageNet has 1,281,167 to train on and 50,000 to validate.
    """

    def __init__(self, size: int, classes: int = 1000, images: int = 1281167) -> None:
        self.classes = [f"class {number:04d}" for number in range(classes)]
        self._labels = torch.arange(images) % classes
        shape = (_IMAGES_IN_MEMORY, size, size, 3)
        self._pixels = torch.from_numpy(
            np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        )

    @property
    def labels(self) -> np.ndarray:
        """int64 [images]"""
        return self._labels.numpy()

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        return f"noise {index}"

    def load(self, index: int) -> np.ndarray:
        """uint8 [size, size, 3]; not a copy"""
        return self._pixels[index % _IMAGES_IN_MEMORY].numpy()


# Of JPEGs with these, simplejpeg and Pillow make the same RGB: both decode with libjpeg-turbo. They
# turn CMYK into RGB differently.
_COLOURS = ("YCbCr", "RGB", "Gray")


def decode_image(data: bytes, name: str) -> np.ndarray:
    """The pixels that ``PIL.Image.open(file).convert("RGB")`` has; EXIF data turn nothing.

    Plain JPEGs go through simplejpeg, which is a fifth faster. Pillow decodes all else, whatever
    the file's extension says, and judges the JPEGs that simplejpeg warns about.

    Args:
        data: the content of an image file.
        name: of the file, for messages.

    Returns:
        uint8 RGB [H, W, 3], C-contiguous and writable.

    Raises:
        DataError: Pillow cannot read the image, or refuses it as a decompression bomb.
    """
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours in _COLOURS and height * width <= (Image.MAX_IMAGE_PIXELS or np.inf):
            return simplejpeg.decode_jpeg(data)
    except ValueError:  # no JPEG, or not a sound one
        pass
    return _decode_with_pillow(data, name)


def _decode_with_pillow(data: bytes, name: str) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.array(image.convert("RGB"))
    except Exception as error:  # on a broken file Pillow raises what it likes
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "no image format that is known"  # Pillow's text names the BytesIO object
        else:
            reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"The image {name} cannot be read ({reason}); fetch it again or take it out of the "
            "data."
        ) from error
