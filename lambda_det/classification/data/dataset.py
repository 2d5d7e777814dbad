"""Sources as data sets of a torch DataLoader: augmented for training, plain for evaluation.

An image that cannot be read comes as a ``DataError`` in place of an item: raised in a worker, it
would reach the main process as a stack trace for a text.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch.utils.data import Dataset

from lambda_det.classification.data.source import Source
from lambda_det.errors import DataError
from lambda_det.training.randomness import Purpose, generator
from lambda_det.training.unreadable import UnreadableImages
from lambda_det.training.workers import reading

# Image uint8 [S, S, 3], label, and index in the source
Item = tuple[np.ndarray, int, int]


class AugmentedDataset(Dataset):
    """Training items by (epoch, index), each a function of seed, epoch and index alone.

    Args:
        source: the training images.
        transform: from an image, uint8 [H, W, 3], and a generator to one uint8 [S, S, 3].
        seed: from 0.
        max_unreadable: how many different images may be unreadable; the next one replaces them.
    """

    def __init__(
        self,
        source: Source,
        transform: Callable[[np.ndarray, np.random.Generator], np.ndarray],
        seed: int,
        max_unreadable: int,
    ) -> None:
        self._source = source
        self._transform = transform
        self._seed = seed
        self._unreadable = UnreadableImages(
            len(source), max_unreadable, "DATA.MAX_UNREADABLE_IMAGES"
        )

    def __getitem__(self, where: tuple[int, int]) -> Item | DataError:
        epoch, index = where

        def read(candidate: int) -> Item:
            with reading(self._source.name(candidate)):
                image = self._source.load(candidate)
                rng = generator(Purpose.SAMPLE, self._seed, epoch, candidate)
                label = int(self._source.labels[candidate])
                return self._transform(image, rng), label, candidate

        try:
            return self._unreadable.next_readable(index, read)
        except DataError as error:
            return DataError(str(error))  # its cause may not be picklable


class EvalDataset(Dataset):
    """Evaluation items by index.

    Args:
        source: the images.
        transform: from an image, uint8 [H, W, 3], to one uint8 [T, T, 3].
    """

    def __init__(self, source: Source, transform: Callable[[np.ndarray], np.ndarray]) -> None:
        self._source = source
        self._transform = transform

    def __getitem__(self, index: int) -> Item | DataError:
        try:
            with reading(self._source.name(index)):
                image = self._source.load(index)
                return self._transform(image), int(self._source.labels[index]), index
        except DataError as error:
            return DataError(str(error))
