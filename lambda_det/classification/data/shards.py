"""Images in tar files, read at random through an index that is kept beside each of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from lambda_det.classification.data.sources import PackedNames, Source, decode_image, is_image
from lambda_det.classification.data.subset import read_list
from lambda_det.errors import DataError, refused

_INDEX_VERSION = 2
_TAR_BLOCK = 512  # bytes


@dataclasses.dataclass
class ShardIndex:
    """The images of one shard, in its order.

    Attributes:
        names: paths of the members.
        offsets: where their content begins, in bytes.
        sizes: of their content, in bytes.
        labels: a class name or number each.
    """

    names: list[str]
    offsets: list[int]
    sizes: list[int]
    labels: list[str | int]


def read_index(shard: Path) -> ShardIndex:
    """Read ``SHARD.tar.index``. It is made if it is missing or of an older shard.

    In a read-only folder the index is made anew each time.

    Raises:
        DataError: the shard cannot be read, is damaged, or an image in it has no class.
    """
    with refused(DataError, f"The shard {shard} cannot be read", "", OSError):
        state = os.stat(shard)
    stamp = {"version": _INDEX_VERSION, "size": state.st_size, "modified": state.st_mtime_ns}
    file = Path(f"{shard}.index")
    index = _load_index(file, stamp)
    if index is None:
        index = _make_index(shard)
        with contextlib.suppress(OSError):
            _save_index(file, {**stamp, **dataclasses.asdict(index)})
    return index


def _load_index(file: Path, stamp: dict[str, int]) -> ShardIndex | None:
    """The index in ``file``, or None if it does not belong to the shard of ``stamp``."""
    try:
        content = json.loads(file.read_bytes())
        if any(content[key] != value for key, value in stamp.items()):
            return None
        index = ShardIndex(*(content[field.name] for field in dataclasses.fields(ShardIndex)))
        os.fsencode("".join(index.names))  # fails for names that no file can have
        columns = zip(index.offsets, index.sizes, index.labels, index.names, strict=True)
        is_sound = all(
            type(offset) is int is type(size)
            and min(offset, size) >= 0
            and offset + size <= stamp["size"]
            and type(label) in (int, str)
            for offset, size, label, _ in columns
        )
    except (OSError, ValueError, KeyError, TypeError):  # a damaged file is made again
        return None
    return index if is_sound else None


def _save_index(file: Path, content: dict[str, Any]) -> None:
    partial = Path(f"{file}.{os.getpid()}")  # several processes may make it at the same time
    try:
        partial.write_text(json.dumps(content, separators=(",", ":")))
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _make_index(shard: Path) -> ShardIndex:
    index = ShardIndex([], [], [], [])
    classes: dict[str, str | int] = {}
    end = 0
    last = "its first member"
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                last = member.name
                end = member.offset_data + -(-member.size // _TAR_BLOCK) * _TAR_BLOCK
                # macOS leaves a hidden file beside each image
                parts = member.name.split("/")
                if member.isdir() or any(part.startswith(".") and part != "." for part in parts):
                    continue
                if (member.islnk() or member.issym()) and is_image(member.name):
                    raise DataError(
                        f"{shard}/{member.name} is a link to {member.linkname} and holds no image; "
                        "make the shard again with the files themselves."
                    )
                if not member.isreg():
                    continue
                if member.name.endswith(".cls"):
                    classes[_key(member.name)] = _class_of(tar.extractfile(member).read())
                elif is_image(member.name):
                    index.names.append(member.name)
                    index.offsets.append(member.offset_data)
                    index.sizes.append(member.size)
        # tarfile stops at a damaged header without an error; the true end is a block of zeros.
        with open(shard, "rb") as file:
            file.seek(end)
            if file.read(_TAR_BLOCK) != bytes(_TAR_BLOCK):
                raise tarfile.ReadError("it does not end as a tar file does")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(
            f"The shard {shard} is damaged at or after {last} ({error}); copy or make it again."
        ) from error
    index.labels = [_class_label(shard, name, classes) for name in index.names]
    return index


def _key(name: str) -> str:
    """WebDataset's key of a member: its path up to the first dot in the file's name."""
    folder, file = os.path.split(name.removeprefix("./"))
    return os.path.join(folder, file.partition(".")[0])


def _class_of(content: bytes) -> str | int:
    text = content.decode("utf-8", errors="replace").strip()
    return int(text) if text.isdecimal() else text


def _class_label(shard: Path, name: str, classes: dict[str, str | int]) -> str | int:
    key = _key(name)
    if key in classes:
        return classes[key]
    folder, slash, _ = name.removeprefix("./").partition("/")
    if not slash:
        raise DataError(
            f"{shard}/{name} has no class: it lies in no folder, and there is no {key}.cls "
            "beside it in the shard."
        )
    return folder


_CLASSES_FILE = "classes.txt"


class ShardSource(Source):
    """The images of all ``*.tar`` files below a folder, in the order of their names.

    The class of an image is the first folder of its path in the shard, as
    ``datasets/make_shards.py`` writes it, or the content of a member ``KEY.cls`` beside
    ``KEY.jpg``, as in WebDataset's shards: a class name, or a number. ``classes.txt`` in the same
    folder gives the names of numbers, one a line, and the order of the classes. Without it, the
    classes are sorted.

    Args:
        root: the folder.

    Raises:
        DataError: there is no shard, one is damaged, or the class of an image is unknown.
    """

    def __init__(self, root: str | Path) -> None:
        paths = _shard_files(Path(root))
        self._root = str(root)
        self._shards = [str(path.relative_to(root)) for path in paths]
        found: dict[str | int, int] = {}  # classes, numbered in the order of their first images
        columns = []

        def members() -> Iterator[str]:
            for shard, path in enumerate(paths):  # one at a time: an index has many strings
                index = read_index(path)
                labels = [found.setdefault(label, len(found)) for label in index.labels]
                columns.append(
                    np.array([[shard] * len(labels), index.offsets, index.sizes, labels], np.int64)
                )
                yield from index.names

        self._members = PackedNames(members())
        table = torch.from_numpy(np.concatenate(columns, axis=1))
        self._shard, self._offsets, self._sizes, found_labels = table
        if not len(self._members):
            raise DataError(f"The shards in {root} hold no image; make them again.")
        classes = _class_names(Path(root), list(found))
        super().__init__(classes, _numbers(list(found), classes)[found_labels.numpy()])
        _opened.cache_clear()  # a shard may be another one since a source before this read it
        if (self._labels < 0).any():
            unknown = int(self._labels.argmin())
            raise DataError(
                f"{self._path(unknown)} is of class {list(found)[found_labels[unknown]]!r}, which "
                f"is not among the {len(self.classes)} of {_CLASSES_FILE} beside the shard; "
                "correct one of them."
            )

    def name(self, index: int) -> str:
        """Path of the shard below the root, and of the member in the shard."""
        return f"{self._shards[int(self._shard[index])]}/{self._members[index]}"

    def load(self, index: int) -> np.ndarray:
        name = self._path(index)
        shard = os.path.join(self._root, self._shards[int(self._shard[index])])
        size, offset = int(self._sizes[index]), int(self._offsets[index])
        what = f"The image {name} cannot be read"
        with refused(DataError, what, "copy the shard again", OSError):
            data = os.pread(_opened(shard).fileno(), size, offset)
            if len(data) < size:
                raise OSError("the shard has been cut off since the run began")
        return decode_image(data, name)

    def _path(self, index: int) -> str:
        return os.path.join(self._root, self.name(index))


# A process may have 1024 files open, and a loader's worker needs some for itself
@lru_cache(256)
def _opened(shard: str) -> BinaryIO:
    """A shard, open for the next images. Forked processes share it: ``pread`` has no position."""
    return open(shard, "rb", buffering=0)


def _shard_files(root: Path) -> list[Path]:
    paths = sorted(path for path in root.rglob("*.tar") if not path.name.startswith("."))
    if not paths:
        raise DataError(
            f"The folder of shards {root} holds no .tar files; correct the DATA section of the "
            "configuration, make some with datasets/make_shards.py, or set DATA.FORMAT folder."
        )
    return paths


def _class_names(root: Path, found: list[str | int]) -> list[str]:
    file = root / _CLASSES_FILE
    if file.is_file():
        names = read_list(file)
        wrong = [n for n, count in Counter(names).items() if count > 1 or not n.strip()]
        if wrong:
            raise DataError(f"{file} holds {wrong[0]!r}; each line must name a class of its own.")
        return names
    if any(isinstance(label, int) for label in found):
        raise DataError(
            f"The shards in {root} number their classes; name them in {file}, one on each line."
        )
    return sorted(found)


def _numbers(found: list[str | int], classes: list[str]) -> np.ndarray:
    """The index of each class in ``found``, a name or number; -1 for a class without one."""
    number_of: dict[str | int, int] = {name: number for number, name in enumerate(classes)}
    number_of |= {number: number for number in range(len(classes))}
    return np.array([number_of.get(label, -1) for label in found], dtype=np.int64)
