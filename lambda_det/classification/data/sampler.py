"""The order of training images: endless, the same for any number of processes, resumable."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from torch.utils.data import Sampler

from lambda_det.training.randomness import Purpose, generator


class EpochBatches(Sampler):
    """The batches of one process in an endless stream of shuffled epochs.

    Position p of the stream is image p % size of epoch p // size, in an order that depends on the
    seed and the epoch alone. The processes take turns, each for one batch. So R processes with
    batches of B/R see the batches that one sees that accumulates R of them, each epoch has each
    image exactly once, and a run resumes from its position without a record of anything else.

    Args:
        size: images of the data set, at least 1.
        seed: from 0.
        start: position of the whole stream to begin with.
        batch_size: images of one batch of this process.
        rank: this process, from 0.
        world_size: processes.
    """

    def __init__(
        self, size: int, seed: int, start: int, batch_size: int, rank: int, world_size: int
    ) -> None:
        self._size = size
        self._seed = seed
        self._first = start + rank * batch_size
        self._batch_size = batch_size
        self._world_size = world_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yield lists of (epoch, index) without end."""
        order = lru_cache(2)(self._order)
        for first in itertools.count(self._first, self._batch_size * self._world_size):
            places = (
                divmod(position, self._size) for position in range(first, first + self._batch_size)
            )
            yield [(epoch, int(order(epoch)[offset])) for epoch, offset in places]

    def _order(self, epoch: int) -> np.ndarray:
        return generator(Purpose.ORDER, self._seed, epoch).permutation(self._size)
