"""The cost of evaluations relative to the steps of a training, for schedules and forecasts.

The unit is an image of a step, forwards and backwards at the sizes of training.
"""

from __future__ import annotations

from collections.abc import Iterable

from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.detection.data.ground_truth import file_report
from lambda_det.detection.data.registration import is_coco
from lambda_det.detection.tiles import Tiling

# Measured with the light recipe on two cores: 17 photographs with tomatoes (boxes) 0.63, and 108
# facades of 1024x1024 with ten polygons each, whose masks are pasted and compared, 2.8
BOXES, MASKS, LOSSES = 0.7, 3.0, 0.7


def cost_of_image(*, has_masks: bool, has_losses: bool, sets_of_weights: int = 1) -> float:
    """The cost of an image of the test set.

    Args:
        has_masks: whether the detector finds masks.
        has_losses: whether the losses of the test set are also computed, once.
        sets_of_weights: number of evaluated sets of weights: 1 for the trained or the averaged
            ones, 2 for both.
    """
    return sets_of_weights * (MASKS if has_masks else BOXES) + (LOSSES if has_losses else 0.0)


def number_of_images(names: Iterable[str], tiling: Tiling | None = None) -> int:
    """The number of images of registered data sets, which are not opened.

    Args:
        names: of the data sets.
        tiling: how images are cut; then tiles are counted.
    """
    count = 0
    for name in names:
        if is_coco(name):
            metadata = MetadataCatalog.get(name)
            images = file_report(metadata.json_file, metadata.image_root).files
        else:
            images = DatasetCatalog.get(name)
        if tiling is None:
            count += len(images)
        else:
            count += sum(len(tiling.tiles(one["height"], one["width"])) for one in images)
    return count
