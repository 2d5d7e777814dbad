"""What every set of labelled images offers, wherever it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

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
