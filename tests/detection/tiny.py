"""The same small changes to a YAML configuration and to a LazyConfig of configs/."""

import torch
from detectron2.config import CfgNode
from omegaconf import DictConfig
from torch import nn

from lambda_det.detection import DetectionTask

# (YAML's keys, LazyConfig's)
TINY = (
    "MODEL.DEVICE cpu MODEL.LAMBDA_RESNET.NAME lambda_resnet26_slim MODEL.LAMBDA_RESNET.SCOPE 7 "
    "MODEL.ROI_BOX_HEAD.NUM_CONV 1 MODEL.ROI_BOX_HEAD.CONV_DIM 8 MODEL.RPN.CONV_DIMS [-1] "
    "MODEL.ROI_MASK_HEAD.NUM_CONV 1 MODEL.ROI_MASK_HEAD.CONV_DIM 8 DATALOADER.NUM_WORKERS 0 "
    "INPUT.LSJ.SIZE 64 INPUT.MIN_SIZE_TEST 64 INPUT.MAX_SIZE_TEST 64 SEED 5 "
    "SOLVER.AMP.ENABLED False",
    "train.device=cpu model.backbone.bottom_up.name=lambda_resnet26_slim "
    "model.backbone.bottom_up.scope=7 model.roi_heads.box_head.conv_dims=[8] "
    "model.proposal_generator.head.conv_dims=[-1] model.roi_heads.mask_head.conv_dims=[8,8] "
    "dataloader.train.num_workers=0 dataloader.test.num_workers=0 dataloader.image_size=64 "
    "train.seed=5 train.amp.enabled=False",
)


def on_meta(config: CfgNode | DictConfig) -> nn.Module:
    """The model of a configuration with names and shapes and no values."""
    with torch.device("meta"):
        return DetectionTask(config).parts.make_model()
