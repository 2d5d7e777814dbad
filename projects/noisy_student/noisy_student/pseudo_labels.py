"""Images with labels of a teacher: the file of the labels, and the source that reads it.

The file is UTF-8 text that can be written and read line by line. After the head
    # lambda_det pseudo-labels 2
    # classes: ["n01440764", ...]
    # teacher: ...
    # root: ...
each line has the name of an image, a tab, and the most probable classes with the teacher's
probabilities, the highest first: ``3:0.8731,17:0.0502``. A hard label is ``3:1``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from lambda_det.classification.data.sources import (
    FileSource,
    check_same_classes,
    image_files,
)
from lambda_det.errors import DataError, printable

_FIRST_LINE = "# lambda_det pseudo-labels 2"
_PAIR = r"[0-9]{1,9}:[0-9][0-9.]{0,11}(?:e-[0-9]{1,2})?"
_ROW = re.compile(rf"([^\t]+)\t((?:{_PAIR},)*{_PAIR})")
_SUM = 1.001  # the largest sum of rounded probabilities
# longest line of any file name
_TEXT = {"encoding": "utf-8", "errors": "surrogateescape", "newline": "\n"}


class PackedNames:
    """File names by index from 0, millions of them in two tensors.

    A list of strings would be copied into every worker of a loader, because reading an element
    writes its reference count (https://github.com/pytorch/pytorch/issues/13246). Tensors are shared
    with forked workers, and through shared memory with spawned ones.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        text, ends = bytearray(), array("q")
        for name in names:
            text += os.fsencode(name)
            ends.append(len(text))
        self._text = torch.from_numpy(np.frombuffer(text, dtype=np.uint8))
        self._ends = torch.from_numpy(np.array(ends, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"name {index} of {len(self)}")
        start = int(self._ends[index - 1]) if index else 0
        return os.fsdecode(self._text[start : int(self._ends[index])].numpy().tobytes())


@dataclasses.dataclass
class PseudoLabels:
    """The content of a file of pseudo-labels.

    Attributes:
        classes: names of the classes.
        teacher: a description of the teacher.
        root: the folder from which the names started when the labels were made.
        names: paths of the images.
        ends: int64 [images], where the pairs of each image end.
        pairs: int32 [pairs], indices of ``classes``, the most probable of an image first.
        probabilities: float32 [pairs].
    """

    classes: list[str]
    teacher: str
    root: str
    names: PackedNames
    ends: np.ndarray
    pairs: np.ndarray
    probabilities: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """Where the pairs of each image start, int64 [images]."""
        return np.concatenate([[0], self.ends])[:-1]

    @property
    def labels(self) -> np.ndarray:
        """The most probable class of each image, int64 [images]."""
        return self.pairs[self.starts].astype(np.int64)


def write_pseudo_labels(
    path: str | Path,
    rows: Iterable[tuple[str, Iterable[tuple[int, float]]]],
    *,
    classes: list[str],
    teacher: str,
    root: str,
) -> int:
    """Write a file of pseudo-labels. It gets its name when it is complete.

    Args:
        path: the file; an existing one is replaced.
        rows: for each image the name below ``root``, and class indices with their probabilities,
            the most probable first.
        classes: names of the classes.
        teacher: a description of the teacher, in one line.
        root: the folder from which the names start.

    Returns:
        The number of rows.

    Raises:
        DataError: a name has a tab or a line break in it.
    """
    partial = Path(f"{path}.partial")
    count = 0
    try:
        with open(partial, "w", **_TEXT) as file:
            file.write(f"{_FIRST_LINE}\n# classes: {json.dumps(classes)}\n")
            file.write(f"# teacher: {teacher}\n# root: {root}\n")
            for name, pairs in rows:
                file.write(row(name, pairs))
                count += 1
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def row(name: str, pairs: Iterable[tuple[int, float]]) -> str:
    """The line of an image.

    Raises:
        DataError: its name has a tab or a line break in it.
    """
    if "\t" in name or "\n" in name:
        raise DataError(
            f"The image {name!r} has a tab or a line break in its name, which a list of labels "
            "cannot hold; rename it."
        )
    return f"{name}\t{','.join(f'{label}:{value:.4f}' for label, value in pairs)}\n"


def read_pseudo_labels(path: str | Path) -> PseudoLabels:
    """Read a file of pseudo-labels; a line takes about ten microseconds.

    Raises:
        DataError: the file cannot be read, or is not one of pseudo-labels; the text names the line.
    """
    ends, pairs, probabilities = array("q"), array("i"), array("f")

    def names() -> Iterator[str]:
        for number, line in enumerate(file, start=len(_FIELDS) + 2):
            name, labels, values = _parse(line.rstrip("\n"), len(head["classes"]), path, number)
            pairs.extend(labels)
            probabilities.extend(values)
            ends.append(len(pairs))
            yield name

    try:
        with open(path, **_TEXT) as file:
            head = _read_head(file, path)
            packed = PackedNames(names())
    except OSError as error:
        raise DataError(
            f"The pseudo-labels {path} cannot be read ({error.strerror}); check DATA.PSEUDO_LABELS."
        ) from error
    return PseudoLabels(
        **head,
        names=packed,
        ends=np.array(ends, np.int64),
        pairs=np.array(pairs, np.int32),
        probabilities=np.array(probabilities, np.float32),
    )


class PseudoLabelSource(FileSource):
    """The images that a file of pseudo-labels names; ``labels`` are the most probable classes.

    Args:
        path: a file of :func:`write_pseudo_labels`.
        root: the folder from which its names start now.
        classes: the training data's.

    Raises:
        DataError: the file is not one of pseudo-labels, has other classes or no images, or names
            images that are not below ``root``.
    """

    def __init__(self, path: str | Path, root: str | Path, classes: list[str]) -> None:
        file = read_pseudo_labels(path)
        if not len(file.names):
            raise DataError(f"The pseudo-labels {path} hold no image; check DATA.PSEUDO_LABELS.")
        check_same_classes(classes, file.classes, "the training data", str(path))
        _check_images(path, file.names, root)
        super().__init__(root, file.names, file.labels, classes)
        self._ends = torch.from_numpy(file.ends)  # tensors, which spawned workers share
        self._pairs = torch.from_numpy(file.pairs)
        self._probabilities = torch.from_numpy(file.probabilities)

    def soft_label(self, index: int, temperature: float) -> np.ndarray:
        """The teacher's probabilities, float32 [classes].

        Classes that the file does not name share the rest.

        Args:
            index: of the image.
            temperature: above 0; the probabilities p become p^(1 / temperature), normalised.
        """
        first = int(self._ends[index - 1]) if index else 0
        last = int(self._ends[index])
        pairs = self._pairs[first:last].numpy()
        probabilities = self._probabilities[first:last].numpy().astype(np.float64)
        rest = max(1 - probabilities.sum(), 0) / max(len(self.classes) - len(pairs), 1)
        result = np.full(len(self.classes), rest)
        result[pairs] = probabilities
        result = (result / result.max()) ** (1 / temperature)
        return (result / result.sum()).astype(np.float32)


def _check_images(path: str | Path, names: PackedNames, root: str | Path) -> None:
    # Hashes of 8 bytes, not a set of strings: there may be a hundred million. Two names with the
    # same hash are practically impossible.
    there = np.fromiter((hash(os.fsencode(name)) for name in image_files(root)), dtype=np.int64)
    here = np.fromiter((hash(os.fsencode(name)) for name in names), dtype=np.int64)
    missing = ~np.isin(here, there)
    if missing.any():
        first = printable(names[int(np.argmax(missing))])
        raise DataError(
            f"{missing.sum()} of the {len(names)} images that {path} names are not in {root}, the "
            f"first being {first}; set DATA.PSEUDO_IMAGES to the folder that they start from."
        )


def _read_head(file: TextIO, path: str | Path) -> dict:
    """The fields before the rows; the file then stands at the first row."""
    head = {}
    if file.readline() != f"{_FIRST_LINE}\n":
        raise DataError(
            f"{path}, line 1: a file of pseudo-labels starts with {_FIRST_LINE!r}; make it with "
            "projects/noisy_student/pseudo_label.py."
        )
    for number, (name, read) in enumerate(_FIELDS.items(), start=2):
        key, _, value = file.readline().rstrip("\n").partition(": ")
        try:
            if key != f"# {name}":
                raise ValueError
            head[name] = read(value)
        except ValueError:
            raise DataError(
                f"{path}, line {number}: '# {name}: ...' should stand here; make the file again "
                "with projects/noisy_student/pseudo_label.py."
            ) from None
    return head


def _class_list(text: str) -> list[str]:
    classes = json.loads(text)
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError
    return classes


_FIELDS = {"classes": _class_list, "teacher": str, "root": str}


def _parse(
    line: str, classes: int, path: str | Path, number: int
) -> tuple[str, list[int], list[float]]:
    """The name of an image, its classes and their probabilities; DataError with the number."""
    try:
        name, text = _ROW.fullmatch(line).groups()
        numbers = text.replace(":", ",").split(",")
        labels, values = list(map(int, numbers[0::2])), list(map(float, numbers[1::2]))
        if (
            max(labels) < classes
            and values[0] == max(values) > 0
            and sum(values) <= _SUM
            and len(set(labels)) == len(labels)
        ):
            return name, labels, values
    except (AttributeError, ValueError):  # no match; 1.2.3
        pass
    raise DataError(
        f"{path}, line {number}: {line[:80]!r} is not a name, a tab and pairs "
        f"CLASS:PROBABILITY of classes below {classes}, the highest probability first; make the "
        "file again with projects/noisy_student/pseudo_label.py."
    )
