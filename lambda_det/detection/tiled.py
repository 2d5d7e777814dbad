"""The instances of whole images, from a detector that is given their tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from detectron2.evaluation import DatasetEvaluator
from detectron2.structures import Boxes, Instances

from lambda_det.detection.merging import Detections, merge, runs
from lambda_det.detection.run_masks import RunMasks
from lambda_det.detection.tiles import Tile


class WholeImage:
    """The instances of one image, collected from its tiles.

    Those of a single tile, which is the image, stay as they are. Of several, masks are kept as
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
        """The instances of the image, with :class:`RunMasks` where there are several tiles."""
        if self._alone is not None:
            return self._alone
        found = merge(self._tiles, *self._size)
        result = Instances(
            self._size,
            pred_boxes=Boxes(torch.from_numpy(found.boxes)),
            scores=torch.from_numpy(found.scores),
            pred_classes=torch.from_numpy(found.classes),
        )
        if found.masks is not None:
            result.pred_masks = RunMasks(found.masks, self._size)
        return result


class WholeImages(DatasetEvaluator):
    """Gives evaluators whole images, where the images of a loader are tiles.

    The tiles of an image come one after the other, row by row, all to the same process.
    """

    def __init__(self, evaluators: DatasetEvaluator) -> None:
        self._evaluators = evaluators

    def reset(self) -> None:
        self._evaluators.reset()

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        for entry, output in zip(inputs, outputs, strict=True):
            if "tile" not in entry:  # an image that is not larger than a tile
                self._evaluators.process([entry], [output])
                continue
            height, width = entry["image_size"]
            tile = Tile(*entry["tile"])
            if (tile.x0, tile.y0) == (0, 0):
                self._image = WholeImage(height, width)
            self._image.add(tile, output["instances"].to("cpu"))
            if (tile.x1, tile.y1) == (width, height):
                record = {key: entry[key] for key in entry.keys() - {"image", "tile"}}
                record |= {"height": height, "width": width}
                self._evaluators.process([record], [{"instances": self._image.instances()}])

    def evaluate(self, *args: Any, **named: Any) -> Any:
        return self._evaluators.evaluate(*args, **named)
