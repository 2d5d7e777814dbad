"""The order of training images, and the loaders of training and evaluation batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch.utils.data import BatchSampler, Dataset, Sampler

from lambda_det.classification.data.sources import Source
from lambda_det.classification.data.subset import MixedSource
from lambda_det.classification.data.transforms import TestTransform, TrainTransform
from lambda_det.training.randomness import Purpose, generator
from lambda_det.training.workers import UnreadableImages, WatchedLoader, reading


class EpochBatches(Sampler):
    """The batches of one process in an endless stream of shuffled epochs.

    Position p of the stream is image p % size of epoch p // size, in an order that depends on the
    seed and the epoch alone. The processes take turns, one batch each: R processes with batches of
    B/R images see the batches of one process that accumulates R of them. Each epoch has each image
    exactly once. A run resumes by its position alone.

    Args:
        size: images of the data set, at least 1.
        seed: from 0.
        start: the first position in the stream of all processes.
        batch_size: images of one batch of this process.
        rank: this process, from 0.
        world_size: processes.
        purpose: of the random numbers of the order.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        start: int,
        batch_size: int,
        rank: int,
        world_size: int,
        purpose: Purpose = Purpose.ORDER,
    ) -> None:
        self._purpose = purpose
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
        return generator(self._purpose, self._seed, epoch).permutation(self._size)


class MixedBatches(Sampler):
    """Batches of labelled images, each followed by one of pseudo-labelled images.

    Both have an order and epochs of their own.

    Args:
        labelled, pseudo: the batches of both.
        first: the index of the first pseudo-labelled image.
    """

    def __init__(self, labelled: EpochBatches, pseudo: EpochBatches, first: int) -> None:
        self._labelled, self._pseudo, self._first = labelled, pseudo, first

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yield lists of (epoch, index) without end."""
        for labelled, pseudo in zip(self._labelled, self._pseudo, strict=True):
            yield labelled + [(epoch, self._first + index) for epoch, index in pseudo]


# Image uint8 [S, S, 3], label, index in the source, and a soft label float32 [classes] or None
Item = tuple[np.ndarray, int, int, np.ndarray | None]


class TrainImages(Dataset):
    """Augmented images by (epoch, index), each a function of seed, epoch and index alone.

    Args:
        source: the training images.
        transform: from an image, uint8 [H, W, 3], and a generator to one uint8 [S, S, 3].
        seed: from 0.
        max_unreadable: how many different images may be unreadable; the next one replaces them.
        soft_label: from an index to a soft label, or None for an image without one.
    """

    def __init__(
        self,
        source: Source,
        transform: Callable[[np.ndarray, np.random.Generator], np.ndarray],
        seed: int,
        max_unreadable: int,
        soft_label: Callable[[int], np.ndarray | None] | None = None,
    ) -> None:
        self._soft_label = soft_label
        self._source = source
        self._transform = transform
        self._seed = seed
        self._unreadable = UnreadableImages(
            len(source), max_unreadable, "DATA.MAX_UNREADABLE_IMAGES"
        )

    def __getitem__(self, where: tuple[int, int]) -> Item:
        epoch, index = where

        def read(candidate: int) -> Item:
            with reading(self._source.name(candidate)):
                image = self._source.load(candidate)
                rng = generator(Purpose.SAMPLE, self._seed, epoch, candidate)
                label = int(self._source.labels[candidate])
                soft_label = self._soft_label(candidate) if self._soft_label else None
                return self._transform(image, rng), label, candidate, soft_label

        return self._unreadable.next_readable(index, read)


class EvalImages(Dataset):
    """Evaluation images by index.

    Args:
        source: the images.
        transform: from an image, uint8 [H, W, 3], to one uint8 [T, T, 3].
    """

    def __init__(self, source: Source, transform: Callable[[np.ndarray], np.ndarray]) -> None:
        self._source = source
        self._transform = transform

    def __getitem__(self, index: int) -> Item:
        with reading(self._source.name(index)):
            image = self._source.load(index)
            return self._transform(image), int(self._source.labels[index]), index, None


# "images": uint8 RGB [B, S, S, 3]; "labels": int64 [B]; "indices": of the images in the source,
# int64 [B]; where there are soft labels, "soft_labels": float32 [P, classes] of the images
# "soft_rows": int64 [P]
Batch = dict[str, torch.Tensor]


def build_train_loader(
    cfg: CfgNode, source: Source, *, batch_size: int, start: int, seed: int
) -> WatchedLoader:
    """An endless loader of augmented batches in the order of :class:`EpochBatches`.

    An image that cannot be read is named in the log, counted, and replaced by the next one.

    Args:
        cfg: a configuration of :func:`get_classification_config`.
        source: the training images. With those of a :class:`MixedSource`, DATA.PSEUDO_RATIO
            pseudo-labelled images follow for each labelled one of a batch.
        batch_size: labelled images of one batch of this process.
        start: the first position in the stream of all processes; step t of a global batch of B
            images starts at t * B.
        seed: of the order and of augmentation, from 0.

    Raises:
        ConfigError: a key of DATALOADER, DATA or INPUT has an invalid value.
    """
    processes = comm.get_rank(), comm.get_world_size()
    batches: Sampler = EpochBatches(len(source), seed, start, batch_size, *processes)
    options: dict[str, Any] = {}
    if isinstance(source, MixedSource):
        ratio, purpose = cfg.DATA.PSEUDO_RATIO, Purpose.PSEUDO_ORDER
        places = len(source.pseudo), seed, round(start * ratio), round(batch_size * ratio)
        pseudo = EpochBatches(*places, *processes, purpose)
        batches = MixedBatches(batches, pseudo, len(source))
        if cfg.DATA.PSEUDO_TEMPERATURE:
            options["soft_label"] = _SoftLabels(source, cfg.DATA.PSEUDO_TEMPERATURE)
        source = source.all
    images = TrainImages(
        source, TrainTransform(cfg), seed, cfg.DATA.MAX_UNREADABLE_IMAGES, **options
    )
    return _build(cfg, images, batches)


class _SoftLabels:
    """The soft labels of the pseudo-labelled images of a source."""

    def __init__(self, source: MixedSource, temperature: float) -> None:
        self._pseudo, self._first, self._temperature = source.pseudo, len(source), temperature

    def __call__(self, index: int) -> np.ndarray | None:
        if index < self._first:
            return None
        return self._pseudo.soft_label(index - self._first, self._temperature)


def build_eval_loader(cfg: CfgNode, source: Source, *, batch_size: int) -> WatchedLoader:
    """A loader that gives each image once over all processes; the last batch may be shorter.

    An image that cannot be read ends it with a ``DataError``: an accuracy over fewer images could
    not be compared, and nothing would show it.

    Args:
        cfg: a configuration of :func:`get_classification_config`.
        source: the images.
        batch_size: images of one batch of this process.

    Raises:
        ConfigError: a key of DATALOADER or INPUT has an invalid value.
    """
    share = range(comm.get_rank(), len(source), comm.get_world_size())
    images = EvalImages(source, TestTransform(cfg))
    return _build(cfg, images, BatchSampler(share, batch_size, drop_last=False))


def _build(cfg: CfgNode, images: Dataset, batches: Sampler) -> WatchedLoader:
    return WatchedLoader(
        images,
        batch_sampler=batches,
        collate_fn=_collate,
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        timeout=cfg.DATALOADER.TIMEOUT,
        pin_memory=cfg.MODEL.DEVICE.startswith("cuda"),
    )


def _collate(items: Sequence[Item]) -> Batch:
    images, labels, indices, soft_labels = zip(*items, strict=True)
    batch = {
        "images": torch.from_numpy(np.stack(images)),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "indices": torch.tensor(indices, dtype=torch.int64),
    }
    rows = [row for row, soft_label in enumerate(soft_labels) if soft_label is not None]
    if rows:
        batch["soft_rows"] = torch.tensor(rows)
        batch["soft_labels"] = torch.from_numpy(np.stack([soft_labels[row] for row in rows]))
    return batch
