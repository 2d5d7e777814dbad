"""Parts of a source: subsets and held-out images."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from lambda_det.classification.data.sources import Source
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
