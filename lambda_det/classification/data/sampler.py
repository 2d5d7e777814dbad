"""The order of training images: endless, the same for any number of processes, resumable."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from lambda_det.data.randomness import Purpose, generator


class EpochSampler(Sampler):
    """The share of one process in an endless stream of shuffled epochs.

    Position p of the stream is image p % size of epoch p // size, in an order that depends on the
    seed and the epoch alone; process r of R takes the positions with p % R == r. So R processes
    with batches of B/R see the batches of one process with B, each epoch has each image exactly
    once, and a run resumes from its position without a record of anything else.

    Args:
        size: images of the data set, at least 1.
        seed: from 0.
        start: position of the whole stream to begin with, for a process the first of its own
            from there.
        rank: this process, from 0.
        world_size: processes.
    """

    def __init__(self, size: int, seed: int, start: int, rank: int, world_size: int) -> None:
        self._size = size
        self._seed = seed
        self._first = start + (rank - start) % world_size
        self._world_size = world_size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (epoch, index) without end."""
        position = self._first
        while True:
            epoch, offset = divmod(position, self._size)
            indices = self._order(epoch)[offset :: self._world_size]
            for index in indices:
                yield epoch, int(index)
            # The next of its own lies in the next epoch, or in a later one if epochs are short
            position += len(indices) * self._world_size

    def _order(self, epoch: int) -> np.ndarray:
        return generator(Purpose.ORDER, self._seed, epoch).permutation(self._size)
