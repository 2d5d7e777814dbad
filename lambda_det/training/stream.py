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
from detectron2.data.samplers import (
    RandomSubsetTrainingSampler,
    RepeatFactorTrainingSampler,
    TrainingSampler,
)
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

    def together(self, indices: list[int], rng: np.random.Generator) -> list[int]:
        """Reorder records so that each file is read once.

        The files come in a random order, in groups that can be kept together, and the records of a
        group are shuffled.
        """
        group_of_file = np.empty(len(self.sizes), int)
        group = filled = 0
        for file in rng.permutation(len(self.sizes)):
            filled += self.sizes[file]
            if filled > self.kept:
                group, filled = group + 1, self.sizes[file]
            group_of_file[file] = group
        groups = group_of_file[self.of_record[indices]]
        order = np.lexsort((rng.permutation(len(indices)), groups))
        return [indices[place] for place in order]


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
        self._group_size = images // comm.get_world_size()
        self._is_shared = type(sampler).__iter__ in _SPLITTERS
        self._own_seeds = own_seeds and self._is_shared
        # Files that can all be kept are each read once in any order
        is_reordered = self._is_shared and sources and sources.sizes.sum() > sources.kept
        self._sources = sources if is_reordered else None

    def batches(self, seed: int, first: int) -> Iterator[list[Key]]:
        """Yield the keys of one batch after the other, endlessly if the sampler is endless.

        Args:
            seed: the run's.
            first: how many batches of all processes to skip.
        """
        rank, size = comm.get_rank(), self._images // comm.get_world_size()
        # Every process draws the whole batch of a shared stream, and keeps its share
        drawn, offset = (self._images, rank * size) if self._is_shared else (size, 0)
        indices = self._indices(seed, first * drawn)
        for batch in itertools.count(first):
            own = list(itertools.islice(indices, drawn))[offset : offset + size]
            if len(own) < size:
                return
            start = batch * self._images + rank * size
            yield [(seed, start + place, int(index)) for place, index in enumerate(own)]

    def state_dict(self) -> dict[str, Any]:
        """What the order depends on, apart from the run's seed and the place in it."""
        seeds = {"sampler_seeds": _seeds_of(self._sampler)} if self._own_seeds else {}
        return {"group_size": self._group_size, **seeds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the order of the run that this state belongs to."""
        if not self._is_shared:
            logger.warning(
                f"{type(self._sampler).__name__} is not a sampler of Detectron2, so the order of "
                "images continues only if the sampler always gives the same one."
            )
        self._group_size = state["group_size"]
        if self._own_seeds and "sampler_seeds" in state:
            self._sampler = _with_seeds(self._sampler, **state["sampler_seeds"])

    def _indices(self, seed: int, start: int) -> Iterator[int]:
        """The order from position ``start`` on."""
        if self._is_wide is None or self._group_size == 1:
            return self._by_source(seed, start)
        window = self._group_size * _GROUPS
        return _by_window(self._by_source, window, self._grouped, Purpose.GROUPS, seed, start)

    def _by_source(self, seed: int, start: int) -> Iterator[int]:
        """The order before it is grouped by orientation, from position ``start`` on."""
        if self._sources is None:
            return self._ungrouped(seed, start)
        window, reorder = len(self._sources.of_record), self._sources.together
        return _by_window(self._ungrouped, window, reorder, Purpose.SOURCES, seed, start)

    def _ungrouped(self, seed: int, start: int) -> Iterator[int]:
        """The order of the sampler, from position ``start`` on."""
        if not self._is_shared:
            return itertools.islice(self._sampler, start, None)
        sampler = self._sampler
        if not self._own_seeds:
            order, subset = generator(Purpose.SAMPLERS, seed).integers(2**31, size=2).tolist()
            sampler = _with_seeds(sampler, order, subset)
        return itertools.islice(sampler._infinite_indices(), start, None)

    def _grouped(self, window: list[int], rng: np.random.Generator) -> list[int]:
        """Reorder a window in groups of one orientation; the last, which may be smaller, stays."""
        size = self._group_size
        parted = sorted(window, key=lambda index: not self._is_wide(index))
        groups = rng.permutation(len(parted) // size)
        grouped = [index for g in groups for index in parted[g * size : (g + 1) * size]]
        return grouped + parted[len(grouped) :]


def _by_window(
    order: Callable[[int, int], Iterator[int]],
    window: int,
    reorder: Callable[[list[int], np.random.Generator], list[int]],
    purpose: Purpose,
    seed: int,
    start: int,
) -> Iterator[int]:
    """What ``order`` gives, with each window of it reordered for itself, from ``start`` on."""
    first, offset = divmod(start, window)
    indices = order(seed, first * window)

    def windows() -> Iterator[list[int]]:
        for number in itertools.count(first):
            if not (taken := list(itertools.islice(indices, window))):
                return
            yield reorder(taken, generator(purpose, seed, number))

    return itertools.islice(itertools.chain.from_iterable(windows()), offset, None)


def _seeds_of(sampler: TrainingSampler | RepeatFactorTrainingSampler) -> dict[str, int]:
    return {"order": sampler._seed, "subset": getattr(sampler, "_seed_subset", 0)}


def _with_seeds(
    sampler: TrainingSampler | RepeatFactorTrainingSampler, order: int, subset: int
) -> TrainingSampler | RepeatFactorTrainingSampler:
    """A copy of one of Detectron2's samplers with other seeds."""
    # A sampler draws its seeds when it is made, before the run knows whether it is resumed
    sampler = copy.copy(sampler)
    sampler._seed = order
    if isinstance(sampler, RandomSubsetTrainingSampler):
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
