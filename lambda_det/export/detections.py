"""Detectron2's choice of boxes, in a form that a graph can hold.

Detectron2 asks how many boxes there are, image by image. The functions here do not ask. All images
of a batch have the same number of boxes, one after the other, and missing ones are 0. So no shape
in the graph depends on what the images show, there is no loop, and every runtime that has RoiAlign
and TopK can hold it. The size of an image is a row of a tensor [B, 2], of height and width.

The results are Detectron2's, unless more than ``CANDIDATES`` boxes of an image score above
the threshold, or boxes cover each other in a chain of more than ``ROUNDS``.

Detectron2 calls these functions by the names of its modules, and gives no other place to put
others. So :func:`exportable_detections` replaces ten of them, and one of this package, by
``unittest.mock``, which puts them back at the end and fails where a name no longer exists. It
encloses a recording or a comparison, and nothing that trains or evaluates.
``tests/export/test_detector.py`` compares the results with those of Detectron2's own functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from detectron2.export.torchscript_patch import patch_builtin_len
from detectron2.modeling import RetinaNet, anchor_generator, poolers
from detectron2.modeling.meta_arch import FCOS
from detectron2.modeling.meta_arch.dense_detector import DenseDetector
from detectron2.modeling.proposal_generator import rpn
from detectron2.modeling.roi_heads import cascade_rcnn, fast_rcnn
from detectron2.structures import Boxes, ImageList, Instances
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.detection import model
from lambda_det.export.portable import dense

DENSE = (RetinaNet, FCOS)
CANDIDATES = 1000  # boxes of an image that NMS compares in the end
ROUNDS = 20  # on photographs no more than 12 changed anything


@contextmanager
def exportable_detections() -> Iterator[None]:
    """Let Detectron2's detectors run in the form of this module."""
    with ExitStack() as stack:
        stack.enter_context(patch_builtin_len(("detectron2.structures.instances",)))
        for where, name, replacement in (
            (anchor_generator, "_create_grid_offsets", _create_grid_offsets),
            (rpn.StandardRPNHead, "forward", _rpn_head),
            (rpn, "find_top_rpn_proposals", _find_top_rpn_proposals),
            (model, "ranks", list),  # of logits, whose TopK has equal ones in order
            (fast_rcnn, "fast_rcnn_inference", _fast_rcnn_inference),
            (cascade_rcnn, "fast_rcnn_inference", _fast_rcnn_inference),
            *((kind, "forward_inference", _forward_inference) for kind in DENSE),
            (Boxes, "__init__", _boxes_of),
            (Boxes, "clip", _clip_boxes),
            (poolers.ROIPooler, "forward", _pool),
        ):
            stack.enter_context(mock.patch.object(where, name, replacement))
        yield


_rpn_forward = rpn.StandardRPNHead.forward


def _create_grid_offsets(
    size: list[int], stride: int, offset: float, target_device_tensor: Tensor
) -> tuple[Tensor, Tensor]:
    y, x = (torch.arange(side, device=target_device_tensor.device) for side in size)
    # Sums, not views expanded: those are laid out in another way where a side is 1
    xs, ys = x + torch.zeros_like(y)[:, None], y[:, None] + torch.zeros_like(x)
    return (xs.flatten() + offset) * stride, (ys.flatten() + offset) * stride


def _rpn_head(head: nn.Module, features: list[Tensor]) -> tuple[list[Tensor], ...]:
    """Compute the same maps with their channels last in memory, as the RPN then reads them."""
    maps = _rpn_forward(head, features)
    return tuple([dense(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for x in y] for y in maps)


def _boxes_of(boxes: Boxes, tensor: Tensor) -> None:
    boxes.tensor = tensor.float()  # without asking whether there are any


def _clip_boxes(boxes: Boxes, box_size: Tensor) -> None:
    boxes.tensor = _clip(boxes.tensor, box_size)  # without asking whether all are finite


def _clip(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Clip boxes [.., 4], of one image after the other, to their image."""
    each = boxes.reshape(sizes.shape[0], -1, 4)
    limits = sizes.flip(1).repeat(1, 2)[:, None]
    return torch.minimum(each.clamp(min=0), limits).reshape(boxes.shape)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """Rows [B, n, ...] of ``values`` [B, N, ...]."""
    if values.dim() == 2:
        return values.gather(1, index)
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))


def _top(scores: Tensor, most: int | torch.SymInt) -> tuple[Tensor, Tensor]:
    """``topk`` of [B, N], or all where N is smaller. Equal values stay in order, as in an NMS."""
    scores, index = scores.sort(dim=1, descending=True, stable=True)
    # not slices, because an exporter would have to prove that they lie inside
    first = torch.arange(torch.sym_min(scores.shape[1], most), device=scores.device)
    return scores[:, first], index[:, first]


def not_covered(boxes: Tensor, valid: Tensor, threshold: float, classes: Tensor) -> Tensor:
    """Which boxes NMS by class keeps: bool [B, N].

    A box is kept if no kept box before it covers it. At first all are kept; each round settles the
    boxes whose covering boxes are settled (Cluster-NMS, Zheng et al., arXiv:2005.03572).

    Args:
        boxes: [B, N, 4], the best first.
        valid: bool [B, N], True for boxes that exist.
        threshold: of the overlap.
        classes: int64 [B, N]; boxes of different ones do not cover each other.
    """
    a, b = boxes[:, :, None], boxes[:, None]
    sides = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    inside = sides.clamp(min=0).prod(3)
    area = (boxes[..., 2:] - boxes[..., :2]).prod(2)
    covers = inside > threshold * (area[:, :, None] + area[:, None] - inside)
    order = torch.arange(boxes.shape[1], device=boxes.device)
    covers = covers & (order < order[:, None]) & (classes[:, :, None] == classes[:, None])
    covers, there = covers.float(), valid.float()[:, :, None]
    kept = there
    for _ in range(ROUNDS):
        kept = there * (torch.bmm(covers, kept) < 0.5)
    return kept[:, :, 0] > 0


def _find_top_rpn_proposals(
    proposals: list[Tensor],
    pred_objectness_logits: list[Tensor],
    image_sizes: list[Tensor],
    nms_thresh: float,
    pre_nms_topk: int,
    post_nms_topk: int,
    min_box_size: float,
    training: bool,
) -> list[Instances]:
    sizes, boxes, scores = image_sizes[0], [], []
    for boxes_of_level, logits in zip(proposals, pred_objectness_logits, strict=True):
        logits, index = logits.topk(torch.sym_min(logits.shape[1], pre_nms_topk), dim=1)
        boxes_of_level = _at(boxes_of_level, index)
        valid = torch.isfinite(boxes_of_level).all(2) & torch.isfinite(logits)
        boxes_of_level = _clip(boxes_of_level, sizes)
        sides = boxes_of_level[..., 2:] - boxes_of_level[..., :2]
        valid = valid & (sides > min_box_size).all(2)
        kept = not_covered(boxes_of_level, valid, nms_thresh, torch.zeros_like(index))
        boxes.append(torch.where(kept[:, :, None], boxes_of_level, 0.0))
        scores.append(torch.where(kept, logits, -torch.inf))
    boxes, scores = torch.cat(boxes, 1), torch.cat(scores, 1)
    scores, index = _top(scores, post_nms_topk)
    result = Instances(sizes)
    # a missing proposal has no size, and the box that a head makes of it has none either
    result.proposal_boxes = Boxes(_at(boxes, index).flatten(0, 1))
    result.objectness_logits = scores.flatten()
    return [result]


def _fast_rcnn_inference(
    boxes: list[Tensor],
    scores: list[Tensor],
    image_shapes: list[Tensor],
    score_thresh: float,
    nms_thresh: float,
    topk_per_image: int,
) -> tuple[list[Instances], None]:
    sizes, scores = image_shapes[0], scores[0]
    batch, classes = sizes.shape[0], scores.shape[1] - 1
    valid = (torch.isfinite(boxes[0]).all(1) & torch.isfinite(scores).all(1))[:, None]
    boxes = boxes[0].unflatten(1, (-1, 4)).expand(-1, classes, -1)
    valid = valid & (boxes[..., 2:] > boxes[..., :2]).all(2)  # not for a missing proposal
    scores = torch.where(valid, scores[:, :-1], 0.0).reshape(batch, -1)
    boxes = _clip(boxes.reshape(batch, -1, 4), sizes)
    numbers = torch.arange(classes, device=scores.device)
    numbers = numbers + torch.zeros_like(scores, dtype=numbers.dtype).unflatten(1, (-1, classes))
    limits = score_thresh, nms_thresh, topk_per_image
    return [_best(boxes, scores, numbers.flatten(1), sizes, *limits)], None


def _forward_inference(
    model: DenseDetector, images: ImageList, features: list[Tensor], maps: Sequence[list[Tensor]]
) -> list[Instances]:
    """Detect with a detector of ``DENSE``."""
    channels = [model.num_classes, 4, 1][: len(maps)]
    predictions = model._transpose_dense_predictions(maps, channels)
    levels = []
    for anchors, logits, deltas, *centredness in zip(
        model.anchor_generator(features), *predictions, strict=True
    ):
        scores = logits.sigmoid()
        if centredness:  # of FCOS
            scores = (scores * centredness[0].sigmoid()).sqrt()
        scores = scores.flatten(1)
        count = torch.sym_min(scores.shape[1], model.test_topk_candidates)
        scores, index = scores.topk(count, dim=1)
        place = index.div(model.num_classes, rounding_mode="floor")
        deltas, anchors = _at(deltas, place), anchors.tensor[place]
        boxes = model.box2box_transform.apply_deltas(deltas.flatten(0, 1), anchors.flatten(0, 1))
        levels.append((boxes.reshape(deltas.shape), scores, index % model.num_classes))
    boxes, scores, classes = (torch.cat(values, 1) for values in zip(*levels, strict=True))
    limits = model.test_score_thresh, model.test_nms_thresh, model.max_detections_per_image
    return [_best(boxes, scores, classes, images.image_sizes[0], *limits)]


def _best(
    boxes: Tensor,
    scores: Tensor,
    classes: Tensor,
    sizes: Tensor,
    score_threshold: float,
    threshold: float,
    most: int,
) -> Instances:
    """The best ``most`` of the [B, N] detections on each image after NMS by class."""
    scores = torch.where(scores > score_threshold, scores, 0.0)
    scores = F.pad(scores, (0, most))  # so there are at least ``most``
    scores, index = _top(scores, max(CANDIDATES, most))
    index = torch.where(scores > 0, index, 0)
    boxes, classes = _at(boxes, index), _at(classes, index)
    kept = not_covered(boxes, scores > 0, threshold, classes)
    scores, index = _top(torch.where(kept, scores, 0.0), most)
    boxes, classes = _at(boxes, index), _at(classes, index)
    # boxes outside of the image are removed last, as in Detectron2
    boxes = _clip(boxes, sizes)
    there = (scores > 0) & (boxes[..., 2:] > boxes[..., :2]).all(2)
    scores, index = _top(torch.where(there, scores, 0.0), most)
    boxes, classes, there = _at(boxes, index), _at(classes, index), scores > 0
    result = Instances(sizes)
    result.pred_boxes = Boxes((boxes * there[:, :, None]).flatten(0, 1))
    result.scores = scores.flatten()
    result.pred_classes = (classes * there).flatten()
    return result


def _pool(pooler: poolers.ROIPooler, x: Sequence[Tensor], box_lists: list[Boxes]) -> Tensor:
    """Pool every box on every level; boxes of other levels are exchanged for one of little cost."""
    boxes, batch = box_lists[0].tensor, x[0].shape[0]
    each = boxes.reshape(batch, -1, 4)
    images = torch.arange(batch, device=boxes.device)[:, None, None] + torch.zeros_like(
        each[..., :1]
    )
    regions = torch.cat([images.flatten(0, 1), boxes], 1)
    if len(pooler.level_poolers) == 1:
        return pooler.level_poolers[0](x[0], regions)
    levels = poolers.assign_boxes_to_levels(
        box_lists,
        pooler.min_level,
        pooler.max_level,
        pooler.canonical_box_size,
        pooler.canonical_level,
    )
    none = torch.cat([regions[:, :1], torch.zeros_like(boxes)], 1)
    pooled = None
    for level, (features, pool) in enumerate(zip(x, pooler.level_poolers, strict=True)):
        here = (levels == level)[:, None]
        found = pool(features, torch.where(here, regions, none))
        pooled = found if pooled is None else torch.where(here[:, :, None, None], found, pooled)
    return pooled
