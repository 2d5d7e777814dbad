"""COCO with large-scale jitter of 0.1 to 2.0 (Appendix E.2), for a model with masks."""

from detectron2.config import LazyCall as L
from detectron2.data import get_detection_dataset_dicts
from detectron2.data import transforms as T
from omegaconf import OmegaConf

from lambda_det.detection.data import TolerantMapper, tolerant_test_loader, tolerant_train_loader
from lambda_det.detection.data.jitter import (
    ResizeScaleAtLeastOnePixel,
    ResizeShortestEdgeAtLeastOnePixel,
)
from lambda_det.detection.evaluation import TolerantCOCOEvaluator

dataloader = OmegaConf.create()

dataloader.image_size = 1024  # side of the training images, and of the square that test images fit

dataloader.train = L(tolerant_train_loader)(
    dataset=L(get_detection_dataset_dicts)(names="coco_2017_train"),
    mapper=L(TolerantMapper)(
        is_train=True,
        augmentations=[
            L(ResizeScaleAtLeastOnePixel)(
                min_scale=0.1,
                max_scale=2.0,
                target_height="${dataloader.image_size}",
                target_width="${dataloader.image_size}",
            ),
            L(T.FixedSizeCrop)(crop_size=["${dataloader.image_size}", "${dataloader.image_size}"]),
            L(T.RandomFlip)(horizontal=True),
        ],
        image_format="BGR",
        use_instance_mask=True,
        recompute_boxes=True,  # the visible part of an object may be smaller than its box's
    ),
    total_batch_size=256,  # of one step, over all workers and accumulated batches
    aspect_ratio_grouping=False,  # all images come out alike
    num_workers=4,
    # An image that cannot be read is named and replaced by the next one, up to so many of them
    max_unreadable=20,
    timeout=600,  # seconds to wait for a batch before the workers are taken to hang; 0 for ever
)

dataloader.test = L(tolerant_test_loader)(
    dataset=L(get_detection_dataset_dicts)(names="coco_2017_val", filter_empty=False),
    mapper=L(TolerantMapper)(
        is_train=False,
        augmentations=[
            L(ResizeShortestEdgeAtLeastOnePixel)(
                short_edge_length="${dataloader.image_size}", max_size="${dataloader.image_size}"
            ),
        ],
        image_format="${...train.mapper.image_format}",
        use_instance_mask=True,
    ),
    num_workers=4,
    timeout=600,
)

dataloader.evaluator = L(TolerantCOCOEvaluator)(
    dataset_name="${..test.dataset.names}",
    tasks=["bbox", "segm"],
)
