"""The order of training images, and the loaders of training and evaluation batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch.utils.data import BatchSampler, Dataset

from lambda_det.classification.data.sources import Source
from lambda_det.classification.data.transforms import TestTransform, TrainTransform
from lambda_det.errors import DataError
from lambda_det.training.loading import ImageLoader, UnreadableImages
from lambda_det.training.randomness import Purpose, generator


def epoch_batches(
    size: int, seed: int, start: int, batch_size: int, rank: int, world_size: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield the batches of one process, of (epoch, index), in an endless stream of shuffled epochs.

    Position p of the stream is image p % size of epoch p // size, in an order that depends only on
    the seed and the epoch. The processes take turns, one batch each: R processes with batches of
    B/R images see the batches of one process that accumulates R of them. Each epoch has each image
    exactly once. Its position is all that a run needs to resume.

    Args:
        size: images of the data set, at least 1.
        seed: from 0.
        start: the first position in the stream of all processes.
        batch_size: images of one batch of this process.
        rank: this process, from 0.
        world_size: processes.
    """

    @lru_cache(2)
    def order(epoch: int) -> np.ndarray:
        return generator(Purpose.ORDER, seed, epoch).permutation(size)

    for first in itertools.count(start + rank * batch_size, batch_size * world_size):
        places = (divmod(p, size) for p in range(first, first + batch_size))
        yield [(epoch, int(order(epoch)[offset])) for epoch, offset in places]


# Image uint8 [S, S, 3], label, index in the source
Item = tuple[np.ndarray, int, int]


class LabelledTrainImages(Dataset):
    """Augmented images by (epoch, index), each a function only of seed, epoch and index."""

    def __init__(self, cfg: CfgNode, source: Source, seed: int) -> None:
        self._source, self._seed = source, seed
        self._transform = TrainTransform(cfg)
        limit = cfg.DATA.MAX_UNREADABLE_IMAGES
        self._unreadable = UnreadableImages(len(source), limit, "DATA.MAX_UNREADABLE_IMAGES")

    def __getitem__(self, where: tuple[int, int]) -> Item:
        epoch, index = where

        def read(candidate: int) -> Item:
            image = self._source.load(candidate)
            rng = generator(Purpose.SAMPLE, self._seed, epoch, candidate)
            return self._transform(image, rng), int(self._source.labels[candidate]), candidate

        return self._unreadable.next_readable(index, read)


class LabelledEvalImages(Dataset):
    """Evaluation images by index."""

    def __init__(self, cfg: CfgNode, source: Source) -> None:
        self._source, self._transform = source, TestTransform(cfg)

    def __getitem__(self, index: int) -> Item:
        image = self._source.load(index)
        return self._transform(image), int(self._source.labels[index]), index


# "images": uint8 RGB [B, S, S, 3]; "labels": int64 [B]; "indices": of the images in the source,
# int64 [B]
Batch = dict[str, torch.Tensor]


class LabelledTrainLoader:
    """Endless augmented batches in the order of :func:`epoch_batches`, begun at any batch.

    An image that cannot be read is named in the log, counted, and replaced by the next one.

    Args:
        cfg: a configuration of :func:`get_classification_config`.
        source: the images.
        batch_size: images of one batch of this process.
        key: of the images, for messages.
    """

    def __init__(
        self, cfg: CfgNode, source: Source, *, batch_size: int, key: str = "DATA.TRAIN"
    ) -> None:
        self._cfg, self._source, self._batch_size, self._key = cfg, source, batch_size, key
        self._seed = self._batches = 0

    def begin(self, seed: int, batches: int) -> None:
        self._seed, self._batches = seed, batches

    def __iter__(self) -> Iterator[Batch]:
        size, world_size = self._batch_size, comm.get_world_size()
        start = self._batches * size * world_size
        batches = epoch_batches(
            len(self._source), self._seed, start, size, comm.get_rank(), world_size
        )
        images = LabelledTrainImages(self._cfg, self._source, self._seed)
        return iter(_build(self._cfg, images, batches))

    def state_dict(self) -> dict[str, Any]:
        return {"images": len(self._source)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before, now = state["images"], len(self._source)
        if before != now:
            raise DataError(
                f"The run has {before} images of {self._key} and would have {now} now, so their "
                "order would be another: restore them, or give another OUTPUT_DIR."
            )


def build_eval_loader(cfg: CfgNode, source: Source, *, batch_size: int) -> ImageLoader:
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
    batches = BatchSampler(share, batch_size, drop_last=False)
    return _build(cfg, LabelledEvalImages(cfg, source), batches)


def _build(cfg: CfgNode, images: Dataset, batches: Iterable[list]) -> ImageLoader:
    return ImageLoader(
        images,
        batch_sampler=batches,
        collate_fn=_collate,
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        timeout=cfg.DATALOADER.TIMEOUT,
    )


def _collate(items: Sequence[Item]) -> Batch:
    images, labels, indices = zip(*items, strict=True)
    return {
        "images": torch.from_numpy(np.stack(images)),
        "labels": torch.tensor(labels),
        "indices": torch.tensor(indices),
    }
