"""Whole Mask R-CNNs for the preset ``detector``: ours, and one of Detectron2's parts alone.

The preset ``accelerate`` has Detectron2's own detectors, as its model zoo trains them. The others
have the heads of the paper's training (configs/base_mask_rcnn_fpn.yaml), which are those of
Detectron2's own baselines from scratch, and random weights.
"""

from __future__ import annotations

import ctypes
import platform
import runpy
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import RetinaNet
from detectron2.modeling import build_model as build_plain_model
from detectron2.structures import Boxes, Instances, Keypoints, PolygonMasks
from detectron2.utils.events import EventStorage
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lambda_det import accelerate
from lambda_det.detection.components import read_settings
from lambda_det.detection.config_files import detectron2_config, get_config
from lambda_det.detection.model import for_inference, make_model, prepare_model
from lambda_det.detection.task import DetectionTask
from lambda_det.process import keep_memory
from lambda_det.training.precision import Precision

SHAPES = runpy.run_path(str(Path(__file__).parents[3] / "datasets" / "make_shapes.py"))
DRAWN = 128  # side of the images before they are resized
# A logit beside 80 others of about 0. With random weights no score would exceed the threshold, and
# no masks would be computed; with this logit the first class is found everywhere.
FOUND = 5.0
POINTS = 17  # of a person
ZOO = {
    "Faster R-CNN": "COCO-Detection/faster_rcnn_R_50_FPN_3x.yaml",
    "Mask R-CNN": "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml",
    "RetinaNet": "COCO-Detection/retinanet_R_50_FPN_3x.yaml",
    "Cascade Mask R-CNN": "Misc/cascade_mask_rcnn_R_50_FPN_3x.yaml",
    "Keypoint R-CNN": "COCO-Keypoints/keypoint_rcnn_R_50_FPN_3x.yaml",
    "Panoptic FPN": "COCO-PanopticSegmentation/panoptic_fpn_R_50_3x.yaml",
}


class Detector(nn.Module):
    """A detector as a function of images: its loss in training, and otherwise its predictions.

    Args:
        model: takes Detectron2's batches.
        inference: the model for inference; it may share the parameters.
        precision: of training.
        samples: what a batch holds for each image besides its pixels.
        keeps: whether the process keeps the memory that it frees, as ours do.
    """

    def __init__(
        self,
        model: nn.Module,
        inference: nn.Module,
        precision: Precision,
        samples: list[dict[str, Any]],
        keeps: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.precision, self.samples = model, precision, samples
        self.keeps = keeps
        self._inference = [inference.eval()]  # its parameters must not be trained or counted

    def forward(self, *images: Tensor) -> Tensor | list[dict[str, Any]]:
        batch = [
            {**sample, "image": image} for sample, image in zip(self.samples, images, strict=True)
        ]
        keep_memory() if self.keeps else give_back_memory()
        if not self.training:
            return self._inference[0](batch)
        with EventStorage(), self.precision.autocast():
            return sum(self.model(batch).values())


def give_back_memory() -> None:
    """Let glibc give memory back, as it does by itself in a process of large maps; undo
    ``keep_memory``.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # M_MMAP_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h
        for parameter, value in ((-4, 65536), (-3, 32 << 20), (-1, 64 << 20), (-2, 0)):
            mallopt(parameter, value)


def our_detector(
    depth: int, changes: list[Any], batch: int, side: int, device: str
) -> tuple[Detector, tuple[Tensor, ...]]:
    """Mask R-CNN on a LambdaResNet, trained and used as the configuration says.

    Args:
        depth: 50, 101 or 152.
        changes: KEY, VALUE, ... beside configs/mask_rcnn_lambdaresnet{depth}.yaml.
        batch: number of images.
        side: of an image.
        device: where the model is made.
    """
    cfg = _config(depth, ["INPUT.LSJ.SIZE", side, *changes], device)
    task, channels_last = DetectionTask(cfg), cfg.MODEL.CHANNELS_LAST
    if changes:  # with the configuration alone the layout would also depend on the processor
        model = prepare_model(make_model(cfg), device, channels_last=channels_last)
    else:
        model = task.build_model()
    images, samples = _images(batch, side)
    _find_something(model, images, samples)
    inference = for_inference(model, cfg.TEST.PRECISION, channels_last=channels_last)
    return Detector(model, inference, Precision.of(read_settings(cfg)), samples), images


def detectron2_detector(
    depth: int, batch: int, side: int, device: str
) -> tuple[Detector, tuple[Tensor, ...]]:
    """Mask R-CNN on Detectron2's ResNet in float32, as its train_net.py trains and tests it."""
    # one process needs no synchronised norm
    norms = [f"MODEL.{part}.NORM" for part in ("FPN", "ROI_BOX_HEAD", "ROI_MASK_HEAD", "RESNETS")]
    changes = [word for key in norms for word in (key, "BN")]
    changes += ["MODEL.BACKBONE.NAME", "build_resnet_fpn_backbone", "MODEL.RESNETS.DEPTH", depth]
    changes += ["MODEL.RESNETS.OUT_FEATURES", ["res2", "res3", "res4", "res5"]]
    model = build_plain_model(_config(50, changes, device))
    images, samples = _images(batch, side)
    _find_something(model, images, samples)
    return Detector(model, model, Precision(device, None), samples, keeps=False), images


def zoo_detector(name: str, fast: bool, side: int) -> tuple[Detector, tuple[Tensor, ...]]:
    """A detector of Detectron2's model zoo on the CPU, as its train_net.py runs it, or accelerated.

    Args:
        name: of ZOO.
        fast: after ``lambda_det.accelerate``.
        side: of the image.
    """
    torch.manual_seed(0)
    cfg = detectron2_config(ZOO[name])
    cfg.MODEL.DEVICE = "cpu"
    model = build_plain_model(cfg)
    images, samples = _images(1, side)
    instances = samples[0]["instances"]
    if cfg.MODEL.KEYPOINT_ON:
        instances.gt_classes.zero_()
    corners, ends = instances.gt_boxes.tensor[:, None].split(2, dim=2)
    places = corners + torch.rand(len(instances), POINTS, 2) * (ends - corners)
    seen = torch.full((len(instances), POINTS, 1), 2.0)
    instances.gt_keypoints = Keypoints(torch.cat([places, seen], dim=2))
    samples[0]["sem_seg"] = torch.randint(cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES, (side, side))
    _find_something(model, images, samples)
    model = accelerate(model) if fast else model
    return Detector(model, model, Precision("cpu", None), samples, keeps=fast), images


def _config(depth: int, changes: list[Any], device: str) -> CfgNode:
    cfg = get_config(f"mask_rcnn_lambdaresnet{depth}.yaml")
    cfg.merge_from_list([*changes, "MODEL.DEVICE", device])
    return cfg


@torch.no_grad()
def _find_something(
    model: nn.Module, images: tuple[Tensor, ...], samples: list[dict[str, Any]]
) -> None:
    if isinstance(model, RetinaNet):
        model.head.cls_score.bias += FOUND / 2
    else:
        predictor = model.roi_heads.box_predictor
        for stage in predictor if isinstance(predictor, nn.ModuleList) else [predictor]:
            stage.cls_score.bias[0] = FOUND
    take_statistics(Detector(model, model, Precision("cpu", None), samples), *images)


@torch.no_grad()
def take_statistics(model: nn.Module, *inputs: Tensor) -> None:
    """Set the statistics of its norms in one run; without them the maps of a deep network grow
    without limit.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1
    frozen = [norm for norm in model.modules() if isinstance(norm, FrozenBatchNorm2d)]
    hooks = [norm.register_forward_pre_hook(_take_statistics) for norm in frozen]
    model.train()(*inputs)
    for hook in hooks:
        hook.remove()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _take_statistics(norm: FrozenBatchNorm2d, inputs: tuple[Tensor]) -> None:
    norm.running_var, norm.running_mean = torch.var_mean(inputs[0], (0, 2, 3))


def _images(batch: int, side: int) -> tuple[tuple[Tensor, ...], list[dict[str, Any]]]:
    images, samples = zip(*(_image(side, number) for number in range(batch)), strict=True)
    return images, list(samples)


def _image(side: int, number: int) -> tuple[Tensor, dict[str, Any]]:
    """One of the shapes data set, resized: uint8 [3, side, side], and its annotations."""
    rng = SHAPES["image_rng"](0, "train", number)
    shapes = SHAPES["place_shapes"](rng, DRAWN)
    drawn = SHAPES["paint_shapes"](rng, SHAPES["background"](rng, DRAWN), shapes)
    image = F.interpolate(torch.from_numpy(drawn).permute(2, 0, 1)[None], size=(side, side))[0]
    polygons = [polygon * (side / DRAWN) for _, polygon in shapes]
    instances = Instances((side, side))
    instances.gt_classes = torch.tensor([category for category, _ in shapes])
    boxes = [[*polygon.min(axis=0), *polygon.max(axis=0)] for polygon in polygons]
    instances.gt_boxes = Boxes(torch.tensor(boxes, dtype=torch.float32))
    instances.gt_masks = PolygonMasks([[polygon.reshape(-1)] for polygon in polygons])
    return image, {"instances": instances, "height": side, "width": side}
