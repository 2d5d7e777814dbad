"""Train and test loaders: batches of mapped images, in an order that a resumed run can continue."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import (
    DatasetFromList,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.data.build import trivial_batch_collator
from detectron2.data.samplers import InferenceSampler, TrainingSampler
from detectron2.utils import comm
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler

from lambda_det.detection.data.mapper import TolerantMapper
from lambda_det.detection.data.registration import check_files, given_name
from lambda_det.detection.data.tile_pixels import sources_of
from lambda_det.detection.data.tile_records import tile_records, tiles_to_test
from lambda_det.detection.data.truth import decided
from lambda_det.detection.tiles import Tiling
from lambda_det.errors import ConfigError, DataError, refused
from lambda_det.training.loading import ImageLoader, UnreadableImages
from lambda_det.training.randomness import Purpose, seeded
from lambda_det.training.stream import Key, Sources, Stream, is_wide, orientations

logger = logging.getLogger(__name__)

_TIMEOUT = 600

Record = dict[str, Any]
Mapper = Callable[[Record], Record]


class EvalImages(Dataset):
    """Mapped images by index.

    Args:
        records: the dataset dicts, by index.
        mapper: raises ``DataError`` if an image cannot be read.
    """

    def __init__(self, records: Sequence[Record] | Dataset, mapper: Mapper) -> None:
        self._records = records
        self._mapper = mapper

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        record = self._records[index]
        if isinstance(record, dict):  # records of a list or data set without a name
            record, _ = decided(record)
        return self._mapper(record)


class TrainImages(EvalImages):
    """Mapped images by :data:`Key`. The next image takes the place of one that cannot be read.

    Detectron2's ``MapDataset`` is meant to do so for a mapper that returns None. Its copy of early
    2023 fails at that, and it counts nothing.

    Args:
        records, mapper: as of ``EvalImages``.
        max_unreadable: how many different images may be unreadable, over all loader workers of one
            training process. N processes may meet more in all.
        key: how messages name ``max_unreadable``.
        sources: the images of tiles; one that cannot be read counts once.
    """

    def __init__(
        self,
        records: Sequence[Record] | Dataset,
        mapper: Mapper,
        max_unreadable: int,
        key: str,
        sources: Sources | None,
    ) -> None:
        super().__init__(records, mapper)
        files = None if sources is None else sources.of_record
        self._unreadable = UnreadableImages(len(records), max_unreadable, key, files)

    def __getitem__(self, key: Key) -> Record:
        """The mapped image of a key's index, or the next one that can be read.

        It depends only on the key. The global random numbers stay as they were.

        Raises:
            DataError: more images than allowed could not be read.
        """
        seed, position, index = key
        place = position & 0xFFFFFFFF, position >> 32

        read = super().__getitem__

        def read_first(candidate: int) -> Record:
            with seeded(Purpose.SAMPLE, seed, *place):
                return read(candidate)

        return self._unreadable.next_readable(index, read_first)


class TrainLoader(ImageLoader):
    """The endless batches of a training, from any place of its stream on.

    A batch depends only on the seed and on its number, not on the number of loader workers or on
    what was drawn before. The batch of all processes does not depend on their number.

    Each iterator starts at the place that ``begin`` named last when its first batch is requested.
    Without a call of ``begin`` it starts at the first batch of a random seed.
    """

    def __init__(
        self,
        dataset: Dataset,
        stream: Stream,
        *,
        timeout: int = _TIMEOUT,
        collate_fn: Callable[[list[Record]], Any] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            dataset: mapped images by the keys of ``stream``.
            stream: the keys of the images of this process.
            timeout: seconds to wait for a batch before the workers count as hanging; 0: no limit.
            collate_fn: makes a batch of a list of images; None leaves the list.
            options: ``num_workers`` (0), and those of torch's DataLoader.
        """
        self._records = len(dataset)
        self._stream = stream
        self._seed = comm.shared_random_seed()
        self._batches = 0
        options.pop("persistent_workers", None)  # the stream never ends
        options.pop("drop_last", None)
        super().__init__(
            dataset,
            batch_sampler=_Keys(self),
            timeout=timeout,
            collate_fn=collate_fn or trivial_batch_collator,
            **options,
        )

    def begin(self, seed: int, batches: int) -> None:
        """Set where the next iterator starts.

        Args:
            seed: the run's, from 0. Order and augmentation depend on it.
            batches: how many batches of the forward pass to skip; an optimiser step takes
                SOLVER.ACCUMULATE_GRADIENTS of them.
        """
        self._seed, self._batches = seed, batches

    def keys(self) -> Iterator[list[Key]]:
        """Yield seed, position and index of the images of each batch, without reading them."""
        return self._stream.batches(self._seed, self._batches)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue with this order, apart from seed and place."""
        return {"records": self._records, **self._stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = state["records"]
        if before != self._records:
            logger.warning(
                f"The training data had {before} images when the run began and have "
                f"{self._records} now, so the order of images differs from here on."
            )
        self._stream.load_state_dict(state)


class _Keys(Sampler):
    """The keys of a TrainLoader's batches; their place is read when the iteration starts."""

    def __init__(self, loader: TrainLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[Key]]:
        return self._loader.keys()


def training_records(cfg: CfgNode) -> list[Record] | Dataset:
    """The records of ``DATASETS.TRAIN`` to train on; of tiles where ``INPUT.TILE`` cuts images.

    Images without an object are left out if ``DATALOADER.FILTER_EMPTY_ANNOTATIONS``, and those
    without visible keypoints if the model learns keypoints.

    Raises:
        ConfigError: a data set is not registered.
        DataError: a data set is missing, or no image is left.
    """
    for name in cfg.DATASETS.TRAIN:
        check_files(name)
    fewest = cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE
    try:
        records = get_detection_dataset_dicts(
            cfg.DATASETS.TRAIN,
            filter_empty=cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
            min_keypoints=fewest if cfg.MODEL.KEYPOINT_ON else 0,
            proposal_files=cfg.DATASETS.PROPOSAL_FILES_TRAIN if cfg.MODEL.LOAD_PROPOSALS else None,
        )
    except AssertionError as error:
        if not re.search("No valid data|is empty", str(error)):
            raise
        visible = ", with visible keypoints," if cfg.MODEL.KEYPOINT_ON else ""
        raise DataError(
            f"{', '.join(map(given_name, cfg.DATASETS.TRAIN))}: there is no annotation{visible} to "
            "train on, or none that can be used; lambda-det check lists what is wrong."
        ) from error
    return _cut(cfg, records)


def _cut(cfg: CfgNode, records: list[Record] | Dataset) -> list[Record] | Dataset:
    """The records of tiles, if ``INPUT.TILE`` cuts images."""
    tiling = Tiling.from_config(cfg)
    if tiling is None:
        return records
    if not isinstance(records, list):
        raise ConfigError(
            f"INPUT.TILE.SIZE {tiling.size} cuts data sets that are lists, and "
            f"{', '.join(cfg.DATASETS.TRAIN)} is a {type(records).__name__}; set it to 0."
        )
    return tile_records(records, tiling, cfg.INPUT.TILE.EMPTY)


def build_train_loader(cfg: CfgNode, images_per_batch: int) -> TrainLoader:
    """An endless loader over ``DATASETS.TRAIN``, shuffled or sampled as ``DATALOADER`` says.

    An image that cannot be read is named in the log, counted, and replaced by the next one. After
    ``DATALOADER.MAX_UNREADABLE_IMAGES`` of them the loader raises a ``DataError``.

    Args:
        cfg: a config with the keys of :func:`lambda_det.config.add_lambda_config`.
        images_per_batch: images of one batch over all training processes.

    Returns:
        Batches of this process: lists of ``images_per_batch`` / processes mapped images.

    Raises:
        ConfigError: the batch cannot be divided by the processes, there is no such sampler, or a
            value of the augmentation is invalid.
        DataError: no image has an annotation to train on.
    """
    _check_proposals(cfg)
    mapper = TolerantMapper(cfg, is_train=True)
    records = training_records(cfg)
    what = f"DATALOADER.SAMPLER_TRAIN {cfg.DATALOADER.SAMPLER_TRAIN} cannot be made"
    advice = "take TrainingSampler or RepeatFactorTrainingSampler. A LazyConfig can use any"
    # the sampler or one of its keys does not exist: Detectron2 reads the sampler from the config
    with refused(ConfigError, what, advice, ValueError, AttributeError):
        arguments = build_detection_train_loader.from_config(cfg, mapper=mapper, dataset=records)
    arguments["total_batch_size"] = images_per_batch
    if cfg.INPUT.LSJ.ENABLED:
        # All images get the same size, so groups by orientation would only spoil the shuffle.
        arguments["aspect_ratio_grouping"] = False
    return tolerant_train_loader(
        **arguments,
        own_seeds=False,
        max_unreadable=cfg.DATALOADER.MAX_UNREADABLE_IMAGES,
        unreadable_key="DATALOADER.MAX_UNREADABLE_IMAGES",
        timeout=cfg.DATALOADER.TIMEOUT,
    )


def tolerant_train_loader(
    dataset: list[Record] | Dataset,
    *,
    mapper: Mapper,
    total_batch_size: int,
    sampler: Iterable[int] | None = None,
    own_seeds: bool = True,
    aspect_ratio_grouping: bool = True,
    max_unreadable: int = 20,
    unreadable_key: str = "max_unreadable",
    **options: Any,
) -> TrainLoader:
    """:func:`build_train_loader` without a config, for a LazyConfig or a script.

    Args:
        dataset: the dataset dicts, as ``DatasetCatalog`` gives them for a checked data set.
        mapper: raises ``DataError`` if an image cannot be read, as a ``TolerantMapper`` does.
        total_batch_size: images of one batch over all training processes.
        sampler: one of Detectron2's samplers, or any other iterable of the indices of this process;
            None: a ``TrainingSampler`` with the run's seed.
        own_seeds: whether ``sampler`` keeps its seeds; otherwise it gets the run's.
        aspect_ratio_grouping: whether the images of a batch are all upright or all wide.
        max_unreadable: how many different images may be unreadable.
        unreadable_key: how messages name ``max_unreadable``.
        options: ``num_workers`` (0), ``collate_fn``, ``timeout`` (600 seconds to wait for a batch),
            and those of torch's DataLoader.

    Raises:
        ConfigError: the batch cannot be divided by the processes, or the data can only be iterated.
    """
    processes = comm.get_world_size()
    if total_batch_size < 1 or total_batch_size % processes:
        raise ConfigError(
            f"A batch of {total_batch_size} images (SOLVER.IMS_PER_BATCH over "
            f"SOLVER.ACCUMULATE_GRADIENTS) cannot be divided by {processes} training process(es); "
            "set SOLVER.IMS_PER_BATCH to a multiple."
        )
    records = _by_index(dataset)
    if sampler is None:
        # The stream replaces the seed
        sampler, own_seeds = TrainingSampler(len(dataset), seed=0), False
    is_list = isinstance(dataset, list)
    sources = sources_of(dataset) if is_list else None
    wide = None
    if aspect_ratio_grouping:
        wide = (
            orientations(dataset).__getitem__ if is_list else cache(lambda i: is_wide(dataset[i]))
        )
    return TrainLoader(
        TrainImages(records, mapper, max_unreadable, unreadable_key, sources),
        Stream(sampler, total_batch_size, is_wide=wide, own_seeds=own_seeds, sources=sources),
        **options,
    )


def _check_proposals(cfg: CfgNode) -> None:
    """Refuse a detector without proposals; Detectron2 asserts it without a message."""
    if cfg.MODEL.PROPOSAL_GENERATOR.NAME == "PrecomputedProposals" and not cfg.MODEL.LOAD_PROPOSALS:
        raise ConfigError(
            "MODEL.PROPOSAL_GENERATOR.NAME PrecomputedProposals needs MODEL.LOAD_PROPOSALS True, "
            "and a file of proposals for each data set."
        )


def _by_index(dataset: list[Record] | Dataset) -> Dataset:
    """The records by index; a list is serialised once for all workers."""
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"The data set {type(dataset).__name__} can only be iterated, so a resumed run cannot "
            "find its place in it; give a list of dataset dicts, or a data set that knows its "
            "length and gives them by index."
        )
    return DatasetFromList(dataset, copy=False) if isinstance(dataset, list) else dataset


def build_test_loader(cfg: CfgNode, dataset_name: str, *, with_truth: bool = False) -> ImageLoader:
    """A loader that gives each image of ``dataset_name`` once, shared among the processes.

    An image that cannot be read ends it with a ``DataError``: an AP over fewer images could not be
    compared, and nothing would show it. Where ``INPUT.TILE`` cuts images, it gives their tiles, all
    those of an image to one process, see :class:`lambda_det.detection.tiled.WholeImages`.

    Args:
        with_truth: each image alone with its ground truth, for the losses of training. Tiles are
            those that a training on these images would draw.
    """
    _check_proposals(cfg)
    mapper = TolerantMapper(cfg, is_train=False)
    if with_truth:
        check_files(dataset_name)
        options = TolerantMapper.from_config(cfg, is_train=True)
        # the pixels are as in the evaluation
        options |= {
            "augmentations": mapper.augmentations.augs,
            "exact_pixels": True,
            "recompute_boxes": False,
            "pixel_augmentations": (),
        }
        mapper = TolerantMapper(**options)
    arguments = build_detection_test_loader.from_config(cfg, dataset_name, mapper=mapper)
    records = arguments["dataset"]
    if with_truth:
        arguments |= {"dataset": _cut(cfg, records), "sampler": None}
    elif tiling := Tiling.from_config(cfg):
        # by images, because tiles of one image are joined; a process may have none
        own = set(InferenceSampler(len(records)))
        tiles = [tiles_to_test(record, tiling) for record in records]
        owners = [number for number, of_image in enumerate(tiles) for _ in of_image]
        arguments |= {
            "dataset": [tile for of_image in tiles for tile in of_image],
            "sampler": [place for place, owner in enumerate(owners) if owner in own],
        }
    return tolerant_test_loader(
        **arguments,
        batch_size=1 if with_truth else cfg.TEST.IMS_PER_BATCH,
        timeout=cfg.DATALOADER.TIMEOUT,
    )


def _of_one_size(records: Sequence[Record], indices: Iterable[int], size: int) -> list[list[int]]:
    """Batches of up to ``size`` images of one height and width; one of unknown size is alone."""
    groups: dict[Any, list[int]] = {}
    for index in indices:
        image_size = records[index].get("height"), records[index].get("width")
        groups.setdefault(index if None in image_size else image_size, []).append(index)
    return [batch for group in groups.values() for batch in BatchSampler(group, size, False)]


def tolerant_test_loader(
    dataset: list[Record] | Dataset,
    *,
    mapper: Mapper,
    sampler: Iterable[int] | None = None,
    batch_size: int = 1,
    collate_fn: Callable[[list[Record]], Any] | None = None,
    timeout: int = _TIMEOUT,
    num_workers: int = 0,
) -> ImageLoader:
    """:func:`build_test_loader` without a config, for a LazyConfig or a script.

    Args:
        dataset: the dataset dicts.
        mapper: raises ``DataError`` if an image cannot be read, as a ``TolerantMapper`` does.
        sampler: the indices of this process, a Sampler or another iterable; None: Detectron2's
            ``InferenceSampler``.
        batch_size: the most images of one batch of this process. With a list of dicts they have one
            size, because padding would change the predictions.
        collate_fn: makes a batch of a list of images; None leaves the list.
        timeout: seconds to wait for a batch before the workers count as hanging; 0: no limit.
        num_workers: processes that load images.

    Raises:
        ConfigError: the data can only be iterated.
    """
    images = EvalImages(_by_index(dataset), mapper)
    sampler = InferenceSampler(len(images)) if sampler is None else sampler
    order: dict[str, Any] = {"sampler": sampler, "batch_size": batch_size}
    if batch_size > 1 and isinstance(dataset, list):
        order = {"batch_sampler": _of_one_size(dataset, sampler, batch_size)}
    return ImageLoader(
        images,
        **order,
        collate_fn=collate_fn or trivial_batch_collator,
        timeout=timeout,
        num_workers=num_workers,
    )
