"""The shipped heads made small, to train on generated shapes in seconds."""

from dataclasses import dataclass

import yaml

from lambda_det.config import CONFIGS, leaves

# Sizes and schedule, to which those of seconds are added, and a few keys of each head
_QUICK = yaml.safe_load((CONFIGS / "quick" / "shapes_lambdaresnet26.yaml").read_text("utf-8"))
# All anchors stand on one map, of stride 16
_WITHOUT_FPN = """
MODEL.ANCHOR_GENERATOR.SIZES [[16,32,64,96]]
MODEL.RPN.CONV_DIMS [16]
"""
# Sizes of the images, the network and the schedule; with the jitter that is shipped
_TINY = """
MODEL.LAMBDA_RESNET.NAME resnet14_slim_lambda_c5
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
SOLVER.MAX_ITER 2
SOLVER.STEPS ()
SOLVER.WARMUP_ITERS 1
SEED 1
"""
_BOX_LOSSES = ("loss_rpn_cls", "loss_rpn_loc", "loss_cls", "loss_box_reg")


@dataclass(frozen=True)
class Head:
    """A shipped configuration, and what makes it small.

    Attributes:
        config: name of the file below configs/.
        data: the data set without its split.
        results: that an evaluation reports, by their names in metrics.json.
        losses: that a training reports.
        keys: lines of KEY VALUE over those of all.
    """

    config: str
    data: str
    results: tuple[str, ...]
    losses: tuple[str, ...]
    keys: str = ""

    def opts(self) -> list[str]:
        """KEY VALUE pairs; of two for the same key the later one counts."""
        settings = {k: v for k, v in leaves(_QUICK) if k not in ("_BASE_", "OUTPUT_DIR")}
        settings |= {f"DATASETS.{s}": f'("{self.data}_{n}",)' for s, n in _SPLITS}
        pairs = [str(word) for pair in settings.items() for word in pair]
        return pairs + _pairs(_TINY + self.keys)


_SPLITS = (("TRAIN", "train"), ("TEST", "val"))


def _pairs(lines: str) -> list[str]:
    return [word for line in lines.splitlines() if line for word in line.split(None, 1)]


HEADS = {
    "retinanet": Head(
        "retinanet_lambdaresnet50",
        "shapes",
        ("bbox/AP",),
        ("loss_cls", "loss_box_reg"),
        # p7 comes from a map of 2x2: from one of 1x1, torch 2.15 leaves numbers out of the gradient
        # of a strided convolution in bfloat16 on the CPU, which then holds whatever was in memory
        """
MODEL.ANCHOR_GENERATOR.SIZES [[16,20,25],[32,40,51],[64,81,102],[96,101,106],[112,120,128]]
MODEL.RETINANET.NUM_CLASSES 3
MODEL.RETINANET.NUM_CONVS 1
INPUT.LSJ.SIZE 96
""",
    ),
    "faster_rcnn": Head("faster_rcnn_lambdaresnet50", "shapes", ("bbox/AP",), _BOX_LOSSES),
    "cascade_mask_rcnn": Head(
        "cascade_mask_rcnn_lambdaresnet50",
        "shapes",
        ("bbox/AP", "segm/AP"),
        ("loss_rpn_cls", "loss_cls_stage0", "loss_box_reg_stage2", "loss_mask"),
    ),
    "keypoint_rcnn": Head(
        "keypoint_rcnn_lambdaresnet50",
        "shapes_keypoints",
        ("bbox/AP", "keypoints/AP"),
        (*_BOX_LOSSES, "loss_keypoint"),
        """
MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS 4
MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS (16,16)
TEST.KEYPOINT_OKS_SIGMAS [0.1,0.1,0.1,0.1]
""",
    ),
    "panoptic_fpn": Head(
        "panoptic_fpn_lambdaresnet50",
        "shapes_panoptic",
        ("bbox/AP", "segm/AP", "sem_seg/mIoU", "panoptic_seg/PQ", "panoptic_seg/PQ_st"),
        (*_BOX_LOSSES, "loss_mask", "loss_sem_seg"),
        """
MODEL.SEM_SEG_HEAD.NUM_CLASSES 4
MODEL.SEM_SEG_HEAD.CONVS_DIM 16
MODEL.PANOPTIC_FPN.COMBINE.STUFF_AREA_LIMIT 64
""",
    ),
    "point_rend": Head(
        "point_rend_lambdaresnet50",
        "shapes",
        ("bbox/AP", "segm/AP"),
        (*_BOX_LOSSES, "loss_mask", "loss_mask_point"),
        """
MODEL.ROI_MASK_HEAD.FC_DIM 32
MODEL.POINT_HEAD.NUM_CLASSES 3
MODEL.POINT_HEAD.FC_DIM 16
""",
    ),
    "deeplab": Head(
        "deeplabv3plus_lambdaresnet50",
        "shapes_stuff",
        ("sem_seg/mIoU",),
        ("total_loss",),  # a lone loss has no line of its own
        """
MODEL.RESNETS.RES5_MULTI_GRID [1]
MODEL.SEM_SEG_HEAD.NUM_CLASSES 4
MODEL.SEM_SEG_HEAD.CONVS_DIM 16
MODEL.SEM_SEG_HEAD.ASPP_CHANNELS 16
MODEL.SEM_SEG_HEAD.ASPP_DILATIONS [2,4,6]
""",
    ),
    "c4": Head(
        "mask_rcnn_c4_lambdaresnet50",
        "shapes",
        ("bbox/AP", "segm/AP"),
        (*_BOX_LOSSES, "loss_mask"),
        _WITHOUT_FPN
        + """
MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION 4
MODEL.ROI_MASK_HEAD.NUM_CONV 0
""",
    ),
    "dc5": Head(
        "mask_rcnn_dc5_lambdaresnet50",
        "shapes",
        ("bbox/AP", "segm/AP"),
        (*_BOX_LOSSES, "loss_mask"),
        _WITHOUT_FPN
        + """
MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION 5
MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION 8
""",
    ),
}
