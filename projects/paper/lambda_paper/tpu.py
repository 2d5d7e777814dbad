"""The Mask R-CNN of TensorFlow's TPU repository, as parts of Detectron2.

They are the parts that no key of Detectron2 gives. detection_choices.md has all choices, with the
places in TPU's code. Detectron2 knows the names once this module is imported, which it does in
every process with ``DETECTRON2_ENV_MODULE=lambda_paper.tpu`` and this folder's parent in
``PYTHONPATH``.
"""

from __future__ import annotations

from typing import Any

import torch
from detectron2 import modeling
from detectron2.config import CfgNode, configurable
from detectron2.layers import ShapeSpec, get_norm
from detectron2.modeling import proposal_generator, roi_heads
from detectron2.structures import Boxes
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.modeling.backbones import build_lambda_resnet_backbone

_UNSAMPLED = 2  # the label of an anchor that has an object and is not in the sample


def set_norms(module: nn.Module) -> None:
    """Give all batch norms TPU's momentum, 0.997 in TensorFlow's sense, and epsilon."""
    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.momentum, norm.eps = 0.003, 1e-4


class _StridedConv(nn.Module):
    """p6 from p5: a 3x3 convolution of stride 2, padded as TensorFlow's "same"."""

    num_levels, in_feature = 1, "p5"

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.p6 = nn.Conv2d(channels, channels, 3, 2)

    def forward(self, x: Tensor) -> list[Tensor]:
        height, width = x.shape[-2:]
        return [self.p6(F.pad(x, (width % 2, 1, height % 2, 1)))]


class TPUFPN(modeling.FPN):
    """An FPN whose only norms are those of its outputs, p2 to p6. p6 is made from p5 without norm.

    Args:
        norm: of the outputs.
        image_size: side of the square to which images are padded, also in evaluation.
        out_channels: of each output.
        options: of Detectron2's, ``bottom_up`` and ``in_features``.
    """

    def __init__(self, *, norm: str, image_size: int, out_channels: int, **options: Any) -> None:
        top = _StridedConv(out_channels)
        options |= {"out_channels": out_channels, "top_block": top, "square_pad": image_size}
        super().__init__(**options)
        for conv in (*self.lateral_convs, *self.output_convs, top.p6):
            nn.init.xavier_uniform_(conv.weight)
            nn.init.zeros_(conv.bias)
        self.norms = nn.ModuleDict({f: get_norm(norm, out_channels) for f in self._out_features})
        set_norms(self)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: self.norms[name](feature) for name, feature in super().forward(x).items()}


@modeling.BACKBONE_REGISTRY.register()
def build_lambda_resnet_tpu_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> TPUFPN:
    """The network of ``MODEL.LAMBDA_RESNET`` with a :class:`TPUFPN`."""
    options = {key.lower(): cfg.MODEL.FPN[key] for key in ("IN_FEATURES", "OUT_CHANNELS", "NORM")}
    bottom_up = build_lambda_resnet_backbone(cfg, input_shape)
    return TPUFPN(bottom_up=bottom_up, image_size=cfg.INPUT.MAX_SIZE_TEST, **options)


@modeling.RPN_HEAD_REGISTRY.register()
class TPURPNHead(proposal_generator.StandardRPNHead):
    """Convolutions that all levels share, each followed by a norm of the level's own."""

    @configurable
    def __init__(self, *, norm: str, levels: int, **options: Any) -> None:
        super().__init__(**options)
        if isinstance(self.conv, nn.Conv2d):  # as in Detectron2, where there is one
            self.conv = nn.Sequential(self.conv)
        self.norms = nn.ModuleList(
            nn.ModuleList(get_norm(norm, conv.out_channels) for conv in self.conv)
            for _ in range(levels)
        )
        set_norms(self)

    def _get_rpn_conv(self, in_channels: int, out_channels: int) -> nn.Conv2d:
        return nn.Conv2d(in_channels, out_channels, 3, padding=1)

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: list[ShapeSpec]) -> dict[str, Any]:
        given = super().from_config(cfg, input_shape)
        return {**given, "norm": cfg.MODEL.FPN.NORM, "levels": len(input_shape)}

    def forward(self, features: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        hidden = []
        for x, norms in zip(features, self.norms, strict=True):
            for conv, norm in zip(self.conv, norms, strict=True):
                x = F.relu(norm(conv(x)))
            hidden.append(x)
        return [self.objectness_logits(x) for x in hidden], [self.anchor_deltas(x) for x in hidden]


@modeling.PROPOSAL_GENERATOR_REGISTRY.register()
class TPURPN(proposal_generator.RPN):
    """Boxes have a Huber loss, a mean over each level's targets that are not 0; levels are added.

    Targets are those of all anchors with an object, in the sample of the objectness loss or not.
    delta is ``SMOOTH_L1_BETA``.
    """

    def _subsample_labels(self, label: Tensor) -> Tensor:
        positive = label == 1
        label = super()._subsample_labels(label)
        return label.masked_fill_(positive & (label < 0), _UNSAMPLED)

    def losses(
        self,
        anchors: list[Boxes],
        logits: list[Tensor],
        labels: list[Tensor],
        deltas: list[Tensor],
        boxes: list[Tensor],
    ) -> dict[str, Tensor]:
        sampled = [found.masked_fill(found == _UNSAMPLED, -1) for found in labels]
        losses = super().losses(anchors, logits, sampled, deltas, boxes)
        every, sizes = Boxes.cat(anchors).tensor, [len(level) for level in anchors]
        targets = torch.stack([self.box2box_transform.get_deltas(every, found) for found in boxes])
        counted = (torch.stack(labels) > 0)[..., None] & (targets != 0)
        levels = zip(deltas, targets.split(sizes, 1), counted.split(sizes, 1), strict=True)
        total = 0
        for given, wanted, mask in levels:
            errors = F.huber_loss(given[mask], wanted[mask], "sum", delta=self.smooth_l1_beta)
            total = total + errors / mask.sum().clamp(min=1)
        return losses | {"loss_rpn_loc": total * self.loss_weight.get("loss_rpn_loc", 1.0)}


@modeling.ROI_BOX_HEAD_REGISTRY.register()
class TPUBoxHead(roi_heads.FastRCNNConvFCHead):
    """Detectron2's box head with norms also after the linear layers."""

    @configurable
    def __init__(self, input_shape: ShapeSpec, *, conv_norm: str, **options: Any) -> None:
        super().__init__(input_shape, conv_norm=conv_norm, **options)
        for k, fc in enumerate(self.fcs):
            nn.init.xavier_uniform_(fc.weight)
            norm = get_norm(conv_norm, fc.out_features)
            normed = nn.Sequential(fc, nn.Unflatten(1, (-1, 1, 1)), norm, nn.Flatten())
            setattr(self, f"fc{k + 1}", normed)
        set_norms(self)


class TPUOutputLayers(roi_heads.FastRCNNOutputLayers):
    """The boxes' loss is a mean over the coordinates of those with an object."""

    def box_reg_loss(
        self, proposal_boxes: Tensor, gt_boxes: Tensor, pred_deltas: Tensor, gt_classes: Tensor
    ) -> Tensor:
        loss = super().box_reg_loss(proposal_boxes, gt_boxes, pred_deltas, gt_classes)
        positive = ((gt_classes >= 0) & (gt_classes < self.num_classes)).sum()
        return loss * gt_classes.numel() / (4 * positive.clamp(min=1))


@modeling.ROI_MASK_HEAD_REGISTRY.register()
class TPUMaskHead(roi_heads.MaskRCNNConvUpsampleHead):
    """Detectron2's mask head with a norm also after the transposed convolution."""

    @configurable
    def __init__(self, input_shape: ShapeSpec, *, conv_norm: str, **options: Any) -> None:
        super().__init__(input_shape, conv_norm=conv_norm, **options)
        norm = get_norm(conv_norm, self.deconv.out_channels)
        self.deconv = nn.Sequential(self.deconv, norm)
        nn.init.kaiming_normal_(self.predictor.weight, mode="fan_out", nonlinearity="relu")
        set_norms(self)


@modeling.ROI_HEADS_REGISTRY.register()
class TPUROIHeads(roi_heads.StandardROIHeads):
    """ROI heads with :class:`TPUOutputLayers`."""

    @classmethod
    def _init_box_head(cls, cfg: CfgNode, input_shape: dict[str, ShapeSpec]) -> dict[str, Any]:
        parts = super()._init_box_head(cfg, input_shape)
        parts["box_predictor"].__class__ = TPUOutputLayers  # it has the same layers
        return parts


def setup_environment() -> None:
    """Do nothing: Detectron2 calls this after it has imported the module."""
