"""Images in tar files, read at random through an index of each."""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

from lambda_det.classification.data.decode import decode_image
from lambda_det.classification.data.names import PackedNames
from lambda_det.classification.data.shard_index import read_index
from lambda_det.classification.data.subset import read_list
from lambda_det.errors import DataError

_CLASSES_FILE = "classes.txt"


class ShardSource:
    """The images of all ``*.tar`` files below a folder, in the order of their names.

    The class of an image is the first folder of its path in the shard, as
    ``datasets/make_shards.py`` writes it, or stands in a member ``KEY.cls`` beside ``KEY.jpg``, as
    in WebDataset's shards: a class name, or a number, which ``classes.txt`` in the same folder
    gives the names for, one on each line. With that file its order is the classes'; without, they
    are sorted.

    Args:
        root: the folder.

    Raises:
        DataError: there is no shard, one is damaged, or the class of an image cannot be told.
    """

    def __init__(self, root: str | Path) -> None:
        paths = _shard_files(Path(root))
        self._root = str(root)
        self._shards = [str(path.relative_to(root)) for path in paths]
        found: dict[str | int, int] = {}  # numbers of the classes in the order they come
        text, lengths, columns = bytearray(), array("q"), []
        for shard, path in enumerate(paths):  # one at a time, as an index has many strings
            index = read_index(path)
            for name in index.names:
                encoded = os.fsencode(name)
                text += encoded
                lengths.append(len(encoded))
            labels = [found.setdefault(label, len(found)) for label in index.labels]
            columns.append(
                np.array([[shard] * len(labels), index.offsets, index.sizes, labels], np.int64)
            )
        self._members = PackedNames.from_bytes(text, np.array(lengths, dtype=np.int64))
        table = torch.from_numpy(np.concatenate(columns, axis=1))
        self._shard, self._offsets, self._sizes, found_labels = table
        if not len(self):
            raise DataError(f"The shards in {root} hold no image; make them again.")
        self.classes = _class_names(Path(root), list(found))
        self._labels = torch.from_numpy(_numbers(list(found), self.classes))[found_labels]
        self._files = _OpenFiles()
        if (self._labels < 0).any():
            unknown = int(self._labels.argmin())
            raise DataError(
                f"{self._path(unknown)} is of class {list(found)[found_labels[unknown]]!r}, which "
                f"is not among the {len(self.classes)} of {_CLASSES_FILE} beside the shard; "
                "correct one of them."
            )

    @property
    def labels(self) -> np.ndarray:
        """int64 [images]"""
        return self._labels.numpy()

    def __len__(self) -> int:
        return len(self._members)

    def name(self, index: int) -> str:
        """Path of the shard below the root, and of the member in the shard."""
        return f"{self._shards[int(self._shard[index])]}/{self._members[index]}"

    def load(self, index: int) -> np.ndarray:
        """The image, uint8 RGB [H, W, 3]; a DataError names shard and member if it is broken."""
        name = self._path(index)
        shard = os.path.join(self._root, self._shards[int(self._shard[index])])
        size = int(self._sizes[index])
        try:
            data = self._files.read(shard, int(self._offsets[index]), size)
        except OSError as error:
            raise DataError(f"The image {name} cannot be read ({error.strerror}).") from error
        if len(data) < size:
            raise DataError(
                f"The image {name} cannot be read: the shard has been cut off since the run "
                "began; copy it again."
            )
        return decode_image(data, name)

    def _path(self, index: int) -> str:
        return os.path.join(self._root, self.name(index))


class _OpenFiles:
    """Files that stay open for the next read; each process that this is pickled to opens its own.

    A forked process shares its parent's, which does no harm as ``pread`` has no position.
    """

    # A process may have 1024 files open, and a loader's worker needs some for itself
    _LIMIT = 256

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()

    def __getstate__(self) -> dict[str, OrderedDict]:
        return {"_open": OrderedDict()}

    def __del__(self) -> None:
        for number in self._open.values():
            os.close(number)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset``, fewer at the end of the file."""
        if path not in self._open:
            if len(self._open) == self._LIMIT:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open.move_to_end(path)
        return os.pread(self._open[path], size, offset)


def _shard_files(root: Path) -> list[Path]:
    if not root.is_dir():
        raise DataError(
            f"The folder of shards {root} does not exist; check the DATA section of the "
            "configuration."
        )
    paths = sorted(path for path in root.rglob("*.tar") if not path.name.startswith("."))
    if not paths:
        raise DataError(
            f"{root} holds no .tar files; make some with datasets/make_shards.py, or set "
            "DATA.FORMAT folder."
        )
    return paths


def _class_names(root: Path, found: list[str | int]) -> list[str]:
    file = root / _CLASSES_FILE
    if file.is_file():
        names = read_list(file)
        seen = {""}
        for number, name in enumerate(names, start=1):
            if name.strip() in seen:
                what = f"names {name!r} again" if name.strip() else "holds no name"
                raise DataError(f"{file}, line {number}, {what}; it must hold each class once.")
            seen.add(name.strip())
        return names
    if any(isinstance(label, int) for label in found):
        raise DataError(
            f"The shards in {root} number their classes; name them in {file}, one on each line."
        )
    return sorted(found)


def _numbers(found: list[str | int], classes: list[str]) -> np.ndarray:
    """The index of each class that was found by its name or number; -1 where there is none."""
    number_of: dict[str | int, int] = {name: number for number, name in enumerate(classes)}
    number_of |= {number: number for number in range(len(classes))}
    return np.array([number_of.get(label, -1) for label in found], dtype=np.int64)
