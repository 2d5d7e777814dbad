"""Build detectors from a YAML configuration, with a clear error for each unknown name."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from detectron2 import modeling
from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.modeling.meta_arch.dense_detector import DenseDetector
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.modeling.roi_heads import (
    BaseKeypointRCNNHead,
    FastRCNNOutputLayers,
)
from detectron2.structures import Instances
from detectron2.utils import comm
from torch import Tensor, nn

from lambda_det.config import PRECISION, check, leaves, one_of
from lambda_det.cpu.accelerate import accelerate, use_channels_last
from lambda_det.cpu.pooling import patch_pooling
from lambda_det.detection.registry import ARCHITECTURES
from lambda_det.modeling.fold import fold_norms
from lambda_det.modeling.norm import convert_sync_norms
from lambda_det.native import missing
from lambda_det.training.library_errors import naming_keys

T = TypeVar("T")


def make_model(cfg: CfgNode) -> nn.Module:
    """The model of ``cfg`` as Detectron2 builds it, where PyTorch makes its tensors.

    Raises:
        ConfigError: the configuration describes no model.
    """
    with naming_keys(lambda: leaves(cfg)):
        model = modeling.META_ARCH_REGISTRY.get(cfg.MODEL.META_ARCHITECTURE)(cfg)
    if hasattr(model, "sem_seg_head") and cfg.MODEL.META_ARCHITECTURE in ARCHITECTURES:
        # Detectron2 leaves out maps that the backbone does not make
        made = one_of(*model.backbone.output_shape())
        for feature in cfg.MODEL.SEM_SEG_HEAD.IN_FEATURES:
            check("MODEL.SEM_SEG_HEAD.IN_FEATURES", feature, made)
    return model


def make_backbone(cfg: CfgNode) -> nn.Module:
    """The backbone of ``cfg``, with an FPN if it has one.

    Raises:
        ConfigError: the configuration describes no backbone.
    """
    with naming_keys(lambda: leaves(cfg)):
        return modeling.build_backbone(cfg)


def prepare_model(model: nn.Module, device: str, *, channels_last: bool) -> nn.Module:
    """Move any detector of Detectron2's parts to a device, and make it ready for a training there.

    Args:
        model: is changed.
        device: to move it to; synchronised norms become norms that work on it.
        channels_last: the layout of all maps, on which the CPU's own convolutions depend.
    """
    # PyTorch warns about the call by which Detectron2 makes its anchors, and PyTorch 2.15 about
    # another call in its forward pass, between the lines of the progress
    warnings.filterwarnings("ignore", "torch.meshgrid", UserWarning)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    model = convert_sync_norms(model, device).to(device)
    patch_point_rend(model)
    return accelerate(model, channels_last=channels_last)


def channels_last_pays(device: str) -> bool:
    """Whether a training on a device is faster with all maps channels last.

    It is with our convolutions. Without a compiler for them, on processors with AVX2 and no
    AVX-512, oneDNN needs two to six times as long for the gradient of a 3x3 kernel channels last,
    on maps of 64x64 and more (docs/performance.md). All processes of a training have one layout.
    """
    if torch.device(device).type != "cpu":
        return True
    slow = torch.backends.cpu.get_cpu_capability() == "AVX2" and missing() is not None
    return not any(comm.all_gather(slow))


def for_inference(
    model: nn.Module, precision: str = "float32", *, channels_last: bool = True
) -> nn.Module:
    """A copy of a detector that makes the same predictions in less time.

    Its batch norms are folded into convolutions, and proposals are chosen as
    :func:`choose_in_order` says. Also in bfloat16, boxes are pooled, masks are
    pasted and keypoints are placed in float32, because bfloat16 has only every fourth whole number
    between 512 and 1024. The scores of an R-CNN's boxes are computed in float32 as well, because
    many would be equal.

    Args:
        model: is left as it is.
        precision: "float32" or "bfloat16".
        channels_last: whether all maps are channels last; False leaves the layout of the training.

    Raises:
        ConfigError: there is no such precision.
    """
    check("TEST.PRECISION", precision, PRECISION)
    model = fold_norms(model)
    choose_in_order(model)
    if channels_last:
        use_channels_last(model)
    if precision == "float32":
        return model
    patch_pooling(model)
    if hasattr(model, "roi_heads"):
        model.roi_heads.register_forward_hook(_found_in_float32)
    for head in model.modules():
        if isinstance(head, BaseKeypointRCNNHead):
            # Detectron2 computes the places of keypoints in the precision of their heatmaps
            head.layers = _in_float32(head.layers)
        elif isinstance(head, FastRCNNOutputLayers):
            head.forward = _without_autocast(head.forward)
    # this replaces the module's own forward pass, so it keeps its class
    autocast = torch.autocast(next(model.parameters()).device.type, torch.bfloat16)
    model.forward = autocast(model.forward)
    return model


def choose_in_order(model: nn.Module) -> None:
    """Let the RPN of a detector choose proposals of equal logits in the order of their places.

    Where all hidden channels of an RPN are 0, many places of an object have equal logits. The
    ``topk`` of PyTorch gives equal values in any order, so what NMS keeps of them is chance, and
    boxes were up to 150 pixels off those of the exported file. This sorts all logits, in 0.03 s for
    268,569 of them on one thread.
    """
    rpn = getattr(model, "proposal_generator", None)
    # without heads the logits are the scores
    if hasattr(model, "roi_heads") and isinstance(rpn, RPN):
        rpn.predict_proposals = partial(_by_ranks, type(rpn).predict_proposals, rpn)


def _by_ranks(
    predict: Callable[..., T], rpn: RPN, anchors: Any, logits: Sequence[Tensor], *more: Any
) -> T:
    return predict(rpn, anchors, ranks(logits), *more)


def ranks(logits: Sequence[Tensor]) -> list[Tensor]:
    """Negative ranks of logits [B, N] of each level, from which nothing but an order is made."""
    flat = torch.cat(list(logits), 1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    places = torch.empty_like(order)
    places.scatter_(1, order, torch.arange(flat.shape[1], device=flat.device).expand_as(order))
    # what is not finite is left out later
    found = torch.where(flat.isfinite(), -places.float(), flat.float())
    return list(found.split([each.shape[1] for each in logits], 1))


def _without_autocast(predict: Callable[..., T]) -> Callable[..., T]:
    # Another project's predictor may take more than features
    def in_float32(x: Tensor, *more: Any, **named: Any) -> T:
        with torch.autocast(x.device.type, enabled=False):
            return predict(x.float(), *more, **named)

    return in_float32


def _in_float32(layers: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: layers(x).float()


def _found_in_float32(
    heads: nn.Module, inputs: tuple, output: tuple[list[Instances], dict]
) -> None:
    for instances in output[0]:
        for name, value in instances.get_fields().items():
            if isinstance(value, Tensor) and value.is_floating_point():
                instances.set(name, value.float())


class LossNormalizers(HookBase):
    """Keeps the divisor of a RetinaNet's losses, a mean over the steps so far, over a resume."""

    def state_dict(self) -> dict[str, float]:
        return {
            name: float(module.loss_normalizer)
            for name, module in self.trainer.model.named_modules()
            # from the first step on
            if isinstance(module, DenseDetector) and hasattr(module, "loss_normalizer")
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        for name, value in state.items():
            self.trainer.model.get_submodule(name).loss_normalizer = value


def patch_point_rend(model: nn.Module) -> None:
    """Let each mask head of PointRend in ``model`` train on a batch without foreground.

    Large-scale jitter makes such batches now and then, and Detectron2's head joins an empty list of
    labels there.
    """
    for head in model.modules():
        # by name, because the project is a part of Detectron2 and also exists separately in its
        # repository
        if type(head).__name__ == "PointRendMaskHead":
            head._sample_train_points = partial(_train_points, head, head._sample_train_points)


def _train_points(
    head: nn.Module, sample: Callable[..., T], coarse_mask: Tensor, instances: list[Instances]
) -> T | tuple[Tensor, Tensor]:
    if any(map(len, instances)):
        return sample(coarse_mask, instances)
    points = head.mask_point_train_num_points
    return coarse_mask.new_zeros(0, points, 2), coarse_mask.new_zeros(0, points)
