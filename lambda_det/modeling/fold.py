"""A copy of a network for inference, with its batch norms folded into the convolutions before."""

from __future__ import annotations

import copy
import itertools
from typing import TypeVar

import torch
from detectron2.layers import FrozenBatchNorm2d, NaiveSyncBatchNorm
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.layers import LambdaLayer
from lambda_det.modeling.norm import SyncBatchNorm2d
from lambda_det.modeling.resnet import Bottleneck

Model = TypeVar("Model", bound=nn.Module)

# Exactly these: a derived norm may do more, such as timm's with an activation
_NORMS = (
    nn.BatchNorm2d,
    nn.SyncBatchNorm,
    NaiveSyncBatchNorm,
    SyncBatchNorm2d,
    FrozenBatchNorm2d,
)


def fold_norms(model: Model) -> Model:
    """A copy in evaluation mode that computes the same with fewer operations.

    Norms with running statistics are folded into the convolution before them: in the convolutions
    of Detectron2, in the projections of lambda layers, and where both follow each other in a
    sequence. Other norms stay. The model itself is left as it is.
    """
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and is_foldable(getattr(module, "norm", None)):
            _fold(module, module.norm)
            module.norm = None
        elif isinstance(module, LambdaLayer):
            _fold_projection(module)
        elif isinstance(module, nn.Sequential):
            _fold_sequence(module)
    for module in model.modules():
        if type(module) is Bottleneck and module.se is not None and module.conv3.norm is None:
            module.__class__ = _FoldedBottleneck
    return model


class _FoldedBottleneck(Bottleneck):
    def widen(self, x: Tensor) -> Tensor:
        """The means of the last map are made of those of its input, a fourth of the channels."""
        means = F.conv2d(self.se.squeeze(x), self.conv3.weight, self.conv3.bias)
        return self.se(self.conv3(x), means)


def is_foldable(norm: nn.Module | None) -> bool:
    """Whether it multiplies and adds the same numbers whatever it gets."""
    if type(norm) not in _NORMS or norm.running_mean is None:
        return False
    return type(norm) is FrozenBatchNorm2d or not norm.training


def folded(norm: nn.Module, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The kernel [C', C, h, w] and the bias [C'] of a convolution with the norm behind it."""
    # PyTorch's fuse_conv_bn_weights makes new parameters, which stop the gradient
    scale = (norm.running_var + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -norm.running_mean if bias is None else bias - norm.running_mean
    shift = shift * scale if norm.bias is None else torch.addcmul(norm.bias, shift, scale)
    return weight * scale.view(-1, 1, 1, 1), shift


@torch.no_grad()
def _fold(conv: nn.Conv2d, norm: nn.Module, rows: slice = slice(None)) -> None:
    """Fold the norm of these output channels into the convolution."""
    if conv.bias is None:
        conv.bias = nn.Parameter(conv.weight.new_zeros(conv.out_channels))
    # In place, so that the layout in memory stays
    conv.weight[rows], conv.bias[rows] = folded(norm, conv.weight[rows], conv.bias[rows])


def _fold_projection(layer: LambdaLayer) -> None:
    """Fold the norms of queries and values into their rows of the projection."""
    queries, keys, _ = layer.rows
    for name, rows in (("query_norm", slice(queries)), ("value_norm", slice(queries + keys, None))):
        if is_foldable(getattr(layer, name)):
            _fold(layer.qkv, getattr(layer, name), rows)
            setattr(layer, name, nn.Identity())


def _fold_sequence(sequence: nn.Sequential) -> None:
    for (_, conv), (name, norm) in itertools.pairwise(sequence.named_children()):
        # In a convolution of Detectron2 its own norm and activation come before
        plain = all(getattr(conv, part, None) is None for part in ("norm", "activation"))
        if isinstance(conv, nn.Conv2d) and plain and is_foldable(norm):
            _fold(conv, norm)
            setattr(sequence, name, nn.Identity())
