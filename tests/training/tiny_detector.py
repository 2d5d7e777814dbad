"""A Mask R-CNN of Detectron2's own parts, small enough to build, save and run in a moment.

Its backbone is a ResNet-50 because Detectron2 has none of 18 layers with fewer than 64 channels,
whose checkpoints take 45 MB.
"""

from pathlib import Path

import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import build_model

from lambda_det.config import add_lambda_config

CONFIG = """\
MODEL:
  DEVICE: cpu
  MASK_ON: True
  PIXEL_STD: [57.0, 57.0, 57.0]
  BACKBONE: {NAME: build_resnet_fpn_backbone}
  RESNETS: {DEPTH: 50, STEM_OUT_CHANNELS: 8, RES2_OUT_CHANNELS: 16, WIDTH_PER_GROUP: 4,
            OUT_FEATURES: [res2, res3, res4, res5]}
  FPN: {IN_FEATURES: [res2, res3, res4, res5], OUT_CHANNELS: 16}
  ANCHOR_GENERATOR: {SIZES: [[8], [16], [32], [64], [128]]}
  RPN: {IN_FEATURES: [p2, p3, p4, p5, p6], POST_NMS_TOPK_TEST: 20}
  ROI_HEADS:
    NAME: StandardROIHeads
    IN_FEATURES: [p2, p3, p4, p5]
    NUM_CLASSES: 3
    SCORE_THRESH_TEST: 0.9
  ROI_BOX_HEAD: {NAME: FastRCNNConvFCHead, NUM_FC: 1, FC_DIM: 16, POOLER_RESOLUTION: 7}
  ROI_MASK_HEAD: {NAME: MaskRCNNConvUpsampleHead, NUM_CONV: 1, CONV_DIM: 16}
DATASETS: {TRAIN: [], TEST: []}
INPUT: {MIN_SIZE_TEST: 64, MAX_SIZE_TEST: 96}
TEST: {DETECTIONS_PER_IMAGE: 5}
"""


def tiny_config() -> CfgNode:
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.merge_from_other_cfg(CfgNode.load_cfg(CONFIG))
    return cfg


def save_run(folder: Path) -> tuple[Path, Path]:
    """Write a folder as a run leaves it, with random weights; return its config and checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    torch.save({"model": build_model(tiny_config()).state_dict()}, folder / "model_final.pth")
    (folder / "last_checkpoint").write_text("model_final.pth")
    (folder / "config.yaml").write_text(CONFIG)
    return folder / "config.yaml", folder / "model_final.pth"
