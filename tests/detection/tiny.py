"""The same small changes to a YAML configuration and to a LazyConfig of configs/."""

from pathlib import Path

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

# Narrow heads, which TINY has as wide as they are shipped: a checkpoint takes a tenth of the space
NARROW = (
    "MODEL.FPN.OUT_CHANNELS 16 MODEL.ROI_BOX_HEAD.FC_DIM 16",
    "model.backbone.out_channels=16 model.proposal_generator.head.in_channels=16 "
    "model.roi_heads.box_head.input_shape.channels=16 model.roi_heads.box_head.fc_dims=[16] "
    "model.roi_heads.box_predictor.input_shape.channels=16 "
    "model.roi_heads.mask_head.input_shape.channels=16",
)

_LAZY_FILE = """
from lambda_det import get_config
from lambda_det.detection.data import register_shapes

register_shapes({root!r})
_paper = get_config("mask_rcnn_lambdaresnet50.py")
model, dataloader, optimizer = _paper.model, _paper.dataloader, _paper.optimizer
lr_multiplier, train = _paper.lr_multiplier, _paper.train
model.roi_heads.num_classes = 3
dataloader.train.dataset.names = "shapes_train"
dataloader.test.dataset.names = "shapes_val"
"""


def write_lazy_config(root: Path) -> Path:
    """A LazyConfig in ``root``, which has shapes: it registers them, and learns them."""
    file = root / "shapes.py"
    file.write_text(_LAZY_FILE.format(root=str(root)))
    return file


def on_meta(config: CfgNode | DictConfig) -> nn.Module:
    """The model of a configuration with names and shapes and no values."""
    with torch.device("meta"):
        return DetectionTask(config).components.make_model()
