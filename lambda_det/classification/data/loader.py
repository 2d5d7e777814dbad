"""Loaders of training and evaluation batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from lambda_det.classification.data.dataset import AugmentedDataset, EvalDataset, Item
from lambda_det.classification.data.sampler import EpochBatches
from lambda_det.classification.data.source import Source
from lambda_det.classification.data.transforms import TestTransform, TrainTransform
from lambda_det.errors import ConfigError
from lambda_det.training.workers import WatchedLoader

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
