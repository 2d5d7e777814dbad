"""The instances of whole pictures, from a detector that is given their tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pycocotools.mask
import torch
from detectron2.evaluation import DatasetEvaluator
from detectron2.structures import Boxes, Instances
from torch import Tensor

from lambda_det.detection.merging import Detections, area, merge, runs
from lambda_det.detection.tiles import Tile

__all__ = ["RunMasks", "WholePicture", "WholePictures"]


class RunMasks:
    """The masks of a picture as run lengths, which become pixels one at a time.

    It stands for the tensor ``pred_masks`` [N, H, W] of Detectron2, which has 100 MB for each
    object of a picture of 100 megapixels.
    """

    def __init__(self, masks: Sequence[np.ndarray], image_size: tuple[int, int]) -> None:
        """
        Args:
            masks: runs, as :class:`lambda_det.detection.merging.Detections` has them.
            image_size: height and width of the picture.
        """
        self._masks, self.image_size = list(masks), image_size

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (len(self), *self.image_size)

    def __getitem__(self, index: Any) -> Tensor | RunMasks:
        """The mask [H, W] of a number, bool; or the masks of a slice, of numbers or of booleans."""
        if not isinstance(index, (int, np.integer)):
            numbers = np.arange(len(self))
            chosen = numbers[index if isinstance(index, slice) else np.asarray(index)]
            return RunMasks([self._masks[number] for number in chosen], self.image_size)
        pixels = np.zeros(self.image_size, bool)
        for x, y0, y1 in self._masks[index].tolist():
            pixels[y0:y1, x] = True
        return torch.from_numpy(pixels)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[number] for number in range(len(self)))

    def to(self, *_: Any, **__: Any) -> RunMasks:
        """As of a tensor; run lengths are on the CPU."""
        return self

    def numpy(self) -> np.ndarray:
        """All masks [N, H, W], bool."""
        pixels = np.zeros(self.shape, bool)
        for number, mask in enumerate(self._masks):
            for x, y0, y1 in mask.tolist():
                pixels[number, y0:y1, x] = True
        return pixels

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().astype(dtype or bool, copy=False)

    def cropped(self, number: int) -> tuple[np.ndarray, tuple[int, int]]:
        """The pixels of a mask within its outline, bool [h, w], and its first column and row."""
        mask = self._masks[number]
        if not len(mask):
            return np.zeros((1, 1), bool), (0, 0)
        (x0, y0), (x1, y1) = mask[:, :2].min(0), mask[:, [0, 2]].max(0)
        pixels = np.zeros((y1 - y0, x1 + 1 - x0), bool)
        for x, begin, end in (mask - [x0, y0, y0]).tolist():
            pixels[begin:end, x] = True
        return pixels, (int(x0), int(y0))

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
        if not counts[-1]:  # COCO's own encoder has none behind a mask that ends with the picture
            counts.pop()
        plain = {"size": [height, width], "counts": counts}
        made = pycocotools.mask.frPyObjects(plain, height, width)
        return {"size": [height, width], "counts": made["counts"].decode()}


class WholePicture:
    """The instances of one picture, collected from its tiles.

    Those of a single tile, which is the picture, stay as they are. Of several, masks are kept as
    run lengths from the moment they are added.
    """

    def __init__(self, height: int, width: int) -> None:
        self._size = height, width
        self._tiles: list[tuple[Tile, Detections]] = []
        self._alone: Instances | None = None

    def add(self, tile: Tile, instances: Instances) -> None:
        """Add the instances of a tile.

        Args:
            instances: on the CPU, in pixels of the tile, the highest scores first.
        """
        height, width = self._size
        if tile == (0, 0, width, height):
            self._alone = instances
            return
        boxes = instances.pred_boxes.tensor.numpy()
        masks = None
        if instances.has("pred_masks"):
            masks = [runs(mask, tile.x0, tile.y0) for mask in instances.pred_masks.numpy()]
        found = Detections(
            boxes + np.array([tile.x0, tile.y0] * 2, boxes.dtype),
            instances.scores.numpy(),
            instances.pred_classes.numpy(),
            masks,
        )
        self._tiles.append((tile, found))

    def instances(self) -> Instances:
        """The instances of the picture, with :class:`RunMasks` where there are several tiles."""
        if self._alone is not None:
            return self._alone
        found = merge(self._tiles, *self._size)
        result = Instances(self._size)
        result.pred_boxes = Boxes(torch.from_numpy(found.boxes))
        result.scores = torch.from_numpy(found.scores)
        result.pred_classes = torch.from_numpy(found.classes)
        if found.masks is not None:
            result.pred_masks = RunMasks(found.masks, self._size)
        return result


class WholePictures(DatasetEvaluator):
    """Gives evaluators whole pictures, where the images of a loader are tiles.

    The tiles of a picture come one after the other, row by row, all to the same process.
    """

    def __init__(self, evaluators: DatasetEvaluator) -> None:
        self._evaluators = evaluators
        self._picture: WholePicture | None = None

    def reset(self) -> None:
        self._picture = None
        self._evaluators.reset()

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        for entry, output in zip(inputs, outputs, strict=True):
            if "tile" not in entry:  # a picture that is not larger than a tile
                self._evaluators.process([entry], [output])
                continue
            height, width = entry["picture_size"]
            tile = Tile(*entry["tile"])
            if self._picture is None:
                self._picture = WholePicture(height, width)
            self._picture.add(tile, output["instances"].to("cpu"))
            if (tile.x1, tile.y1) == (width, height):
                record = {key: entry[key] for key in entry.keys() - {"image", "tile"}}
                record |= {"height": height, "width": width}
                merged = self._picture.instances()
                self._picture = None
                self._evaluators.process([record], [{"instances": merged}])

    def evaluate(self, *args: Any, **named: Any) -> Any:
        return self._evaluators.evaluate(*args, **named)
