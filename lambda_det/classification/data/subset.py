"""Parts of a source: subsets, held-out images, and lists of names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from lambda_det.classification.data.sources import Source
from lambda_det.errors import DataError, refused
from lambda_det.files import replace_text
from lambda_det.training.randomness import Purpose, generator


class Subset(Source):
    """Some images of a source, in the order of ``indices``, an integer array [images]."""

    def __init__(self, source: Source, indices: np.ndarray) -> None:
        super().__init__(source.classes, source.labels[indices])
        self._source = source
        self._indices = torch.from_numpy(indices.astype(np.int64))

    def name(self, index: int) -> str:
        return self._source.name(int(self._indices[index]))

    def load(self, index: int) -> np.ndarray:
        return self._source.load(int(self._indices[index]))


def take_fraction(source: Source, fraction: float, seed: int) -> np.ndarray:
    """Choose a share of the images of each class, at least one of each.

    Args:
        source: what to choose from.
        fraction: the share, above 0 and up to 1.
        seed: another seed makes another choice.

    Returns:
        Ascending indices of round(fraction * n) images of each class of n.
    """
    chosen = [
        indices[: max(round(fraction * len(indices)), 1)]
        for indices in _shuffled_classes(source, Purpose.FRACTION, seed)
    ]
    return np.sort(np.concatenate(chosen))


def split_held_out(source: Source, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Hold out a share of the images of each class.

    Args:
        source: what to split.
        fraction: the share, above 0 and below 1.
        seed: another seed makes another choice.

    Returns:
        Ascending indices of the images to train on, and of those held out: round(fraction * n) of
        each class of n, but at least one, and never all, so none of a class with a single image.
    """
    kept, held_out = [], []
    for indices in _shuffled_classes(source, Purpose.HELD_OUT, seed):
        count = min(max(round(fraction * len(indices)), 1), len(indices) - 1)
        held_out.append(indices[:count])
        kept.append(indices[count:])
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(held_out))


def _shuffled_classes(source: Source, purpose: Purpose, seed: int) -> Iterator[np.ndarray]:
    """Yield the shuffled indices of the images of each class. A class may have none."""
    by_class = np.argsort(source.labels, kind="stable")
    ends = np.cumsum(np.bincount(source.labels))
    for label, indices in enumerate(np.split(by_class, ends[:-1])):
        yield generator(purpose, seed, label).permutation(indices)


def write_held_out(path: str | Path, source: Source) -> None:
    """Write the names of the images that are held out, one a line."""
    replace_text(path, _list_of(source))


def check_held_out(path: str | Path, source: Source) -> None:
    """Check that a resumed run holds out the images that it held out before.

    Args:
        path: the run's list, from :func:`write_held_out`.
        source: the images held out now.

    Raises:
        DataError: the list cannot be read, or has other images.
    """
    with refused(DataError, f"The list {path} cannot be read", "", OSError):
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    if text != _list_of(source):
        raise DataError(
            f"The held-out images differ from those of {path}, so the run would be evaluated on "
            "images it has trained on: restore DATA.TRAIN, DATA.FRACTION, DATA.HELD_OUT and SEED, "
            "or give another OUTPUT_DIR."
        )


def _list_of(source: Source) -> str:
    """The names of all images, one a line."""
    return "".join(f"{source.name(index)}\n" for index in range(len(source)))
