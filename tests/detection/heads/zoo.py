"""Detectron2's zoo configurations made small, and what Detectron2 is and computes by itself.

Nothing here imports lambda_det, so ``python zoo.py FILE`` writes how things are without it.
"""

import contextlib
import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path

import detectron2
import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import build_model
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints
from detectron2.utils.events import EventStorage
from fvcore.common.registry import Registry
from torch import nn

_FOLDER = Path(detectron2.__file__).parent / "model_zoo" / "configs"
# The zoo's file, the data set without its split, and what the data set needs
ZOO = {
    "faster": ("COCO-Detection/faster_rcnn_R_50_FPN_3x", "shapes", ""),
    "retinanet": ("COCO-Detection/retinanet_R_50_FPN_3x", "shapes", ""),
    "mask": ("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x", "shapes", ""),
    "cascade": ("Misc/cascade_mask_rcnn_R_50_FPN_3x", "shapes", ""),
    "keypoint": (
        "COCO-Keypoints/keypoint_rcnn_R_50_FPN_3x",
        "shapes_keypoints",
        "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS 4 TEST.KEYPOINT_OKS_SIGMAS [0.1,0.1,0.1,0.1]",
    ),
    "panoptic": (
        "COCO-PanopticSegmentation/panoptic_fpn_R_50_3x",
        "shapes_panoptic",
        "MODEL.SEM_SEG_HEAD.NUM_CLASSES 4",
    ),
}
SMALL = (
    "MODEL.DEVICE cpu MODEL.WEIGHTS '' MODEL.ROI_HEADS.NUM_CLASSES 3 MODEL.RETINANET.NUM_CLASSES 3 "
    # Without weights, frozen norms let the numbers grow from block to block
    "MODEL.PIXEL_STD [1e5,1e5,1e5] "
    "MODEL.RESNETS.STEM_OUT_CHANNELS 8 MODEL.RESNETS.WIDTH_PER_GROUP 8 "
    "MODEL.RESNETS.RES2_OUT_CHANNELS 32 MODEL.FPN.OUT_CHANNELS 32 MODEL.RETINANET.NUM_CONVS 1 "
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN 100 MODEL.RPN.POST_NMS_TOPK_TRAIN 50 "
    "MODEL.RPN.POST_NMS_TOPK_TEST 20 MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 16 "
    "MODEL.ROI_BOX_HEAD.FC_DIM 32 MODEL.ROI_MASK_HEAD.CONV_DIM 16 "
    "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS (16,16) MODEL.SEM_SEG_HEAD.CONVS_DIM 32 "
    "INPUT.MIN_SIZE_TRAIN (96,) INPUT.MIN_SIZE_TEST 96 INPUT.MAX_SIZE_TEST 128 "
    "SOLVER.IMS_PER_BATCH 2 SOLVER.MAX_ITER 2 SOLVER.STEPS () SOLVER.WARMUP_ITERS 0 "
    "SOLVER.BASE_LR 0.001 DATALOADER.NUM_WORKERS 0 SEED 3"
)


def words(name: str) -> list[str]:
    """The flags of a small training with a configuration of the zoo."""
    file, data, more = ZOO[name]
    sets = f"DATASETS.TRAIN ('{data}_train',) DATASETS.TEST ('{data}_val',)"
    small = [x.replace("''", "") for x in f"{SMALL} {more} {sets}".split()]
    return ["--config-file", str(_FOLDER / f"{file}.yaml"), *small]


def config(name: str) -> CfgNode:
    """That configuration, as Detectron2 reads it."""
    _, file, *settings = words(name)
    cfg = get_cfg()
    cfg.merge_from_file(file)
    cfg.merge_from_list(settings)
    return cfg


def losses(model: nn.Module) -> dict[str, float]:
    """Of one step on a made batch."""
    torch.manual_seed(1)
    sides = torch.tensor([[8.0, 8, 40, 48], [30, 20, 90, 60]])
    objects = Instances((64, 96), gt_boxes=Boxes(sides), gt_classes=torch.tensor([0, 2]))
    inside = torch.zeros(2, 64, 96, dtype=torch.bool)
    inside[0, 8:48, 8:40] = inside[1, 20:60, 30:90] = True
    objects.gt_masks = BitMasks(inside)
    objects.gt_keypoints = Keypoints(
        torch.cat([sides.view(2, 2, 2).repeat(1, 2, 1) + 1, torch.full((2, 4, 1), 2.0)], 2)
    )
    image = torch.randint(0, 256, (3, 64, 96), dtype=torch.uint8)
    example = {"image": image, "instances": objects, "sem_seg": inside.sum(0)}
    with EventStorage(0):
        return {name: loss.item() for name, loss in model([example]).items()}


def plain_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build_model(config(name))


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] in ("detectron2", "fvcore")


def _what(value: object) -> object:
    """What a class or a function is made of: the names alone would be those of a patch as well."""
    if isinstance(value, classmethod | staticmethod | property):
        return _what(getattr(value, "__func__", None) or value.fget)
    if isinstance(value, Registry):
        return {name: _what(x) for name, x in value}
    named = [getattr(value, "__module__", None), getattr(value, "__qualname__", str(type(value)))]
    if inspect.isfunction(value):
        return [*named, value.__code__.co_filename, value.__code__.co_firstlineno]
    if inspect.isclass(value) and _is_theirs(value.__module__):
        inner = {n: str(x) if inspect.isclass(x) else _what(x) for n, x in vars(value).items()}
        inner.pop("__slotnames__", None)  # the copy module's, once an instance was copied
        return [*named, [str(x) for x in value.__mro__], inner]
    return named


def parts() -> dict[str, object]:
    """What each name of each module of Detectron2 is."""
    for module in pkgutil.walk_packages(detectron2.__path__, "detectron2.", lambda _: None):
        with contextlib.suppress(Exception):  # some need packages that are not here
            importlib.import_module(module.name)
    found = {}
    for module, content in list(sys.modules.items()):
        if _is_theirs(module):
            for name, value in vars(content).items():
                found[f"{module}.{name}"] = None if name.startswith("__") else _what(value)
    return found


def state() -> dict[str, object]:
    """Detectron2's parts and default configuration, and what it computes."""
    computed = {name: losses(plain_model(name)) for name in ZOO}
    return {"parts": parts(), "defaults": get_cfg().dump(), "losses": computed}


if __name__ == "__main__":
    found = state()
    assert not any(name.partition(".")[0] == "lambda_det" for name in sys.modules)
    Path(sys.argv[1]).write_text(json.dumps(found))
