"""Batches of images: their order, the items of each, and the loaders that make them.

An image that cannot be read comes as a ``DataError`` in place of an item: raised in a worker, it
would reach the main process as a stack trace for a text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from lambda_det.classification.data.sources import Source
from lambda_det.classification.data.transforms import TestTransform, TrainTransform
from lambda_det.errors import ConfigError, DataError
from lambda_det.training.randomness import Purpose, generator
from lambda_det.training.unreadable import UnreadableImages
from lambda_det.training.workers import WatchedLoader, reading


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


# "images": uint8 RGB [B, S, S, 3]; "labels": int64 [B]; "indices": of the images in the source,
# int64 [B]
Batch = dict[str, torch.Tensor]


def build_train_loader(
    cfg: CfgNode, source: Source, *, batch_size: int, start: int, seed: int
) -> WatchedLoader:
    """An endless loader of augmented batches in the order of :class:`EpochBatches`.

    An image that cannot be read is named in the log, counted, and replaced by the next one.

    Args:
        cfg: a configuration of :func:`get_classification_config`.
        source: the training images.
        batch_size: images of one batch of this process.
        start: position in the stream of all processes to begin with; step t of a global batch B
            begins at t * B.
        seed: of the order and of augmentation, from 0.

    Raises:
        ConfigError: a key of DATALOADER, DATA or INPUT that cannot work.
    """
    rank, world_size = comm.get_rank(), comm.get_world_size()
    batches = EpochBatches(len(source), seed, start, batch_size, rank, world_size)
    dataset = AugmentedDataset(source, TrainTransform(cfg), seed, cfg.DATA.MAX_UNREADABLE_IMAGES)
    return _build(cfg, dataset, batches)


def build_eval_loader(cfg: CfgNode, source: Source, *, batch_size: int) -> WatchedLoader:
    """A loader that gives each image once over all processes, the last batch as long as it is.

    An image that cannot be read ends it with a ``DataError``: an accuracy over fewer images than
    the others' would be wrong, and nobody would see it.

    Args:
        cfg: a configuration of :func:`get_classification_config`.
        source: the images.
        batch_size: images of one batch of this process.

    Raises:
        ConfigError: a key of DATALOADER or INPUT that cannot work.
    """
    share = range(comm.get_rank(), len(source), comm.get_world_size())
    dataset = EvalDataset(source, TestTransform(cfg))
    return _build(cfg, dataset, BatchSampler(share, batch_size, drop_last=False))


def _build(cfg: CfgNode, dataset: Dataset, batches: Sampler) -> WatchedLoader:
    workers = cfg.DATALOADER.NUM_WORKERS
    if workers < 0:
        raise ConfigError(f"DATALOADER.NUM_WORKERS is {workers}; give 0 or more.")
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=cfg.MODEL.DEVICE.startswith("cuda"),
    )
    return WatchedLoader(loader, cfg.DATALOADER.TIMEOUT)


def _collate(items: Sequence[Item]) -> Batch:
    images, labels, indices = zip(*items, strict=True)
    return {
        "images": torch.from_numpy(np.stack(images)),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "indices": torch.tensor(indices, dtype=torch.int64),
    }
