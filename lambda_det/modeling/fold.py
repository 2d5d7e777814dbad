"""A copy of a network for inference, with its batch norms folded into the convolutions before."""

from __future__ import annotations

import copy
import itertools
from typing import TypeVar

import torch
from detectron2.layers import FrozenBatchNorm2d, NaiveSyncBatchNorm
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from lambda_det.layers import LambdaLayer
from lambda_det.modeling.norm import SyncBatchNorm2d

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
        if isinstance(module, nn.Conv2d) and _is_foldable(getattr(module, "norm", None)):
            _fold(module, module.norm)
            module.norm = None
        elif isinstance(module, LambdaLayer):
            _fold_projection(module)
        elif isinstance(module, nn.Sequential):
            _fold_sequence(module)
    return model


def _is_foldable(norm: nn.Module | None) -> bool:
    return type(norm) in _NORMS and norm.running_mean is not None


@torch.no_grad()
def _fold(conv: nn.Conv2d, norm: nn.Module, rows: slice = slice(None)) -> None:
    """Fold the norm of these output channels into the convolution."""
    if conv.bias is None:
        conv.bias = nn.Parameter(conv.weight.new_zeros(conv.out_channels))
    weight, bias = fuse_conv_bn_weights(
        conv.weight[rows],
        conv.bias[rows],
        norm.running_mean,
        norm.running_var,
        norm.eps,
        norm.weight,
        norm.bias,
    )
    # In place, so that the layout in memory stays
    conv.weight[rows], conv.bias[rows] = weight, bias


def _fold_projection(layer: LambdaLayer) -> None:
    """Fold the norms of queries and values into their rows of the projection."""
    queries, keys, _ = layer.rows
    for name, rows in (("query_norm", slice(queries)), ("value_norm", slice(queries + keys, None))):
        if _is_foldable(getattr(layer, name)):
            _fold(layer.qkv, getattr(layer, name), rows)
            setattr(layer, name, nn.Identity())


def _fold_sequence(sequence: nn.Sequential) -> None:
    for (_, conv), (name, norm) in itertools.pairwise(sequence.named_children()):
        # In a convolution of Detectron2 its own norm and activation come before
        plain = all(getattr(conv, part, None) is None for part in ("norm", "activation"))
        if isinstance(conv, nn.Conv2d) and plain and _is_foldable(norm):
            _fold(conv, norm)
            setattr(sequence, name, nn.Identity())
