"""Train and test loaders that bear with unreadable images, or stop with one clear sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch.utils.data as torchdata
from detectron2.config import CfgNode
from detectron2.data import (
    DatasetFromList,
    build_detection_test_loader,
    build_detection_train_loader,
)
from detectron2.utils import comm

from lambda_det.data.mapper import TolerantMapper
from lambda_det.data.unreadable import UnreadableImages
from lambda_det.errors import ConfigError, DataError


class SkippingDataset(torchdata.Dataset):
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
        records: Sequence[dict[str, Any]] | torchdata.Dataset,
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

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The mapped image at ``index`` or at the next index that can be read, or a failure.

        It is a failure when more images than allowed could not be read.
        """
        try:
            return self._unreadable.next_readable(
                index, lambda candidate: self._mapper(self._records[candidate])
            )
        except DataError as error:
            return _failure(error)


class FailingLoader:
    """A data loader that raises the failures that come with its batches.

    An error raised in a worker would reach the main process as a stack trace for a text, and leave
    workers behind that take ten seconds to end. So it is sent in place of an image.
    """

    def __init__(self, loader: Iterable[list[dict[str, Any]]]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for batch in self.loader:
            for image in batch:
                if _FAILURE in image:
                    raise image[_FAILURE]
            yield batch


class _FailureMapper:
    """A mapper that returns a failure where the one that it wraps raises a ``DataError``."""

    def __init__(self, mapper: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._mapper = mapper

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._mapper(record)
        except DataError as error:
            return _failure(error)


_FAILURE = "failure"


def _failure(error: DataError) -> dict[str, Any]:
    # Detectron2 groups images by their width and height. Its __cause__ may not be picklable.
    return {_FAILURE: DataError(str(error)), "width": 1, "height": 1}


def build_train_loader(cfg: CfgNode, images_per_batch: int) -> FailingLoader:
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
    """
    processes = comm.get_world_size()
    if images_per_batch < 1 or images_per_batch % processes:
        raise ConfigError(
            f"A batch of {images_per_batch} images (SOLVER.IMS_PER_BATCH over "
            f"SOLVER.ACCUMULATE_GRADIENTS) does not divide by {processes} training process(es); "
            "set SOLVER.IMS_PER_BATCH to a multiple."
        )
    mapper = TolerantMapper(cfg, is_train=True)
    # Detectron2's own reading of the config, for the data sets, the filters and the sampler.
    arguments = build_detection_train_loader.from_config(cfg, mapper=mapper)
    arguments["total_batch_size"] = images_per_batch
    if cfg.INPUT.LSJ.ENABLED:
        # All images come out alike, so grouping them would only spoil the shuffle.
        arguments["aspect_ratio_grouping"] = False
    return tolerant_train_loader(**arguments, max_unreadable=cfg.DATALOADER.MAX_UNREADABLE_IMAGES)


def tolerant_train_loader(
    dataset: list[dict[str, Any]] | torchdata.Dataset,
    *,
    mapper: Callable[[dict[str, Any]], dict[str, Any]],
    max_unreadable: int = 20,
    **options: Any,
) -> FailingLoader:
    """The same without a config, for a LazyConfig or a script.

    Args:
        dataset: the dataset dicts.
        mapper: raises ``DataError`` for an image that cannot be read, as a ``TolerantMapper`` does.
        max_unreadable: how many different images may be so.
        options: of Detectron2's ``build_detection_train_loader``: total_batch_size, ...
    """
    if isinstance(dataset, list):
        dataset = DatasetFromList(dataset, copy=False)  # one serialised copy for all workers
    dataset = SkippingDataset(dataset, mapper, max_unreadable)
    return FailingLoader(build_detection_train_loader(dataset=dataset, mapper=None, **options))


def build_test_loader(cfg: CfgNode, dataset_name: str) -> FailingLoader:
    """A loader that gives each image of ``dataset_name`` once, shared among the processes.

    An image that cannot be read ends it with a ``DataError``: an AP over fewer images than the
    others' would be wrong, and nobody would see it.
    """
    mapper = TolerantMapper(cfg, is_train=False)
    return tolerant_test_loader(
        **build_detection_test_loader.from_config(cfg, dataset_name, mapper=mapper)
    )


def tolerant_test_loader(
    dataset: list[dict[str, Any]] | torchdata.Dataset,
    *,
    mapper: Callable[[dict[str, Any]], dict[str, Any]],
    **options: Any,
) -> FailingLoader:
    """The same without a config, for a LazyConfig or a script.

    Args:
        dataset: the dataset dicts.
        mapper: raises ``DataError`` for an image that cannot be read, as a ``TolerantMapper`` does.
        options: of Detectron2's ``build_detection_test_loader``: batch_size, num_workers, ...
    """
    return FailingLoader(
        build_detection_test_loader(dataset=dataset, mapper=_FailureMapper(mapper), **options)
    )
