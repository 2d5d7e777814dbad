"""Where the images of a tar file are, kept in a JSON file beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tarfile
from pathlib import Path
from typing import Any

from lambda_det.classification.data.folder import is_image
from lambda_det.errors import DataError

_VERSION = 2
_BLOCK = 512  # of the tar format, in bytes


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
    """Read ``SHARD.tar.index``, or make it if there is none, or one of an older shard.

    Where the folder is read-only the index is made anew each time.

    Raises:
        DataError: the shard cannot be read, is damaged, or an image in it has no class.
    """
    try:
        state = os.stat(shard)
    except OSError as error:
        raise DataError(f"The shard {shard} cannot be read ({error.strerror}).") from error
    stamp = {"version": _VERSION, "size": state.st_size, "modified": state.st_mtime_ns}
    file = Path(f"{shard}.index")
    index = _load(file, stamp)
    if index is None:
        index = _make(shard, state.st_size)
        with contextlib.suppress(OSError):
            _save(file, {**stamp, **dataclasses.asdict(index)})
    return index


def _load(file: Path, stamp: dict[str, int]) -> ShardIndex | None:
    """The index in ``file``, or None if it is not of the shard as ``stamp`` describes it."""
    try:
        content = json.loads(file.read_bytes())
        if any(content[key] != value for key, value in stamp.items()):
            return None
        index = ShardIndex(*(content[field.name] for field in dataclasses.fields(ShardIndex)))
        same_length = len({len(column) for column in vars(index).values()}) == 1
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return index if same_length else None


def _save(file: Path, content: dict[str, Any]) -> None:
    partial = Path(f"{file}.{os.getpid()}")  # several processes may make it at the same time
    try:
        partial.write_text(json.dumps(content, separators=(",", ":")))
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _make(shard: Path, size: int) -> ShardIndex:
    index = ShardIndex([], [], [], [])
    classes: dict[str, str | int] = {}
    end = 0
    last = "its first member"
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                last = member.name
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                # Hidden ones, as macOS leaves beside each file, are none of the images
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
        # tarfile takes a damaged header for the end; the true end is a block of zeros.
        with open(shard, "rb") as file:
            file.seek(end)
            if file.read(_BLOCK) != bytes(_BLOCK):
                raise tarfile.ReadError("it does not end as a tar file does")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(
            f"The shard {shard} is damaged at or after {last} ({error}); copy or make it again."
        ) from error
    index.labels = [_label(shard, name, classes) for name in index.names]
    return index


def _key(name: str) -> str:
    """WebDataset's key of a member: its path up to the first point of the file's name."""
    folder, file = os.path.split(name.removeprefix("./"))
    return os.path.join(folder, file.partition(".")[0])


def _class_of(content: bytes) -> str | int:
    text = content.decode("utf-8", errors="replace").strip()
    return int(text) if text.isdecimal() else text


def _label(shard: Path, name: str, classes: dict[str, str | int]) -> str | int:
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
