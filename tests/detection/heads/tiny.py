"""The heads of tests/detection/heads/try_heads.py made smaller still: seconds on generated data."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.tool import load_tool

CONFIGS = load_tool("try_heads", "tests/detection/heads").CONFIGS
QUICK = load_tool("try_heads", "tests/detection/heads").HEADS


__all__ = ["CONFIGS", "HEADS", "Head"]

# Sizes of the images, the network and the schedule; with the jitter that is shipped
_SMALLER = """
MODEL.LAMBDA_RESNET.NAME lambda_resnet26_slim
MODEL.LAMBDA_RESNET.SCOPE 7
MODEL.FPN.OUT_CHANNELS 16
MODEL.RPN.PRE_NMS_TOPK_TRAIN 100
MODEL.RPN.PRE_NMS_TOPK_TEST 100
MODEL.RPN.POST_NMS_TOPK_TRAIN 50
MODEL.RPN.POST_NMS_TOPK_TEST 20
MODEL.RPN.BATCH_SIZE_PER_IMAGE 32
MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 16
MODEL.ROI_BOX_HEAD.NUM_CONV 1
MODEL.ROI_BOX_HEAD.CONV_DIM 16
MODEL.ROI_BOX_HEAD.FC_DIM 32
MODEL.ROI_MASK_HEAD.NUM_CONV 1
MODEL.ROI_MASK_HEAD.CONV_DIM 16
INPUT.LSJ.ENABLED True
INPUT.LSJ.SIZE 64
INPUT.MIN_SIZE_TEST 64
INPUT.MAX_SIZE_TEST 64
SOLVER.IMS_PER_BATCH 4
SOLVER.BASE_LR 0.01
SOLVER.MAX_ITER 4
SOLVER.STEPS ()
SOLVER.WARMUP_ITERS 2
SEED 1
"""


@dataclass(frozen=True)
class Head:
    """What makes a head smaller, and what training and evaluation report."""

    name: str
    losses: tuple[str, ...]
    overrides: str = ""
    more_results: tuple[str, ...] = field(default=())

    @property
    def config(self) -> str:
        return QUICK[self.name].config

    @property
    def results(self) -> tuple[str, ...]:
        return (*QUICK[self.name].reaches, *self.more_results)

    def opts(self) -> list[str]:
        """KEY VALUE pairs; of two for the same key the later one counts."""
        lines = (_SMALLER + self.overrides).strip().splitlines()
        return QUICK[self.name].opts() + [w for line in lines if line for w in line.split(None, 1)]


_BOX_LOSSES = ("loss_rpn_cls", "loss_rpn_loc", "loss_cls", "loss_box_reg")

_ALL = [
    # p7 comes from a map of 2x2: from one of 1x1, torch 2.15 leaves numbers out of the gradient of
    # a strided convolution in bfloat16 on the CPU, which then holds whatever was in memory
    Head(
        "retinanet",
        ("loss_cls", "loss_box_reg"),
        "MODEL.RETINANET.NUM_CONVS 1\nINPUT.LSJ.SIZE 96",
    ),
    Head("faster_rcnn", _BOX_LOSSES),
    Head(
        "cascade_mask_rcnn",
        ("loss_rpn_cls", "loss_cls_stage0", "loss_box_reg_stage2", "loss_mask"),
    ),
    Head(
        "keypoint_rcnn",
        (*_BOX_LOSSES, "loss_keypoint"),
        "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS (16,16)",
    ),
    Head(
        "panoptic_fpn",
        (*_BOX_LOSSES, "loss_mask", "loss_sem_seg"),
        "MODEL.SEM_SEG_HEAD.CONVS_DIM 16",
        ("panoptic_seg/PQ_st",),
    ),
    Head(
        "point_rend",
        (*_BOX_LOSSES, "loss_mask", "loss_mask_point"),
        "MODEL.ROI_MASK_HEAD.FC_DIM 32\nMODEL.POINT_HEAD.FC_DIM 16",
    ),
    Head(
        "deeplab",
        ("total_loss",),  # a lone loss has no line of its own
        "MODEL.SEM_SEG_HEAD.CONVS_DIM 16\nMODEL.SEM_SEG_HEAD.ASPP_CHANNELS 16",
    ),
    Head(
        "c4",
        (*_BOX_LOSSES, "loss_mask"),
        "MODEL.RPN.CONV_DIMS [16]\nMODEL.ROI_MASK_HEAD.NUM_CONV 0\n"
        "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION 4",
    ),
    Head("dc5", (*_BOX_LOSSES, "loss_mask"), "MODEL.RPN.CONV_DIMS [16]"),
]
HEADS = {head.name: head for head in _ALL}
