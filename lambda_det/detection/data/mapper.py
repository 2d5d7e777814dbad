"""The mapper from a dataset dict to a model's input, for data that are not as tidy as COCO."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import torch
from detectron2.config import CfgNode, configurable
from detectron2.data import DatasetMapper, detection_utils
from detectron2.data import transforms as T
from detectron2.structures import BitMasks, Boxes, BoxMode, PolygonMasks

from lambda_det.detection.data.jitter import (
    PixelAugmentation,
    build_augmentation,
    build_pixel_augmentation,
    changes_outlines,
)
from lambda_det.detection.data.predictions import predictions
from lambda_det.detection.data.records import (
    check_labels,
    head_fault,
    image_fault,
    mask_fault,
    read_pixels,
)
from lambda_det.detection.data.tile_pixels import read_tile
from lambda_det.detection.data.transforming import (
    CHANNELS,
    ImageFile,
    Outline,
    Placement,
    draws_by_size,
    placed,
    transform_polygons,
)
from lambda_det.detection.data.truth import corners, mask_of
from lambda_det.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

# What Detectron2's FixedSizeCrop, and any augmentation here, adds to a mask beyond an image
PADDING = 255


class TolerantMapper(DatasetMapper):
    """Detectron2's ``DatasetMapper`` for data that are not as tidy as COCO.

    - An image trains as an empty image if it has no annotations, only crowds, or no annotation
      within the crop.
    - An image with polygons and run-length masks gets bitmaps of both.
    - An annotation without a mask gets its box as mask.
    - A ``DataError`` names an image that cannot be read or has another size than its annotations
      say, and a semantic mask with labels for which the model has no class.

    It trusts the annotations as :func:`lambda_det.detection.data.read_coco` decided about them, or
    the loader for other records.

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
        pixel_augmentations: Sequence[PixelAugmentation] = (),
        **kwargs: Any,
    ) -> None:
        """
        Args:
            args: of Detectron2's ``DatasetMapper``.
            semantic_classes: the labels of semantic masks are below this; None: any label.
            ignored_label: the label of pixels without a class.
            exact_pixels: training images have the pixels of Detectron2's own mapper, which takes
                longer. docs/performance.md says how much they differ otherwise.
            pixel_augmentations: change the pixels of images, see ``PIXEL_AUGMENTATIONS``.
            kwargs: as ``args``.

        Raises:
            ConfigError: a change of pixels is of images in another format.
        """
        super().__init__(*args, **kwargs)
        self.semantic_classes = semantic_classes
        self.ignored_label = ignored_label
        self.exact_pixels = exact_pixels
        self.pixel_augmentations = list(pixel_augmentations)
        for one in self.pixel_augmentations:  # of a LazyConfig, which gives both
            if (given := getattr(one, "image_format", self.image_format)) != self.image_format:
                raise ConfigError(
                    f"A change of pixels is for images in {given}, and its mapper has image_format "
                    f"{self.image_format}; give both the same."
                )
        if self.is_train and not exact_pixels and not self.draws_by_size:
            logger.info(
                f"Training images are read whole, which takes longer: {self.image_format} or one "
                "of the augmentations above is not among those that are drawn before an image is "
                "read."
            )

    @property
    def draws_by_size(self) -> bool:
        """Whether the augmentations are drawn before the image is read, which saves most of it."""
        return draws_by_size(self.augmentations) and self.image_format in CHANNELS

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        # first, because it names the key of a value that Detectron2 refuses without a name
        augmentations = build_augmentation(cfg, is_train)
        learns_masks = is_train and cfg.MODEL.MASK_ON
        arguments = super().from_config(cfg, is_train) | {
            "augmentations": augmentations,
            # a crop may leave less of an object than of its box
            "recompute_boxes": learns_masks and changes_outlines(augmentations),
            "exact_pixels": cfg.INPUT.EXACT_PIXELS,
            "pixel_augmentations": build_pixel_augmentation(cfg) if is_train else (),
        }
        if "semantic" in predictions(cfg.MODEL.META_ARCHITECTURE):
            arguments["semantic_classes"] = cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES
            arguments["ignored_label"] = cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE
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
        fault = head_fault(dataset_dict["file_name"]) or head_fault(
            dataset_dict.get("sem_seg_file_name"), "labels" if self.is_train else "any"
        )
        if fault:
            raise DataError(fault)
        try:
            sample = self._map(dataset_dict)
        except Exception as error:
            # Image libraries may raise anything for a broken file. Reading it again distinguishes a
            # fault of the file from one of the program.
            image = dict(dataset_dict)
            if "tile" in image:
                image["height"], image["width"] = image["image_size"]
            fault = image_fault(image, self.image_format) or mask_fault(dataset_dict)
            if fault is None:
                raise
            raise DataError(fault) from error
        if self.is_train and "sem_seg" in sample and self.semantic_classes is not None:
            check_labels(
                dataset_dict["sem_seg_file_name"],
                sample["sem_seg"].numpy(),
                self.semantic_classes,
                self.ignored_label,
            )
        return sample

    def _map(self, record: dict[str, Any]) -> dict[str, Any]:
        """Map a record as Detectron2's mapper does; in training in less time."""
        sample = {**record}
        labels = None
        if "sem_seg_file_name" in sample:
            labels = read_pixels(sample.pop("sem_seg_file_name"), "L").squeeze(2)
        if self.is_train and self.draws_by_size and not self.exact_pixels:
            image, transforms = self._drawn(sample)
            moved = None if labels is None else transforms.apply_segmentation(labels)
        else:
            given = T.AugInput(self._pixels(sample), sem_seg=labels)
            detection_utils.check_image_size(sample, given.image)
            transforms = self.augmentations(given)
            image, moved = _planes(given.image), given.sem_seg
        for changed in self.pixel_augmentations:
            image = changed(image)
        sample["image"] = image
        size = tuple(image.shape[1:])
        if moved is not None:
            moved = moved.astype(np.int64)
            if self.ignored_label != PADDING:
                is_padding = transforms.apply_segmentation(np.ones_like(labels)) == PADDING
                moved[is_padding] = self.ignored_label
            sample["sem_seg"] = torch.from_numpy(moved)
        if self.proposal_topk is not None:
            detection_utils.transform_proposals(
                sample, size, transforms, proposal_topk=self.proposal_topk
            )
        if self.is_train:
            self._transform_annotations(sample, transforms, size)
        else:
            sample.pop("annotations", None)
        return sample

    def _drawn(self, sample: dict[str, Any]) -> tuple[torch.Tensor, T.TransformList]:
        """The training image [C, H, W] and its transforms, drawn before the pixels are read."""
        file = None if "tile" in sample else ImageFile(sample["file_name"])
        size = file.size if file else (sample["height"], sample["width"])
        outline = Outline(*size)
        detection_utils.check_image_size(sample, outline.image)
        transforms = self.augmentations(outline)
        place = Placement.of(size, transforms)
        if place is None:
            return _planes(transforms.apply_image(self._pixels(sample))), transforms
        pixels, extent = file.decode(place.resized) if file else (read_tile(sample, "RGB"), size)
        return placed(pixels, extent, place, CHANNELS[self.image_format]), transforms

    def _pixels(self, sample: dict[str, Any]) -> np.ndarray:
        """The pixels of the image or tile, [H, W, C]."""
        if "tile" in sample:
            return read_tile(sample, self.image_format)
        return read_pixels(sample["file_name"], self.image_format)

    def _transform_annotations(
        self, dataset_dict: dict[str, Any], transforms: T.Transform, image_shape: tuple[int, int]
    ) -> None:
        annotations = [a for a in dataset_dict.pop("annotations") if not a.get("iscrowd", 0)]
        transformed = self._transformed(
            annotations, (dataset_dict["height"], dataset_dict["width"]), transforms, image_shape
        )
        # Detectron2 can make masks of either form out of polygons, but of run lengths only bitmaps.
        has_runs = any(isinstance(a.get("segmentation"), np.ndarray) for a in transformed)
        mask_format = "bitmask" if has_runs else self.instance_mask_format
        instances = detection_utils.annotations_to_instances(
            transformed, image_shape, mask_format=mask_format
        )
        if self.use_instance_mask and not instances.has("gt_masks"):
            no_bits = torch.zeros(0, *image_shape, dtype=torch.bool)
            instances.gt_masks = PolygonMasks([]) if mask_format == "polygon" else BitMasks(no_bits)
        if self.recompute_boxes:
            # An empty polygon has an infinite box, which cannot be clipped.
            instances = instances[instances.gt_masks.nonempty()]
            instances.gt_boxes = _boxes_of(instances.gt_masks)
            instances.gt_boxes.clip(image_shape)
        dataset_dict["instances"] = detection_utils.filter_empty_instances(instances)

    def _transformed(
        self,
        annotations: list[dict[str, Any]],
        before: tuple[int, int],
        transforms: T.Transform,
        size: tuple[int, int],
    ) -> list[dict[str, Any]]:
        """``detection_utils.transform_instance_annotations`` of all annotations together."""
        # An object without a mask has its box as mask; otherwise the object, or the mask loss of
        # the whole image, would be lost. One without keypoints gets some of visibility 0, which do
        # not count, because Detectron2 needs the same number for every object
        boxes = np.array([corners(annotation) for annotation in annotations]).reshape(-1, 4)
        masks = [mask_of(a, *before) if self.use_instance_mask else [] for a in annotations]
        polygons = transform_polygons(
            [
                [] if isinstance(m, dict) else [np.array(p, float).reshape(-1, 2) for p in m]
                for m in masks
            ],
            transforms,
        )
        boxes = transforms.apply_box(boxes).clip(0, (size + size)[::-1])
        flips = self.keypoint_hflip_indices
        unseen = [] if flips is None else [0.0, 0.0, 0.0] * len(flips)
        result = []
        for annotation, box, mask, own in zip(annotations, boxes, masks, polygons, strict=True):
            moved: dict[str, Any] = {
                "bbox": box,
                "bbox_mode": BoxMode.XYXY_ABS,
                "category_id": annotation["category_id"],
            }
            if isinstance(mask, dict):
                # PADDING would be foreground in BitMasks and in the boxes that are made from them
                moved["segmentation"] = transforms.apply_segmentation(mask_util.decode(mask)) == 1
            elif mask:
                moved["segmentation"] = [polygon.reshape(-1) for polygon in own]
            keypoints = annotation.get("keypoints", unseen)
            if self.use_keypoint and len(keypoints):
                moved["keypoints"] = detection_utils.transform_keypoint_annotations(
                    np.array(keypoints), transforms, size, flips
                )
            result.append(moved)
        return result


def _planes(pixels: np.ndarray) -> torch.Tensor:
    """An image [H, W, C] as [C, H, W]."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _boxes_of(masks: PolygonMasks | BitMasks) -> Boxes:
    """``masks.get_bounding_boxes()``, for polygons in a tenth of the time."""
    if isinstance(masks, BitMasks):
        return masks.get_bounding_boxes()
    points = [np.concatenate(own).reshape(-1, 2) for own in masks.polygons]
    boxes = [np.concatenate([p.min(0), p.max(0).clip(0)]) for p in points]
    return Boxes(np.array(boxes, dtype=np.float32).reshape(-1, 4))
