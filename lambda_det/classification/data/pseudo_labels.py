"""Images with labels of a teacher: the file that holds the labels, and the source made of it.

The file is UTF-8 text that can be written and read line by line: after the head
    # lambda_det pseudo-labels 1
    # classes: ["n01440764", ...]
    # teacher: ...
    # root: ...
each line has the name of an image, the index of its class and the teacher's confidence, separated
by tabs.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lambda_det.classification.data.sources import (
    FileSource,
    PackedNames,
    check_same_classes,
    image_files,
)
from lambda_det.errors import DataError

_FIRST_LINE = "# lambda_det pseudo-labels 1"
# Bytes to read at a time, and of the longest line of the head that is believed
_CHUNK = _LONGEST = 1 << 24


@dataclasses.dataclass
class PseudoLabels:
    """What a file of pseudo-labels says.

    Attributes:
        classes: names of the classes.
        teacher: what the labels are from, for people to read.
        root: folder that the names started from when the labels were made.
        names: paths of the images.
        labels: int64 [images], indices of ``classes``.
        confidences: float32 [images], from 0 to 1.
    """

    classes: list[str]
    teacher: str
    root: str
    names: PackedNames
    labels: np.ndarray
    confidences: np.ndarray


def write_pseudo_labels(
    path: str | Path,
    rows: Iterable[tuple[str, int, float]],
    *,
    classes: list[str],
    teacher: str,
    root: str,
) -> int:
    """Write a file of pseudo-labels; it gets its name when it is complete.

    Args:
        path: the file; one of that name is replaced.
        rows: name below ``root``, class index and confidence of each image, one at a time.
        classes: names of the classes.
        teacher: what the labels are from, in one line.
        root: folder that the names start from.

    Returns:
        How many rows there were.

    Raises:
        DataError: a name has a tab or a line break in it.
    """
    partial = Path(f"{path}.partial")
    count = 0
    try:
        with open(partial, "w", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            file.write(f"{_FIRST_LINE}\n# classes: {json.dumps(classes)}\n")
            file.write(f"# teacher: {teacher}\n# root: {root}\n")
            for name, label, confidence in rows:
                if "\t" in name or "\n" in name:
                    raise DataError(
                        f"The image {name!r} has a tab or a line break in its name, which a list "
                        "of labels cannot hold; rename it."
                    )
                file.write(f"{name}\t{label}\t{confidence:.4f}\n")
                count += 1
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def read_pseudo_labels(path: str | Path) -> PseudoLabels:
    """Read a file of pseudo-labels, some hundred million lines if need be.

    Raises:
        DataError: the file cannot be read, or is none; the text names the line.
    """
    try:
        with open(path, "rb") as file:
            head = _read_head(file, path)
            text, lengths, labels, confidences = bytearray(), [], [], []
            line = len(head) + 2
            for chunk in _whole_lines(file):
                columns = _parse(chunk, len(head["classes"]))
                if columns is None:
                    raise DataError(_bad_line(chunk, line, len(head["classes"]), path))
                text += columns[0]
                lengths.append(columns[1])
                labels.append(columns[2])
                confidences.append(columns[3])
                line += len(columns[1])
    except OSError as error:
        raise DataError(
            f"The pseudo-labels {path} cannot be read ({error.strerror}); check DATA.PSEUDO_LABELS."
        ) from error
    if not labels:
        raise DataError(f"The pseudo-labels {path} hold no image; check DATA.PSEUDO_LABELS.")
    return PseudoLabels(
        **head,
        names=PackedNames.from_bytes(text, np.concatenate(lengths)),
        labels=np.concatenate(labels),
        confidences=np.concatenate(confidences),
    )


class PseudoLabelSource(FileSource):
    """The images that a file of pseudo-labels names.

    Args:
        path: a file of :func:`write_pseudo_labels`.
        root: the folder that its names start from, now.
        classes: the training data's.

    Raises:
        DataError: the file is none, has other classes, or names images that are not below ``root``.
    """

    def __init__(self, path: str | Path, root: str | Path, classes: list[str]) -> None:
        file = read_pseudo_labels(path)
        check_same_classes(classes, file.classes, "the training data", str(path))
        _check_images(path, file.names, root)
        super().__init__(root, file.names, file.labels, classes)


def _check_images(path: str | Path, names: PackedNames, root: str | Path) -> None:
    # Hashes of 8 bytes, not a set of strings: there may be a hundred million. That a missing name
    # has the hash of another is not to be expected in the life of a person.
    there = np.fromiter((hash(os.fsencode(name)) for name in image_files(root)), dtype=np.int64)
    missing = ~np.isin(names.hashes(), there)
    if missing.any():
        first = names[int(np.argmax(missing))]
        raise DataError(
            f"{missing.sum()} of the {len(names)} images that {path} names are not in {root}, the "
            f"first being {first}; set DATA.PSEUDO_IMAGES to the folder that they start from."
        )


def _read_head(file: BinaryIO, path: str | Path) -> dict:
    """The fields before the rows; the file then stands at the first row."""
    head = {}
    if _line(file) != _FIRST_LINE:
        raise DataError(
            f"{path}, line 1: this is no file of pseudo-labels, which begins with "
            f"{_FIRST_LINE!r}; make one with tools/pseudo_label.py."
        )
    for number, (name, read) in enumerate(_FIELDS.items(), start=2):
        key, _, value = _line(file).partition(": ")
        try:
            if key != f"# {name}":
                raise ValueError
            head[name] = read(value)
        except ValueError:
            raise DataError(
                f"{path}, line {number}: '# {name}: ...' should stand here; make the file again "
                "with tools/pseudo_label.py."
            ) from None
    return head


def _line(file: BinaryIO) -> str:
    return file.readline(_LONGEST).decode("utf-8", errors="surrogateescape").rstrip("\n")


def _class_list(text: str) -> list[str]:
    classes = json.loads(text)
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError
    return classes


_FIELDS = {"classes": _class_list, "teacher": str, "root": str}


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of a file in large pieces that end with a line."""
    rest = b""
    while chunk := file.read(_CHUNK):
        rest, _, tail = (rest + chunk).rpartition(b"\n")
        if rest:
            yield rest + b"\n"
        rest = tail
    if rest:
        yield rest + b"\n"


def _parse(chunk: bytes, classes: int) -> tuple[bytes, np.ndarray, np.ndarray, np.ndarray] | None:
    """Take lines apart, all at once: a loop over them would take minutes for a hundred million.

    Returns:
        The names one behind the other, their lengths in bytes, the labels and the confidences;
        None if a line is not as it should be.
    """
    characters = np.frombuffer(chunk, dtype=np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    tabs = np.flatnonzero(characters == ord("\t"))
    starts = np.concatenate([[0], ends[:-1] + 1])
    if len(tabs) != 2 * len(ends):
        return None
    first, second = tabs.reshape(-1, 2).T
    if not ((starts < first) & (second < ends)).all():
        return None
    fields = chunk[:-1].replace(b"\n", b"\t").split(b"\t")
    try:
        labels = np.array(fields[1::3]).astype(np.int64)
        confidences = np.array(fields[2::3]).astype(np.float32)
    except (ValueError, OverflowError):
        return None
    within = (labels >= 0) & (labels < classes) & (confidences >= 0) & (confidences <= 1)
    if not within.all():
        return None
    return b"".join(fields[0::3]), first - starts, labels, confidences


def _bad_line(chunk: bytes, line: int, classes: int, path: str | Path) -> str:
    lines = chunk.split(b"\n")[:-1]
    bad = next(n for n, text in enumerate(lines) if _parse(text + b"\n", classes) is None)
    return (
        f"{path}, line {line + bad}: {lines[bad][:80].decode('utf-8', errors='replace')!r} is no "
        f"name, class index below {classes} and confidence from 0 to 1, separated by tabs; make "
        "the file again with tools/pseudo_label.py."
    )
