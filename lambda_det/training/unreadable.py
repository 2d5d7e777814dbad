"""Images that cannot be read: named, counted over all loader workers, replaced by the next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from lambda_det.errors import DataError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


class UnreadableImages:
    """Which images of a data set could not be read, shared by the workers of its loader.

    Args:
        size: images of the data set.
        limit: how many different images may be so. Counted over all loader workers of one training
            process, so that N processes together may meet more.
        key: the configuration key that ``limit`` comes from, for the message.
    """

    def __init__(self, size: int, limit: int, key: str) -> None:
        self._limit = limit
        self._key = key
        # In shared memory: each worker of a DataLoader has its own copy of this object.
        self._unreadable = torch.zeros(size, dtype=torch.bool).share_memory_()

    def next_readable(self, index: int, read: Callable[[int], Item]) -> Item:
        """Read the image at ``index``, or the next one, round the end, that can be read.

        Args:
            index: from 0.
            read: takes an index and raises ``DataError`` where the image cannot be read.

        Raises:
            DataError: more images than allowed, or all of them, could not be read.
        """
        last_error = None
        size = len(self._unreadable)
        for step in range(size):
            candidate = (int(index) + step) % size
            if self._unreadable[candidate]:
                continue
            try:
                return read(candidate)
            except DataError as error:
                last_error = error
                self._unreadable[candidate] = True
                self._report(error)
        raise DataError(f"No image of the training data can be read; the last: {last_error}")

    def _report(self, error: DataError) -> None:
        count = int(self._unreadable.sum())
        if count > self._limit:
            raise DataError(
                f"Training stops after {count} unreadable images, as {self._key} is "
                f"{self._limit}; the last: {error}"
            ) from error
        logger.warning(
            "Unreadable image %d of at most %d, replaced by the next: %s",
            count,
            self._limit,
            error,
        )
