"""The mapper from a dataset dict to a model's input, for data that are not as tidy as COCO."""

from __future__ import annotations

from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import torch
from detectron2.config import CfgNode, configurable
from detectron2.data import DatasetMapper, detection_utils
from detectron2.data import transforms as T
from detectron2.structures import BitMasks, Boxes, PolygonMasks

from lambda_det.detection.data.jitter import build_augmentation
from lambda_det.detection.data.predictions import predictions
from lambda_det.detection.data.records import (
    depth_fault,
    image_fault,
    label_fault,
    mask_fault,
    mask_mode_fault,
    no_file,
)
from lambda_det.detection.data.transforming import (
    CHANNELS,
    ImageFile,
    Outline,
    Placement,
    draws_by_size,
    transform_polygons,
)
from lambda_det.detection.data.truth import usable_annotations
from lambda_det.errors import DataError


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
        exact_pixels: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            args: of Detectron2's ``DatasetMapper``.
            semantic_classes: the labels of semantic masks are below this; None: any label.
            ignored_label: the label of pixels without a class.
            exact_pixels: training images have the pixels of Detectron2's own mapper, which takes
                longer. Otherwise docs/performance.md says how far they are from those.
            kwargs: as ``args``.
        """
        super().__init__(*args, **kwargs)
        self.semantic_classes = semantic_classes
        self.ignored_label = ignored_label
        self.exact_pixels = exact_pixels

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        augmentations = build_augmentation(cfg, is_train)  # refuses what Detectron2 asserts
        arguments = super().from_config(cfg, is_train)
        arguments["exact_pixels"] = cfg.INPUT.EXACT_PIXELS
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
            sample = self._map(dataset_dict)
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

    def _map(self, record: dict[str, Any]) -> dict[str, Any]:
        """What Detectron2's mapper makes of a record; in training in less time."""
        by_size = draws_by_size(self.augmentations) and self.image_format in CHANNELS
        if self.exact_pixels or not self.is_train or not by_size:
            return super().__call__(record)
        sample = {**record, "annotations": [{**a} for a in record["annotations"]]}
        file = ImageFile(sample["file_name"])
        outline = Outline(*file.size)
        detection_utils.check_image_size(sample, outline.image)
        transforms = self.augmentations(outline)
        place = Placement.of(file.size, transforms)
        if place is not None:
            image = file.draw(place, CHANNELS[self.image_format])
        else:
            pixels = detection_utils.read_image(sample["file_name"], self.image_format)
            pixels = transforms.apply_image(pixels).transpose(2, 0, 1)
            image = torch.from_numpy(np.ascontiguousarray(pixels))
        sample["image"] = image
        size = tuple(image.shape[1:])
        if "sem_seg_file_name" in sample:
            labels = detection_utils.read_image(sample.pop("sem_seg_file_name"), "L").squeeze(2)
            labels = transforms.apply_segmentation(labels)
            sample["sem_seg"] = torch.from_numpy(labels.astype(np.int64))
        if self.proposal_topk is not None:
            detection_utils.transform_proposals(
                sample, size, transforms, proposal_topk=self.proposal_topk
            )
        self._transform_annotations(sample, transforms, size)
        return sample

    def _transform_annotations(
        self, dataset_dict: dict[str, Any], transforms: T.Transform, image_shape: tuple[int, int]
    ) -> None:
        keypoints = None if self.use_keypoint else 0
        if self.use_keypoint and self.keypoint_hflip_indices is not None:
            keypoints = len(self.keypoint_hflip_indices)
        annotations = usable_annotations(
            dataset_dict, masks=self.use_instance_mask, keypoints=keypoints
        )
        del dataset_dict["annotations"]
        # Detectron2 can make masks of either form out of polygons, but of run lengths only bitmaps.
        has_runs = any(isinstance(a.get("segmentation"), dict) for a in annotations)
        mask_format = "bitmask" if has_runs else self.instance_mask_format
        transformed = self._transformed(annotations, transforms, image_shape)
        instances = detection_utils.annotations_to_instances(
            transformed, image_shape, mask_format=mask_format
        )
        if self.use_instance_mask and not instances.has("gt_masks"):
            instances.gt_masks = _no_masks(mask_format, image_shape)
        if self.recompute_boxes:
            # An empty polygon has an infinite box, which cannot be clipped.
            instances = instances[instances.gt_masks.nonempty()]
            instances.gt_boxes = _boxes_of(instances.gt_masks)
            instances.gt_boxes.clip(image_shape)
        dataset_dict["instances"] = detection_utils.filter_empty_instances(instances)

    def _transformed(
        self, annotations: list[dict[str, Any]], transforms: T.Transform, size: tuple[int, int]
    ) -> list[dict[str, Any]]:
        """``detection_utils.transform_instance_annotations`` of all annotations together."""
        boxes = np.array([annotation["bbox"] for annotation in annotations]).reshape(-1, 4)
        boxes = transforms.apply_box(boxes).clip(0, (size + size)[::-1])
        masks = [annotation.get("segmentation") for annotation in annotations]
        polygons = transform_polygons([m if isinstance(m, list) else [] for m in masks], transforms)
        result = []
        for annotation, box, mask, parts in zip(annotations, boxes, masks, polygons, strict=True):
            moved = {**annotation, "bbox": box}
            if isinstance(mask, dict):
                # FixedSizeCrop pads with 255. It means "ignore" in semantic segmentation, but
                # foreground in BitMasks and in the boxes that are computed from them.
                moved["segmentation"] = transforms.apply_segmentation(mask_util.decode(mask)) == 1
            elif mask is not None:
                moved["segmentation"] = [part.reshape(-1) for part in parts]
            if "keypoints" in annotation:
                moved["keypoints"] = detection_utils.transform_keypoint_annotations(
                    np.array(annotation["keypoints"]), transforms, size, self.keypoint_hflip_indices
                )
            result.append(moved)
        return result


def _boxes_of(masks: PolygonMasks | BitMasks) -> Boxes:
    """``masks.get_bounding_boxes()``, for polygons in a tenth of the time."""
    if isinstance(masks, BitMasks):
        return masks.get_bounding_boxes()
    points = [np.concatenate(parts).reshape(-1, 2) for parts in masks.polygons]
    boxes = [np.concatenate([p.min(0), p.max(0).clip(0)]) for p in points]
    return Boxes(np.array(boxes, dtype=np.float32).reshape(-1, 4))


def _no_masks(mask_format: str, image_shape: tuple[int, int]) -> PolygonMasks | BitMasks:
    if mask_format == "polygon":
        return PolygonMasks([])
    return BitMasks(torch.zeros(0, *image_shape, dtype=torch.bool))
