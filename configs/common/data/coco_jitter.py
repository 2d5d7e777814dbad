"""COCO with large-scale jitter of 0.1 to 2.0 (Appendix F.3), for a model with masks."""

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

dataloader.image_size = 1024  # side of training images; test images fit into a square of this side

dataloader.train = L(tolerant_train_loader)(
    dataset=L(get_detection_dataset_dicts)(
        names="coco_2017_train",
        filter_empty=True,  # False keeps images without an object, as background
    ),
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
        recompute_boxes=True,  # the crop may cut off part of an object
    ),
    total_batch_size=256,  # images per step, over all workers and accumulated batches
    aspect_ratio_grouping=False,  # all images have one size
    num_workers=4,
    # An unreadable image is logged and replaced by the next one; more than this many stop the run
    max_unreadable=20,
    timeout=600,  # seconds to wait for a batch before a worker counts as hung; 0 waits forever
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
    output_dir="${train.output_dir}/inference",
)
