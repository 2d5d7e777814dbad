"""CIFAR-10 as torchvision downloads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torchvision.datasets import CIFAR10

from lambda_det.errors import DataError


class Cifar10Source:
    """The 50,000 training or the 10,000 test images of CIFAR-10, 32x32, in memory.

    Args:
        root: the folder that torchvision has downloaded to; it checks the files' MD5 sums.
        train: the training images instead of the test images.

    Raises:
        DataError: the files are not there, or damaged.
    """

    def __init__(self, root: str | Path, train: bool) -> None:
        try:
            files = CIFAR10(str(root), train=train, download=False)
        except RuntimeError as error:
            raise DataError(
                f"{root} does not hold CIFAR-10, or not undamaged; download it with: "
                'python -c "from torchvision.datasets import CIFAR10; '
                f'CIFAR10({str(root)!r}, download=True)"'
            ) from error
        self.classes = list(files.classes)
        self._part = "train" if train else "test"
        self._pixels = torch.from_numpy(np.ascontiguousarray(files.data))
        self._labels = torch.tensor(files.targets, dtype=torch.int64)

    @property
    def labels(self) -> np.ndarray:
        """int64 [images]"""
        return self._labels.numpy()

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        return f"{self._part}/{index:05d}"

    def load(self, index: int) -> np.ndarray:
        """uint8 RGB [32, 32, 3]; not a copy"""
        return self._pixels[index].numpy()
