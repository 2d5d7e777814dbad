"""Train and test loaders that bear with unreadable images, or stop with one clear sentence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch.utils.data as torchdata
from detectron2.config import CfgNode
from detectron2.data import (
    DatasetFromList,
    build_detection_test_loader,
    build_detection_train_loader,
)
from detectron2.data.build import trivial_batch_collator
from detectron2.data.samplers import TrainingSampler
from detectron2.utils import comm
from torch.utils.data import Dataset

from lambda_det.detection.data.mapper import TolerantMapper
from lambda_det.errors import ConfigError, DataError
from lambda_det.training.randomness import Purpose, seeded
from lambda_det.training.stream import Key, Stream, is_wide, orientations
from lambda_det.training.unreadable import UnreadableImages
from lambda_det.training.workers import WatchedLoader, reading


class SkippingDataset(Dataset):
    """A mapped data set that gives the next image in place of one that cannot be read.

    Detectron2's ``MapDataset`` is meant to do so for a mapper that returns None, but its copy of
    early 2023 then fails on Python 3.11 and newer, and nobody counts.

    Args:
        records: the dataset dicts, by index.
        mapper: raises ``DataError`` for an image that cannot be read.
        max_unreadable: how many different images may be so. Counted over all loader workers of
            one training process, so that N processes together may meet more.
    """

    def __init__(
        self,
        records: Sequence[dict[str, Any]] | Dataset,
        mapper: Callable[[dict[str, Any]], dict[str, Any]],
        max_unreadable: int,
    ) -> None:
        self._records = records
        self._mapper = mapper
        self._unreadable = UnreadableImages(
            len(records), max_unreadable, "DATALOADER.MAX_UNREADABLE_IMAGES"
        )

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, key: Key) -> dict[str, Any] | DataError:
        """The mapped image of a key's index, or the next one that can be read, or a failure.

        It depends on the key alone, and leaves the global random numbers as they were. It is a
        failure when more images than allowed could not be read.
        """
        seed, position, index = key

        def read(candidate: int) -> dict[str, Any]:
            with (
                seeded(Purpose.SAMPLE, seed, position & 0xFFFFFFFF, position >> 32),
                reading(f"image number {candidate} of the training data"),
            ):
                record = self._records[candidate]
                with _reading(record):
                    return self._mapper(record)

        try:
            return self._unreadable.next_readable(index, read)
        except DataError as error:
            return DataError(str(error))  # its cause may not be picklable


class FailureMapper:
    """A mapper that returns the ``DataError`` that the one that it wraps raises."""

    def __init__(self, mapper: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._mapper = mapper

    def __call__(self, record: dict[str, Any]) -> dict[str, Any] | DataError:
        try:
            with _reading(record):
                return self._mapper(record)
        except DataError as error:
            return DataError(str(error))


def _reading(record: Any) -> AbstractContextManager[None]:
    """Let it be known which image a worker is reading, by its file and its id."""
    if not isinstance(record, dict) or "file_name" not in record:
        return nullcontext()
    number = f" (image_id {record['image_id']})" if "image_id" in record else ""
    return reading(f"{record['file_name']}{number}")


logger = logging.getLogger(__name__)

_TIMEOUT = 600


class TrainLoader:
    """The endless batches of a training, from any place of its stream on.

    A batch depends on the seed and its number alone: neither on the number of loader workers, nor
    on what was drawn before. That of all processes depends not on their number either.

    Each iterator starts at the place that ``begin`` named last, when its first batch is asked for.
    A loader that was never begun starts at the first batch of a seed of its own.
    """

    def __init__(
        self,
        dataset: torchdata.Dataset,
        stream: Stream,
        *,
        num_workers: int = 0,
        timeout: int = _TIMEOUT,
        collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            dataset: mapped, by the keys of ``stream``.
            stream: of the images of this process.
            num_workers: processes that load images.
            timeout: seconds to wait for a batch before these are taken to hang; 0 for ever.
            collate_fn: makes a batch of a list of images; None leaves it as it is.
            options: of torch's DataLoader.

        Raises:
            ConfigError: ``num_workers`` or ``timeout`` is negative.
        """
        if num_workers < 0:
            raise ConfigError(f"DATALOADER.NUM_WORKERS is {num_workers}; give 0 or more.")
        self._records = len(dataset)
        self._stream = stream
        self._seed = comm.shared_random_seed()
        self._batches = 0
        options.pop("persistent_workers", None)  # the stream never ends
        options.pop("drop_last", None)
        loader = torchdata.DataLoader(
            dataset,
            batch_sampler=_Batches(self),
            num_workers=num_workers,
            collate_fn=collate_fn or trivial_batch_collator,
            **options,
        )
        self._loader = WatchedLoader(loader, timeout)

    def begin(self, seed: int, batches: int) -> None:
        """Let the next iterator start after so many batches of all processes.

        Args:
            seed: the run's, from 0: of the order and of the augmentation.
            batches: of the forward pass; an optimiser step takes SOLVER.ACCUMULATE_GRADIENTS.
        """
        self._seed, self._batches = seed, batches

    def __iter__(self) -> Iterator[Any]:
        """Yield batches.

        Raises:
            DataError: more images than allowed could not be read; or a worker was ended from
                outside, or hangs.
        """
        return iter(self._loader)

    def keys(self) -> Iterator[list[Key]]:
        """Yield seed, position and index of the images of each batch, without reading them."""
        return self._stream.batches(self._seed, self._batches)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with this order, apart from seed and place."""
        return {"records": self._records, **self._stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = state.get("records", self._records)
        if before != self._records:
            logger.warning(
                f"The training data had {before} images when the run began and have "
                f"{self._records} now, so the order of images is another one from here on."
            )
        self._stream.load_state_dict(state)


class _Batches(torchdata.Sampler):
    """The keys of a TrainLoader's batches, from where it begins when it is asked."""

    def __init__(self, loader: TrainLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[Key]]:
        return self._loader.keys()


def build_train_loader(cfg: CfgNode, images_per_batch: int) -> TrainLoader:
    """An endless loader over ``DATASETS.TRAIN``, shuffled or sampled as ``DATALOADER`` says.

    An image that cannot be read is named in the log, counted, and replaced by the next one; past
    ``DATALOADER.MAX_UNREADABLE_IMAGES`` the loader raises a ``DataError``.

    Args:
        cfg: a config with the keys of :func:`lambda_det.config.add_lambda_config`.
        images_per_batch: images of one batch over all training processes together.

    Returns:
        Batches of this process: lists of ``images_per_batch`` / processes mapped images.

    Raises:
        ConfigError: the batch does not divide by the processes, or a jitter that cannot work.
        DataError: no image has an annotation to train on.
    """
    _check_batch(images_per_batch)
    mapper = TolerantMapper(cfg, is_train=True)
    # Detectron2's own reading of the config, for the data sets, the filters and the sampler.
    try:
        arguments = build_detection_train_loader.from_config(cfg, mapper=mapper)
    except AssertionError as error:
        if "No valid data" not in str(error):
            raise
        keypoints = ", with visible keypoints," if cfg.MODEL.KEYPOINT_ON else ""
        raise DataError(
            f"{', '.join(cfg.DATASETS.TRAIN)}: no annotation{keypoints} is left to train on once "
            "those without a usable mask are out; tools/check_dataset.py lists what is wrong."
        ) from error
    arguments["total_batch_size"] = images_per_batch
    if cfg.INPUT.LSJ.ENABLED:
        # All images come out alike, so grouping them would only spoil the shuffle.
        arguments["aspect_ratio_grouping"] = False
    return _train_loader(
        **arguments,
        max_unreadable=cfg.DATALOADER.MAX_UNREADABLE_IMAGES,
        timeout=cfg.DATALOADER.TIMEOUT,
    )


def tolerant_train_loader(
    dataset: list[dict[str, Any]] | torchdata.Dataset,
    *,
    mapper: Callable[[dict[str, Any]], dict[str, Any]],
    total_batch_size: int,
    sampler: Iterable[int] | None = None,
    **options: Any,
) -> TrainLoader:
    """The same without a config, for a LazyConfig or a script.

    Args:
        dataset: the dataset dicts.
        mapper: raises ``DataError`` for an image that cannot be read, as a ``TolerantMapper`` does.
        total_batch_size: images of one batch over all training processes together.
        sampler: one of Detectron2's, which keeps its seeds, or another one, of this process; None
            for a ``TrainingSampler`` by the run's seed.
        options: ``aspect_ratio_grouping`` (True), ``num_workers`` (0), ``collate_fn``,
            ``max_unreadable`` (20 different images), ``timeout`` (600 seconds to wait for a batch),
            and those of torch's DataLoader.

    Raises:
        ConfigError: the batch does not divide by the processes, or the data can only be iterated.
    """
    _check_batch(total_batch_size)
    own_seeds = sampler is not None
    return _train_loader(
        dataset, mapper, total_batch_size, sampler=sampler, own_seeds=own_seeds, **options
    )


def _check_batch(images: int) -> None:
    processes = comm.get_world_size()
    if images < 1 or images % processes:
        raise ConfigError(
            f"A batch of {images} images (SOLVER.IMS_PER_BATCH over "
            f"SOLVER.ACCUMULATE_GRADIENTS) does not divide by {processes} training process(es); "
            "set SOLVER.IMS_PER_BATCH to a multiple."
        )


def _train_loader(
    dataset: list[dict[str, Any]] | torchdata.Dataset,
    mapper: Callable[[dict[str, Any]], dict[str, Any]],
    total_batch_size: int,
    *,
    sampler: Iterable[int] | None,
    own_seeds: bool = False,
    aspect_ratio_grouping: bool = True,
    max_unreadable: int = 20,
    **options: Any,
) -> TrainLoader:
    if isinstance(dataset, torchdata.IterableDataset):
        raise ConfigError(
            f"The training data, {type(dataset).__name__}, can only be iterated, so that a resumed "
            "run could not find its place in them; give a list of dataset dicts, or a data set "
            "that knows its length and gives them by index."
        )
    if sampler is None:
        sampler = TrainingSampler(len(dataset), seed=0)  # the stream gives it the run's
    wide = _wide_images(dataset) if aspect_ratio_grouping else None
    if isinstance(dataset, list):
        dataset = DatasetFromList(dataset, copy=False)  # one serialised copy for all workers
    return TrainLoader(
        SkippingDataset(dataset, mapper, max_unreadable),
        Stream(sampler, total_batch_size, is_wide=wide, own_seeds=own_seeds),
        **options,
    )


def _wide_images(dataset: list[dict[str, Any]] | torchdata.Dataset) -> Callable[[int], bool]:
    """Of an index, whether that image is at least as wide as high."""
    if isinstance(dataset, list):
        return orientations(dataset).__getitem__
    return cache(lambda index: is_wide(dataset[index]))


def build_test_loader(cfg: CfgNode, dataset_name: str) -> WatchedLoader:
    """A loader that gives each image of ``dataset_name`` once, shared among the processes.

    An image that cannot be read ends it with a ``DataError``: an AP over fewer images than the
    others' would be wrong, and nobody would see it.
    """
    mapper = TolerantMapper(cfg, is_train=False)
    return tolerant_test_loader(
        **build_detection_test_loader.from_config(cfg, dataset_name, mapper=mapper),
        timeout=cfg.DATALOADER.TIMEOUT,
    )


def tolerant_test_loader(
    dataset: list[dict[str, Any]] | torchdata.Dataset,
    *,
    mapper: Callable[[dict[str, Any]], dict[str, Any]],
    timeout: int = _TIMEOUT,
    **options: Any,
) -> WatchedLoader:
    """The same without a config, for a LazyConfig or a script.

    Args:
        dataset: the dataset dicts.
        mapper: raises ``DataError`` for an image that cannot be read, as a ``TolerantMapper`` does.
        timeout: seconds to wait for a batch before the workers are taken to hang; 0 for ever.
        options: of Detectron2's ``build_detection_test_loader``: batch_size, num_workers, ...
    """
    loader = build_detection_test_loader(dataset=dataset, mapper=FailureMapper(mapper), **options)
    return WatchedLoader(loader, timeout)
