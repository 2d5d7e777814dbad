"""Mapped images, or the failure to read one, in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import Dataset

from lambda_det.errors import DataError
from lambda_det.training.randomness import Purpose, seeded
from lambda_det.training.stream import Key
from lambda_det.training.unreadable import UnreadableImages
from lambda_det.training.workers import reading

__all__ = ["FailureMapper", "SkippingDataset"]


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
