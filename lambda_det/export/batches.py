"""Detectors on batches of images, with a fixed number of boxes for each.

Where fewer are found the rest is 0 and their number is an output. So no shape in the graph depends
on what the images show, there is no loop, and every runtime that has RoiAlign and TopK can hold it.
The results are those of Detectron2, unless more than ``CANDIDATES`` boxes of an image score above
the threshold, or a box is covered by one that is covered by one, more than ``ROUNDS`` deep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from detectron2.modeling import RetinaNet, poolers
from detectron2.modeling.proposal_generator import rpn
from detectron2.modeling.roi_heads import cascade_rcnn, fast_rcnn
from detectron2.structures import Boxes, ImageList, Instances
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.errors import ConfigError
from lambda_det.export.detections import clip, exportable_detections
from lambda_det.export.networks import DetectorGraph, is_rcnn

__all__ = ["BatchGraph", "batched_detections", "not_covered"]

CANDIDATES = 1000  # boxes of an image that NMS compares in the end
ROUNDS = 20  # on photographs 12 were the most that changed anything


class BatchGraph(DetectorGraph):
    """A detector of Detectron2 on images of one size, each of which may fill only a part of it.

    Args:
        model: in evaluation mode.
        rgb: whether the model wants RGB, which the images always are.

    Raises:
        ConfigError: how it predicts is not known.
    """

    def __init__(self, model: nn.Module, rgb: bool) -> None:
        super().__init__(model)
        if not (is_rcnn(model) or isinstance(model, RetinaNet)):
            raise ConfigError(f"{type(model).__name__} is exported for one image, without --batch.")
        self.rgb, self.most = rgb, _most(model)

    def prepare(self, images: Tensor, sizes: Tensor) -> Tensor:
        """Images [B, H, W, 3], RGB, of heights and widths [B, 2], as the backbone takes them."""
        model = self.model
        pixels = images.float().permute(0, 3, 1, 2)
        pixels = ((pixels if self.rgb else pixels.flip(1)) - model.pixel_mean) / model.pixel_std
        y, x = (
            torch.arange(side, device=pixels.device) < sizes[:, i : i + 1]
            for i, side in enumerate(images.shape[1:3])
        )
        return torch.where((y[:, :, None] & x[:, None])[:, None], pixels, 0.0)

    def forward(self, images: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        """Map images and their heights and widths [B, 2] to detections.

        Returns:
            ``boxes`` [B, N, 4], ``classes`` and ``scores`` [B, N], and ``masks`` [B, N, 1, side,
            side] of a detector that has them, the best first; ``count`` [B] of them are found.
        """
        pixels, sizes = self.prepare(images, sizes), sizes.float()
        found = self.detect(ImageList(pixels, [sizes])).get_fields()
        outputs = {
            name.removeprefix("pred_"): getattr(value, "tensor", value).unflatten(
                0, (-1, self.most)
            )
            for name, value in sorted(found.items())
        }
        there = outputs["scores"] > 0
        if "masks" in outputs:
            outputs["masks"] = outputs["masks"] * there[:, :, None, None, None]
        return {**outputs, "count": there.sum(1)}

    def detect(self, images: ImageList) -> Instances:
        """Detections on a batch, as if it were one image."""
        if is_rcnn(self.model):
            return super().detect(images)
        return _retinanet(self.model, images)

    def original(self, images: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        """The same by Detectron2, to compare with."""
        model, pixels = self.model, self.prepare(images, sizes)
        batch = ImageList(pixels, [tuple(size) for size in sizes.tolist()])
        features = model.backbone(pixels)
        if is_rcnn(model):
            proposals, _ = model.proposal_generator(batch, features, None)
            found = model.roi_heads(batch, features, proposals, None)[0]
        else:
            features = [features[name] for name in model.head_in_features]
            found = model.forward_inference(batch, features, model.head(features))
        outputs: dict[str, list[Tensor]] = {}
        for instances in found:
            instances.pred_boxes.clip(instances.image_size)
            instances = instances[instances.pred_boxes.nonempty()]
            for name, value in sorted(instances.get_fields().items()):
                value = getattr(value, "tensor", value)
                missing = value.new_zeros(self.most - len(value), *value.shape[1:])
                outputs.setdefault(name.removeprefix("pred_"), []).append(
                    torch.cat([value, missing])
                )
            outputs.setdefault("count", []).append(torch.tensor(len(instances)))
        count = outputs.pop("count")
        return {name: torch.stack(values) for name, values in (*outputs.items(), ("count", count))}


def _most(model: nn.Module) -> int:
    """Detections an image at most."""
    if not is_rcnn(model):
        return model.max_detections_per_image
    predictor = model.roi_heads.box_predictor
    most = (predictor[0] if isinstance(predictor, nn.ModuleList) else predictor).test_topk_per_image
    if most < 1:
        raise ConfigError(
            f"TEST.DETECTIONS_PER_IMAGE is {most}; a batch has a fixed number for each image."
        )
    return most


@contextmanager
def batched_detections() -> Iterator[None]:
    """Let Detectron2's detectors run on a batch as on one image, in the form of this module.

    Boxes of all images stand one after the other, as many of each. The size of "the image" is a
    tensor [B, 2] of heights and widths.
    """
    with exportable_detections(), ExitStack() as stack:
        for where, name, replacement in (
            (rpn, "find_top_rpn_proposals", _find_top_rpn_proposals),
            (fast_rcnn, "fast_rcnn_inference", _fast_rcnn_inference),
            (cascade_rcnn, "fast_rcnn_inference", _fast_rcnn_inference),
            (poolers.ROIPooler, "forward", _pool),
        ):
            stack.enter_context(mock.patch.object(where, name, replacement))
        yield


def _at(values: Tensor, index: Tensor) -> Tensor:
    """Rows [B, n, ...] of ``values`` [B, N, ...]."""
    if values.dim() == 2:
        return values.gather(1, index)
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))


def not_covered(boxes: Tensor, valid: Tensor, threshold: float, same: Tensor | None) -> Tensor:
    """Which boxes NMS keeps: bool [B, N].

    A box is kept that no kept box before it covers. To begin with all are kept; each round settles
    the boxes whose coverers are settled (Cluster-NMS, Zheng et al., arXiv:2005.03572).

    Args:
        boxes: [B, N, 4], the best first.
        valid: bool [B, N], which ones are there.
        threshold: of the overlap.
        same: bool [B, N, N], whether one of a pair may cover the other; None for all.
    """
    a, b = boxes[:, :, None], boxes[:, None]
    sides = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    inside = sides.clamp(min=0).prod(3)
    area = (boxes[..., 2:] - boxes[..., :2]).prod(2)
    covers = inside > threshold * (area[:, :, None] + area[:, None] - inside)
    order = torch.arange(boxes.shape[1], device=boxes.device)
    covers = covers & (order < order[:, None])
    if same is not None:
        covers = covers & same
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
    boxes, scores = [], []
    for boxes_i, logits in zip(proposals, pred_objectness_logits, strict=True):
        logits, index = logits.topk(torch.sym_min(logits.shape[1], pre_nms_topk), dim=1)
        boxes_i = _at(boxes_i, index)
        valid = torch.isfinite(boxes_i).all(2) & torch.isfinite(logits)
        boxes_i = clip(boxes_i, image_sizes[0])
        valid = valid & ((boxes_i[..., 2:] - boxes_i[..., :2]) > min_box_size).all(2)
        kept = not_covered(boxes_i, valid, nms_thresh, None)
        boxes.append(torch.where(kept[:, :, None], boxes_i, 0.0))
        scores.append(torch.where(kept, logits, -torch.inf))
    boxes, scores = torch.cat(boxes, 1), torch.cat(scores, 1)
    scores, index = scores.topk(torch.sym_min(scores.shape[1], post_nms_topk), dim=1)
    result = Instances(image_sizes[0])
    # Those that are missing have no size, as have the boxes that heads make of them
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
    classes = scores.shape[1] - 1
    finite = torch.isfinite(boxes[0]).all(1) & torch.isfinite(scores).all(1)
    boxes = boxes[0].unflatten(1, (-1, 4)).expand(-1, classes, -1)
    there = finite[:, None] & (boxes[..., 2:] > boxes[..., :2]).all(2)  # not for a missing proposal
    scores = torch.where(there, scores[:, :-1], 0.0)
    scores = scores.reshape(sizes.shape[0], -1)
    boxes = clip(boxes.reshape(sizes.shape[0], -1, 4), sizes)
    numbers = torch.arange(classes, device=scores.device)
    numbers = numbers + torch.zeros_like(scores, dtype=numbers.dtype).unflatten(1, (-1, classes))
    return [
        _best(boxes, scores, numbers.flatten(1), sizes, score_thresh, nms_thresh, topk_per_image)
    ], None


def _best(
    boxes: Tensor,
    scores: Tensor,
    classes: Tensor,
    sizes: Tensor,
    score_threshold: float,
    threshold: float,
    most: int,
) -> Instances:
    """The best detections after NMS by class, out of [B, N] of them."""
    # There are ``most`` at least
    scores = F.pad(torch.where(scores > score_threshold, scores, 0.0), (0, most))
    scores, index = scores.topk(torch.sym_min(scores.shape[1], CANDIDATES), dim=1)
    index = torch.where(scores > 0, index, 0)
    boxes, classes = _at(boxes, index), _at(classes, index)
    same = classes[:, :, None] == classes[:, None]
    kept = not_covered(boxes, scores > 0, threshold, same)
    scores, index = torch.where(kept, scores, 0.0).topk(most, dim=1)
    boxes, classes = clip(_at(boxes, index), sizes), _at(classes, index)
    # Those outside of the image are left out last, as Detectron2 does
    there = (scores > 0) & (boxes[..., 2:] > boxes[..., :2]).all(2)
    scores, index = torch.where(there, scores, 0.0).topk(most, dim=1)
    there = scores > 0
    result = Instances(sizes)
    result.pred_boxes = Boxes((_at(boxes, index) * there[:, :, None]).flatten(0, 1))
    result.scores = scores.flatten()
    result.pred_classes = (_at(classes, index) * there).flatten()
    return result


def _retinanet(model: RetinaNet, images: ImageList) -> Instances:
    features = model.backbone(images.tensor)
    features = [features[name] for name in model.head_in_features]
    made = model._transpose_dense_predictions(model.head(features), [model.num_classes, 4])
    found = []
    for anchors, logits, deltas in zip(model.anchor_generator(features), *made, strict=True):
        scores = logits.sigmoid().flatten(1)
        count = torch.sym_min(scores.shape[1], model.test_topk_candidates)
        scores, index = scores.topk(count, dim=1)
        place = index.div(model.num_classes, rounding_mode="floor")
        deltas, anchors = _at(deltas, place), anchors.tensor[place]
        boxes = model.box2box_transform.apply_deltas(deltas.flatten(0, 1), anchors.flatten(0, 1))
        found.append((boxes.reshape(deltas.shape), scores, index % model.num_classes))
    boxes, scores, classes = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    limits = model.test_score_thresh, model.test_nms_thresh, model.max_detections_per_image
    return _best(boxes, scores, classes, images.image_sizes[0], *limits)


def _pool(pooler: poolers.ROIPooler, x: Sequence[Tensor], box_lists: list[Boxes]) -> Tensor:
    """Every box on every level, but those of other levels as a box that costs little."""
    boxes, batch = box_lists[0].tensor, x[0].shape[0]
    each = boxes.unflatten(0, (batch, -1))
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
    pooled = []
    for level, (features, pool) in enumerate(zip(x, pooler.level_poolers, strict=True)):
        here = (levels == level)[:, None]
        part = pool(features, torch.where(here, regions, none))
        pooled.append(torch.where(here[:, :, None, None], part, 0.0))
    return torch.stack(pooled).sum(0)
