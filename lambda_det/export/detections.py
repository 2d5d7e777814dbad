"""Detectron2's box selection in a form that torch.export can hold.

Detectron2 removes boxes only after it has asked whether there are any to remove. The functions here
do not ask. Where Detectron2 converts lengths to Python numbers, they stay sizes of the graph. The
results are the same: the exporting tool compares them with the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torchvision
from detectron2.export.torchscript_patch import patch_builtin_len
from detectron2.modeling import anchor_generator, poolers
from detectron2.modeling.meta_arch import fcos, retinanet
from detectron2.modeling.meta_arch.dense_detector import DenseDetector
from detectron2.modeling.proposal_generator import rpn
from detectron2.modeling.roi_heads import cascade_rcnn, fast_rcnn
from detectron2.structures import Boxes, Instances
from torch import Tensor, nn

from lambda_det.export.portable import dense

__all__ = ["clip", "exportable_detections"]


@contextmanager
def exportable_detections() -> Iterator[None]:
    """Let Detectron2's detectors run in the form of this module."""
    with ExitStack() as stack:
        more = ("detectron2.modeling.poolers", "detectron2.structures.instances")
        stack.enter_context(patch_builtin_len(more))
        for where, name, replacement in (
            (anchor_generator, "_create_grid_offsets", _create_grid_offsets),
            (rpn.StandardRPNHead, "forward", _rpn_head(rpn.StandardRPNHead.forward)),
            (rpn, "find_top_rpn_proposals", _find_top_rpn_proposals),
            (fast_rcnn, "fast_rcnn_inference", _fast_rcnn_inference),
            (cascade_rcnn, "fast_rcnn_inference", _fast_rcnn_inference),
            (DenseDetector, "_decode_per_level_predictions", _decode_level),
            (retinanet, "batched_nms", _batched_nms),
            (fcos, "batched_nms", _batched_nms),
            (Boxes, "__init__", _boxes_of),
            (Boxes, "clip", _clip_boxes),
            (poolers, "convert_boxes_to_pooler_format", _convert_boxes_to_pooler_format),
        ):
            stack.enter_context(mock.patch.object(where, name, replacement))
        yield


def _create_grid_offsets(
    size: list[int], stride: int, offset: float, target_device_tensor: Tensor
) -> tuple[Tensor, Tensor]:
    y, x = (torch.arange(side, device=target_device_tensor.device) for side in size)
    # Sums, not views expanded: those are laid out in another way where a side is 1
    xs, ys = x + torch.zeros_like(y)[:, None], y[:, None] + torch.zeros_like(x)
    return (xs.flatten() + offset) * stride, (ys.flatten() + offset) * stride


def _rpn_head(forward: Callable[..., tuple[list[Tensor], ...]]) -> Callable[..., Any]:
    """The same maps with their channels last in memory, as the RPN then reads them."""

    def channels_last(head: nn.Module, features: list[Tensor]) -> tuple[list[Tensor], ...]:
        maps = forward(head, features)
        return tuple([dense(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for x in y] for y in maps)

    return channels_last


def _nms(boxes: Tensor, scores: Tensor, groups: Tensor, threshold: float, most: int) -> Tensor:
    """``batched_nms`` of the best ``most`` (-1 for all), by moving groups apart."""
    boxes = boxes.float()
    span = torch.cat([boxes.flatten(), boxes.new_zeros(1)]).max() + 1  # of none, too
    boxes = boxes + (groups.to(boxes) * span)[:, None]
    # torchvision tells torch.export that two boxes at least are left: two that touch no other
    # come last
    apart = boxes.new_tensor([[-2.0, -2.0, -1.0, -1.0], [-4.0, -4.0, -3.0, -3.0]])
    lowest = scores.new_full((2,), -torch.inf)
    kept = torchvision.ops.nms(torch.cat([boxes, apart]), torch.cat([scores, lowest]), threshold)
    wanted = kept < scores.shape[0]
    if most >= 0:
        wanted = wanted & (torch.arange(kept.shape[0], device=kept.device) < most)
    return kept[wanted]


def _find_top_rpn_proposals(
    proposals: list[Tensor],
    pred_objectness_logits: list[Tensor],
    image_sizes: list[tuple[int, int]],
    nms_thresh: float,
    pre_nms_topk: int,
    post_nms_topk: int,
    min_box_size: float,
    training: bool,
) -> list[Instances]:
    boxes, scores, levels = [], [], []
    for level, (boxes_i, logits) in enumerate(zip(proposals, pred_objectness_logits, strict=True)):
        count = torch.sym_min(logits.shape[1], pre_nms_topk)
        logits, index = logits[0].topk(count)
        boxes.append(boxes_i[0][index])
        scores.append(logits)
        levels.append(torch.full_like(index, level))
    boxes, scores, levels = torch.cat(boxes), torch.cat(scores), torch.cat(levels)
    finite = torch.isfinite(boxes).all(dim=1) & torch.isfinite(scores)
    boxes = clip(boxes, image_sizes[0])
    kept = finite & Boxes(boxes).nonempty(threshold=min_box_size)
    boxes, scores, levels = boxes[kept], scores[kept], levels[kept]
    kept = _nms(boxes, scores, levels, nms_thresh, post_nms_topk)
    result = Instances(image_sizes[0])
    result.proposal_boxes = Boxes(boxes[kept])
    result.objectness_logits = scores[kept]
    return [result]


def _fast_rcnn_inference(
    boxes: list[Tensor],
    scores: list[Tensor],
    image_shapes: list[tuple[int, int]],
    score_thresh: float,
    nms_thresh: float,
    topk_per_image: int,
) -> tuple[list[Instances], list[Tensor]]:
    boxes, scores = boxes[0], scores[0]
    finite = torch.isfinite(boxes).all(dim=1) & torch.isfinite(scores).all(dim=1)
    wanted = (scores[:, :-1] > score_thresh) & finite[:, None]
    index, classes = wanted.nonzero().unbind(1)
    boxes = boxes.unflatten(1, (-1, 4))
    boxes = boxes[index, 0] if boxes.shape[1] == 1 else boxes[index, classes]
    boxes, scores = clip(boxes, image_shapes[0]), scores[index, classes]
    kept = _nms(boxes, scores, classes, nms_thresh, topk_per_image)
    result = Instances(image_shapes[0])
    result.pred_boxes = Boxes(boxes[kept])
    result.scores = scores[kept]
    result.pred_classes = classes[kept]
    return [result], [index[kept]]


def _decode_level(
    detector: DenseDetector,
    anchors: Boxes,
    pred_scores: Tensor,
    pred_deltas: Tensor,
    score_thresh: float,
    topk_candidates: int,
    image_size: tuple[int, int],
) -> Instances:
    """The best are chosen before the threshold, so that their number depends on the size alone."""
    classes = pred_scores.shape[1]
    scores = pred_scores.flatten()
    scores, index = scores.topk(torch.sym_min(scores.shape[0], topk_candidates))
    wanted = scores > score_thresh
    scores, index = scores[wanted], index[wanted]
    place = index.div(classes, rounding_mode="floor")
    boxes = detector.box2box_transform.apply_deltas(pred_deltas[place], anchors.tensor[place])
    return Instances(
        image_size, pred_boxes=Boxes(boxes), scores=scores, pred_classes=index % classes
    )


def _batched_nms(boxes: Tensor, scores: Tensor, groups: Tensor, threshold: float) -> Tensor:
    return _nms(boxes, scores, groups, threshold, -1)


def _boxes_of(boxes: Boxes, tensor: Tensor) -> None:
    boxes.tensor = tensor.float()  # without asking whether there are any


def clip(boxes: Tensor, image_size: tuple[int, int] | Tensor) -> Tensor:
    """Boxes within the image; or those of a batch, for heights and widths [B, 2]."""
    if isinstance(image_size, Tensor):
        limits = image_size.flip(1).repeat(1, 2)[:, None]
        each = boxes.reshape(image_size.shape[0], -1, 4)
        return torch.minimum(each.clamp(min=0), limits).reshape(boxes.shape)
    height, width = image_size
    x, y = boxes[:, 0::2].clamp(0, width), boxes[:, 1::2].clamp(0, height)
    return torch.stack([x, y], dim=2).flatten(1)


def _clip_boxes(boxes: Boxes, box_size: tuple[int, int]) -> None:
    boxes.tensor = clip(boxes.tensor, box_size)  # without asking whether all are finite


def _convert_boxes_to_pooler_format(box_lists: list[Boxes]) -> Tensor:
    boxes = box_lists[0].tensor
    return torch.cat([torch.zeros_like(boxes[:, :1]), boxes], dim=1)
