"""A source in memory, for the tests of what is built on sources."""

from collections.abc import Collection, Sequence

import numpy as np

from lambda_det.errors import DataError


class ToySource:
    """Images of 20x24 pixels, red their index, green and blue their row and column.

    Those in ``broken`` cannot be read.
    """

    def __init__(self, labels: Sequence[int], broken: Collection[int] = ()) -> None:
        self.classes = [f"class {number}" for number in range(max(labels) + 1)]
        self.labels = np.array(labels, dtype=np.int64)
        self._broken = broken

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"image {index}"

    def load(self, index: int) -> np.ndarray:
        if index in self._broken:
            raise DataError(f"image {index} is broken")
        image = np.empty((24, 20, 3), dtype=np.uint8)
        image[..., 0] = index
        image[..., 1] = np.arange(24)[:, None] * 10
        image[..., 2] = np.arange(20) * 10
        return image
