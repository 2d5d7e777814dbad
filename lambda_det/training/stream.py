"""The order of training images: it is endless, equal for any number of processes, and begins at any
place.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from detectron2.data.samplers import RepeatFactorTrainingSampler, TrainingSampler
from detectron2.utils import comm

from lambda_det.training.randomness import Purpose, generator

logger = logging.getLogger(__name__)

# Seed of the run, position in the stream of all processes, index of the image
Key = tuple[int, int, int]

_GROUPS = 16  # of one window; at most one of them has images of both orientations
_SPLITTERS = (TrainingSampler.__iter__, RepeatFactorTrainingSampler.__iter__)


@dataclass(frozen=True)
class Sources:
    """What records are read from, where several are parts of one file that takes long to read.

    Attributes:
        of_record: the number of the file of each record, int [records].
        sizes: bytes of each file once it is read, [files].
        kept: bytes that a process can keep.
    """

    of_record: np.ndarray
    sizes: np.ndarray
    kept: int

    @property
    def fit(self) -> bool:
        """Whether all files can be kept together, so that any order reads each of them once."""
        return int(self.sizes.sum()) <= self.kept

    def together(self, indices: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Reorder records so that each file is read once.

        The files come in a random order, in groups that can be kept together, and the records of a
        group are shuffled.
        """
        order = rng.permutation(len(self.sizes))
        group_of_file = np.empty(len(order), int)
        group = filled = 0
        for file in order:
            filled += self.sizes[file]
            if filled > self.kept:
                group, filled = group + 1, self.sizes[file]
            group_of_file[file] = group
        groups = group_of_file[self.of_record[indices]]
        return indices[np.lexsort((rng.permutation(len(indices)), groups))]


class Stream:
    """The keys of the images of each batch of this process.

    All processes share one endless stream. Batch b of all of them takes ``images`` positions from
    b * ``images`` on, and process r of R takes the r-th of R equal shares of the batch.

    The stream has the order of the sampler. With grouping, windows of 16 groups are reordered: the
    images of a window are sorted by orientation and cut into groups, and the groups are shuffled.
    Before that, records with ``sources`` that do not all fit into memory are reordered, in windows
    of as many as there are. None of this depends on the number of processes.
    """

    def __init__(
        self,
        sampler: Iterable[int],
        images: int,
        *,
        is_wide: Callable[[int], bool] | None = None,
        own_seeds: bool = False,
        sources: Sources | None = None,
    ) -> None:
        """
        Args:
            sampler: one of Detectron2's, whose stream of all processes is used; or any iterable of
                the indices of this process.
            images: of one batch over all processes.
            is_wide: from an image's index to its orientation; None: no grouping.
            own_seeds: keep the sampler's seeds instead of seeds from the run's.
            sources: of the records; the order of another sampler than Detectron2's stays.
        """
        self._sampler = sampler
        self._images = images
        self._is_wide = is_wide
        self._own_seeds = own_seeds
        self._group_size = images // comm.get_world_size()
        self._is_shared = type(sampler).__iter__ in _SPLITTERS
        self._sources = sources if self._is_shared and sources and not sources.fit else None
        self._said_so = False

    def batches(self, seed: int, first: int) -> Iterator[list[Key]]:
        """Yield the keys of one batch after the other, endlessly if the sampler is endless.

        Args:
            seed: the run's.
            first: how many batches of all processes to skip.
        """
        rank, size = comm.get_rank(), self._images // comm.get_world_size()
        # Every process draws the whole batch of a shared stream, and keeps its share
        if self._is_shared:
            drawn, offset = self._images, rank * size
        else:
            drawn, offset = size, 0
            if first and not self._said_so:
                self._said_so = True
                logger.warning(
                    f"{type(self._sampler).__name__} is not a sampler of Detectron2, so the order "
                    f"of images continues only if the sampler always gives the same one; {first} "
                    "batch(es) are left out."
                )
        indices = self._indices(seed, first * drawn)
        for batch in itertools.count(first):
            own = list(itertools.islice(indices, drawn))[offset : offset + size]
            if len(own) < size:
                return
            start = batch * self._images + rank * size
            yield [(seed, start + place, int(index)) for place, index in enumerate(own)]

    def state_dict(self) -> dict[str, Any]:
        """What the order depends on, apart from the run's seed and the place in it."""
        state = {"group_size": self._group_size}
        if self._own_seeds:
            state["sampler_seeds"] = _seeds_of(self._sampler)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the order of the run that this state belongs to."""
        self._group_size = state["group_size"]
        if self._own_seeds and state.get("sampler_seeds"):
            self._sampler = _with_seeds(self._sampler, **state["sampler_seeds"])

    def _indices(self, seed: int, start: int) -> Iterator[int]:
        """The order from position ``start`` on."""
        if self._is_wide is None or self._group_size == 1:
            return self._by_source(seed, start)
        window = self._group_size * _GROUPS
        first, offset = divmod(start, window)
        indices = self._by_source(seed, first * window)
        return itertools.islice(self._grouped(indices, seed, first), offset, None)

    def _by_source(self, seed: int, start: int) -> Iterator[int]:
        """The order before it is grouped by orientation, from position ``start`` on."""
        if self._sources is None:
            return itertools.islice(self._ungrouped(seed), start, None)
        window = len(self._sources.of_record)
        first, offset = divmod(start, window)
        indices = itertools.islice(self._ungrouped(seed), first * window, None)
        return itertools.islice(self._together(indices, seed, first), offset, None)

    def _together(self, indices: Iterator[int], seed: int, first: int) -> Iterator[int]:
        for number in itertools.count(first):
            window = np.fromiter(itertools.islice(indices, len(self._sources.of_record)), int)
            rng = generator(Purpose.SOURCES, seed, number)
            yield from self._sources.together(window, rng).tolist()

    def _ungrouped(self, seed: int) -> Iterator[int]:
        if not self._is_shared:
            return iter(self._sampler)
        sampler = self._sampler
        if not self._own_seeds:
            order, subset = generator(Purpose.SAMPLERS, seed).integers(2**31, size=2).tolist()
            sampler = _with_seeds(sampler, order, subset)
        return sampler._infinite_indices()

    def _grouped(self, indices: Iterator[int], seed: int, first: int) -> Iterator[int]:
        size = self._group_size
        for number in itertools.count(first):
            window = list(itertools.islice(indices, size * _GROUPS))
            if not window:
                return
            wide = [index for index in window if self._is_wide(index)]
            tall = [index for index in window if not self._is_wide(index)]
            parted = wide + tall
            rng = generator(Purpose.GROUPS, seed, number)
            # In the last window of a finite sampler, the incomplete group comes last.
            groups = len(parted) // size
            for group in rng.permutation(groups):
                yield from parted[group * size : (group + 1) * size]
            yield from parted[groups * size :]


def _seeds_of(sampler: Any) -> dict[str, int | None]:
    return {
        "order": getattr(sampler, "_seed", None),
        "subset": getattr(sampler, "_seed_subset", None),
    }


def _with_seeds(sampler: Any, order: int | None, subset: int | None) -> Any:
    """A copy of one of Detectron2's samplers with other seeds.

    A sampler draws its seeds when it is made, before the run knows whether it is resumed.
    """
    sampler = copy.copy(sampler)
    if order is not None and hasattr(sampler, "_seed"):
        sampler._seed = order
    if subset is not None and hasattr(sampler, "_seed_subset"):  # of RandomSubsetTrainingSampler
        sampler._seed_subset = subset
        shuffled = torch.randperm(sampler._size, generator=torch.Generator().manual_seed(subset))
        sampler._indexes_subset = shuffled[: sampler._size_subset]
    return sampler


def orientations(records: Iterable[Any]) -> np.ndarray:
    """:func:`is_wide` of each dataset dict, bool [records]."""
    return np.array([is_wide(record) for record in records], dtype=bool)


def is_wide(record: Any) -> bool:
    """Whether the image of a dataset dict is at least as wide as high, or of unknown size."""
    try:
        return record["width"] >= record["height"]
    except (KeyError, TypeError, IndexError):
        return True
