"""The mapper from a dataset dict to a model's input, for data that are not as tidy as COCO."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode, configurable
from detectron2.data import DatasetMapper, detection_utils
from detectron2.data import transforms as T
from detectron2.structures import BitMasks, BoxMode, PolygonMasks

from lambda_det.detection.data.jitter import build_augmentation
from lambda_det.detection.data.predictions import predictions
from lambda_det.detection.data.records import (
    depth_fault,
    image_fault,
    label_fault,
    mask_fault,
    mask_mode_fault,
    no_file,
    usable_polygons,
    usable_runs,
    without_crossings,
)
from lambda_det.errors import DataError, printable

logger = logging.getLogger(__name__)


class TolerantMapper(DatasetMapper):
    """Detectron2's ``DatasetMapper`` for data that are not as tidy as COCO.

    - An image trains as an empty image if it has no annotations, only crowds, or no annotation
      within the crop.
    - An image with polygons and run-length masks gets bitmaps of both.
    - An annotation without a usable box or with a broken mask is left out. An annotation without a
      mask, among others with masks, gets its box as mask. Each process warns once of each kind.
    - A ``DataError`` names an image that cannot be read or has another size than its annotations
      say, and a semantic mask with labels that the model has no class for.

    With a config, the augmentations are those of
    :func:`lambda_det.detection.data.build_augmentation`.
    """

    @configurable
    def __init__(
        self,
        *args: Any,
        semantic_classes: int | None = None,
        ignored_label: int = 255,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            args: of Detectron2's ``DatasetMapper``.
            semantic_classes: the labels of semantic masks are below this; None: any label.
            ignored_label: the label of pixels without a class.
            kwargs: as ``args``.
        """
        super().__init__(*args, **kwargs)
        self.semantic_classes = semantic_classes
        self.ignored_label = ignored_label

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        augmentations = build_augmentation(cfg, is_train)  # refuses what Detectron2 asserts
        arguments = super().from_config(cfg, is_train)
        if "semantic" in predictions(cfg.MODEL.META_ARCHITECTURE):
            arguments["semantic_classes"] = cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES
            arguments["ignored_label"] = cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE
        if is_train and cfg.INPUT.LSJ.ENABLED:
            arguments["augmentations"] = augmentations
            # The crop may leave less of an object than of its box.
            arguments["recompute_boxes"] = cfg.MODEL.MASK_ON
        else:
            # They replace Detectron2's own; the crop of INPUT.CROP stays before them.
            arguments["augmentations"][-len(augmentations) :] = augmentations
        return arguments

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any]:
        """Read and augment one image.

        Args:
            dataset_dict: one image in Detectron2's dataset format; it is not changed.

        Returns:
            The input of Detectron2's models: "image", uint8 [C, H, W], in training "instances", ...

        Raises:
            DataError: the image cannot be read or has another size than its annotations say.
        """
        if self.is_train:
            dataset_dict = {"annotations": [], **dataset_dict}
        for key in ("file_name", "sem_seg_file_name"):
            # Opening a pipe would never return.
            if fault := no_file(dataset_dict.get(key)):
                raise DataError(fault)
        fault = depth_fault(dataset_dict["file_name"])
        if fault is None and self.is_train and dataset_dict.get("sem_seg_file_name") is not None:
            fault = mask_mode_fault(dataset_dict["sem_seg_file_name"])
        if fault:
            raise DataError(fault)
        try:
            sample = super().__call__(dataset_dict)
        except Exception as error:
            # Image libraries may raise anything for a broken file. Reading it again tells a fault
            # of the file from one of the program.
            fault = image_fault(dataset_dict, self.image_format) or mask_fault(dataset_dict)
            if fault is None:
                raise
            raise DataError(fault) from error
        if self.is_train and "sem_seg" in sample and self.semantic_classes is not None:
            fault = label_fault(
                dataset_dict["sem_seg_file_name"],
                sample["sem_seg"].numpy(),
                self.semantic_classes,
                self.ignored_label,
            )
            if fault:
                raise DataError(fault)
        return sample

    def _transform_annotations(
        self, dataset_dict: dict[str, Any], transforms: T.Transform, image_shape: tuple[int, int]
    ) -> None:
        annotations = self._usable_annotations(dataset_dict)
        # Detectron2 can make masks of either form out of polygons, but of run lengths only bitmaps.
        has_runs = any(isinstance(a.get("segmentation"), dict) for a in annotations)
        mask_format = "bitmask" if has_runs else self.instance_mask_format
        transformed = [
            detection_utils.transform_instance_annotations(
                annotation,
                transforms,
                image_shape,
                keypoint_hflip_indices=self.keypoint_hflip_indices,
            )
            for annotation in annotations
        ]
        for annotation in transformed:
            if isinstance(annotation.get("segmentation"), np.ndarray):
                # FixedSizeCrop pads with 255. It means "ignore" in semantic segmentation, but
                # foreground in BitMasks and in the boxes that are computed from them.
                annotation["segmentation"] = annotation["segmentation"] == 1
        instances = detection_utils.annotations_to_instances(
            transformed, image_shape, mask_format=mask_format
        )
        if self.use_instance_mask and not instances.has("gt_masks"):
            instances.gt_masks = _no_masks(mask_format, image_shape)
        if self.recompute_boxes:
            # An empty polygon has an infinite box, which cannot be clipped.
            instances = instances[instances.gt_masks.nonempty()]
            instances.gt_boxes = instances.gt_masks.get_bounding_boxes()
            instances.gt_boxes.clip(image_shape)
        dataset_dict["instances"] = detection_utils.filter_empty_instances(instances)

    def _usable_annotations(self, dataset_dict: dict[str, Any]) -> list[dict[str, Any]]:
        """Take the annotations out of ``dataset_dict`` and return those that can be trained on."""
        usable = []
        for annotation in dataset_dict.pop("annotations"):
            if annotation.get("iscrowd", 0):
                continue
            if not self.use_keypoint:
                annotation.pop("keypoints", None)
            elif self.keypoint_hflip_indices is not None:
                self._complete_keypoints(annotation, dataset_dict)
            box = _corners(annotation)
            if box is None:
                self._warn_once(dataset_dict, "without a usable box is left out")
                continue
            if not self.use_instance_mask:
                annotation.pop("segmentation", None)
            elif not annotation.get("segmentation"):
                # Without a mask, the object or the mask loss of the whole image would be lost. The
                # box is the best guess of the mask.
                sides = 2 * (dataset_dict["width"], dataset_dict["height"])
                x0, y0, x1, y1 = np.clip(box, 0, sides).tolist()
                annotation["segmentation"] = [[x0, y0, x1, y0, x1, y1, x0, y1]]
                self._warn_once(dataset_dict, "without a mask gets its box as mask")
            else:
                mask = _usable_mask(annotation["segmentation"], dataset_dict)
                if mask is None:
                    self._warn_once(dataset_dict, "with a broken mask is left out")
                    continue
                annotation["segmentation"] = mask
            usable.append(annotation)
        return usable

    def _complete_keypoints(self, annotation: dict[str, Any], dataset_dict: dict[str, Any]) -> None:
        """Give an object without keypoints some of visibility 0, which do not count.

        Detectron2 needs the same number of keypoints for every object.
        """
        values = 3 * len(self.keypoint_hflip_indices)
        keypoints = annotation.get("keypoints")
        if keypoints is None or np.size(keypoints) != values:
            if keypoints:
                self._warn_once(
                    dataset_dict, "with another number of keypoints is used without them"
                )
            annotation["keypoints"] = [0.0] * values

    def _warn_once(self, dataset_dict: dict[str, Any], what: str) -> None:
        if what not in _warned:
            _warned.add(what)
            logger.warning(
                "%s: an annotation %s (reported once; tools/check_dataset.py lists all of them).",
                printable(dataset_dict["file_name"]),
                what,
            )


_warned: set[str] = set()


def _corners(annotation: dict[str, Any]) -> list[float] | None:
    """The box as x0, y0, x1, y1, or None if it is missing, not finite or without area."""
    try:
        box = BoxMode.convert(
            [float(v) for v in annotation["bbox"]], annotation["bbox_mode"], BoxMode.XYXY_ABS
        )
    except (KeyError, TypeError, ValueError, OverflowError, AssertionError):
        return None
    x0, y0, x1, y1 = box
    usable = np.isfinite(box).all() and x1 > x0 and y1 > y0
    return box if usable else None


def _usable_mask(
    segmentation: Any, record: dict[str, Any]
) -> list[np.ndarray] | dict[str, Any] | None:
    """The valid polygons, or a compressed run-length mask of the image's size, or None."""
    height, width = record["height"], record["width"]
    if isinstance(segmentation, dict):
        return usable_runs(segmentation, height, width)
    if not isinstance(segmentation, list):
        return None
    polygons = [p.reshape(-1, 2) for p in usable_polygons(segmentation, height, width)]
    return [part.reshape(-1) for points in polygons for part in without_crossings(points)] or None


def _no_masks(mask_format: str, image_shape: tuple[int, int]) -> PolygonMasks | BitMasks:
    if mask_format == "polygon":
        return PolygonMasks([])
    return BitMasks(torch.zeros(0, *image_shape, dtype=torch.bool))
