"""Loaders of training and evaluation batches."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence

import cv2
import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch.utils.data import BatchSampler, DataLoader, Dataset

from lambda_det.classification.data.dataset import AugmentedDataset, EvalDataset, Item
from lambda_det.classification.data.sampler import EpochSampler
from lambda_det.classification.data.source import Source
from lambda_det.classification.data.transforms import TestTransform, TrainTransform
from lambda_det.errors import ConfigError, DataError

# "images": uint8 RGB [B, S, S, 3]; "labels": int64 [B]
Batch = dict[str, torch.Tensor]


class BatchLoader:
    """The batches of a DataLoader, whose failures are one sentence each.

    Dropping the iterator ends the workers.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        """Batches of this process; a TypeError for an endless loader."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches.

        Raises:
            DataError: an image cannot be read, in training more than may be so; or a worker was
                ended from outside.
        """
        batches = _start(self._loader)
        try:
            while True:
                batch = _next(batches)
                if batch is None:
                    return
                if isinstance(batch, DataError):
                    raise batch
                yield batch
        finally:
            # A traceback may keep this frame, and so the workers, until the interpreter ends;
            # there it takes them ten seconds.
            del batches


def _start(loader: DataLoader) -> Iterator[Batch | DataError]:
    """Start a loader's workers, without the signal handler that torch adds.

    When a worker is killed, that one raises wherever the main process happens to be, which may be
    in the middle of a checkpoint. Without it, the wait for the next batch fails within 5 seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)  # torch adds none there
    handler = signal.getsignal(signal.SIGCHLD)
    batches = iter(loader)
    if handler is not None:  # one that was not set from Python cannot be set from here
        signal.signal(signal.SIGCHLD, handler)
    return batches


def _next(batches: Iterator[Batch | DataError]) -> Batch | DataError | None:
    """The next batch, or None at the end."""
    try:
        return next(batches, None)
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise DataError(
            "A process that loads images was ended from outside, mostly because memory ran out: "
            "lower DATALOADER.NUM_WORKERS, or give the machine more memory or /dev/shm."
        ) from error


def build_train_loader(
    cfg: CfgNode, source: Source, *, batch_size: int, start: int, seed: int
) -> BatchLoader:
    """An endless loader of augmented batches in the order of :class:`EpochSampler`.

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
    sampler = EpochSampler(len(source), seed, start, comm.get_rank(), comm.get_world_size())
    dataset = AugmentedDataset(source, TrainTransform(cfg), seed, cfg.DATA.MAX_UNREADABLE_IMAGES)
    return _build(cfg, dataset, BatchSampler(sampler, batch_size, drop_last=False))


def build_eval_loader(cfg: CfgNode, source: Source, *, batch_size: int) -> BatchLoader:
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


def _build(cfg: CfgNode, dataset: Dataset, batches: BatchSampler) -> BatchLoader:
    workers = cfg.DATALOADER.NUM_WORKERS
    if workers < 0:
        raise ConfigError(f"DATALOADER.NUM_WORKERS is {workers}; give 0 or more.")
    return BatchLoader(
        DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=_collate,
            pin_memory=cfg.MODEL.DEVICE.startswith("cuda"),
            worker_init_fn=_start_worker,
            # Its own, as each new iterator draws from it: the global one is dropout's, and must
            # not depend on how often there was an evaluation.
            generator=torch.Generator(),
        )
    )


def _collate(items: Sequence[Item | DataError]) -> Batch | DataError:
    for item in items:
        if isinstance(item, DataError):
            return item
    images, labels = zip(*items, strict=True)
    return {
        "images": torch.from_numpy(np.stack(images)),
        "labels": torch.tensor(labels, dtype=torch.int64),
    }


def _start_worker(number: int) -> None:
    # One thread for each worker: they are as many as there are cores to use
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    # Ctrl-C is for the main process, which ends its workers; theirs would be a trace for each
    signal.signal(signal.SIGINT, signal.SIG_IGN)
