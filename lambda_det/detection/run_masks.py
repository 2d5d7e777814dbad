"""Masks as run lengths: as pixels the masks of a large image do not fit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pycocotools.mask
import torch
from torch import Tensor

from lambda_det.detection.data.label_files import polygons
from lambda_det.detection.merging import area, runs


class RunMasks:
    """The masks of an image as run lengths, which become pixels one at a time.

    It stands for the tensor ``pred_masks`` [N, H, W] of Detectron2, which has 100 MB for each
    object of an image of 100 megapixels.
    """

    def __init__(self, masks: Sequence[np.ndarray], image_size: tuple[int, int]) -> None:
        """
        Args:
            masks: runs, as :class:`lambda_det.detection.merging.Detections` has them.
            image_size: height and width of the image.
        """
        self._masks, self.image_size = list(masks), image_size

    @classmethod
    def of(cls, masks: Tensor | RunMasks) -> RunMasks:
        """The masks of a tensor [N, H, W] on the CPU."""
        if isinstance(masks, RunMasks):
            return masks
        return cls([runs(mask, 0, 0) for mask in masks.numpy()], tuple(masks.shape[1:]))

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (len(self), *self.image_size)

    def __getitem__(self, index: Any) -> Tensor | RunMasks:
        """The mask [H, W] of an index, bool; or the masks of a slice, of indices or of booleans."""
        if not isinstance(index, (int, np.integer)):
            numbers = np.arange(len(self))
            chosen = numbers[index if isinstance(index, slice) else np.asarray(index)]
            return RunMasks([self._masks[number] for number in chosen], self.image_size)
        return torch.from_numpy(_pixels(self._masks[index], self.image_size))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[number] for number in range(len(self)))

    def to(self, *_: Any, **__: Any) -> RunMasks:
        """As of a tensor; run lengths are on the CPU."""
        return self

    def numpy(self) -> np.ndarray:
        """All masks [N, H, W], bool."""
        pixels = np.zeros(self.shape, bool)
        for number, mask in enumerate(self):
            pixels[number] = mask
        return pixels

    def polygons(self, number: int, *, for_hands: bool = False) -> list[list[float]]:
        """The outlines of a mask, see :func:`lambda_det.detection.data.label_files.polygons`."""
        mask = self._masks[number]
        if not len(mask):
            return []
        corner = mask[:, :2].min(0)
        (x0, y0), (x1, y1) = corner, mask[:, [0, 2]].max(0)
        pixels = _pixels(mask - [x0, y0, y0], (y1 - y0, x1 + 1 - x0))  # without what is around it
        found = polygons(pixels, for_hands=for_hands)
        outlines = (np.reshape(points, (-1, 2)) + corner for points in found)
        return [points.ravel().tolist() for points in outlines]

    def area(self, number: int) -> int:
        """The number of pixels of a mask."""
        return area(self._masks[number])

    def coco(self, number: int) -> dict[str, Any]:
        """A mask as COCO's run lengths: "size" and "counts", as text."""
        height, width = self.image_size
        mask = self._masks[number].astype(np.int64)
        ends = np.ravel(mask[:, :1] * height + mask[:, 1:])
        # a run that ends with its column goes on where the next one begins at once
        goes_on = ends[1:-1:2] == ends[2::2]
        ends = np.delete(ends, np.flatnonzero(np.repeat(goes_on, 2)) + 1)
        counts = np.diff(np.concatenate([[0], ends, [height * width]])).tolist()
        if not counts[-1]:  # COCO's own encoder has none behind a mask that ends with the image
            counts.pop()
        plain = {"size": [height, width], "counts": counts}
        made = pycocotools.mask.frPyObjects(plain, height, width)
        return {"size": [height, width], "counts": made["counts"].decode()}


def _pixels(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The pixels [H, W], bool, of runs."""
    pixels = np.zeros(size, bool)
    for x, y0, y1 in mask.tolist():
        pixels[y0:y1, x] = True
    return pixels
