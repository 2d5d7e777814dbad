"""A copy of a network for inference, with its batch norms folded into the convolutions before."""

from __future__ import annotations

import copy
import itertools
from typing import TypeVar

import torch
from detectron2.layers import FrozenBatchNorm2d, NaiveSyncBatchNorm
from torch import Tensor, nn

from lambda_det.layers import LambdaLayer
from lambda_det.modeling.norm import SyncBatchNorm2d

__all__ = ["fold_norms"]

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
            _fold(module, _scale_and_shift(module.norm))
            module.norm = None
        elif isinstance(module, LambdaLayer):
            _fold_projection(module)
        elif isinstance(module, nn.Sequential):
            _fold_sequence(module)
    return model


def _is_foldable(norm: nn.Module | None) -> bool:
    return type(norm) in _NORMS and norm.running_mean is not None


def _scale_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The norm as y = scale * x + shift, per channel in float64."""
    mean, var = norm.running_mean.double(), norm.running_var.double()
    weight = torch.ones_like(mean) if norm.weight is None else norm.weight.double()
    bias = torch.zeros_like(mean) if norm.bias is None else norm.bias.double()
    scale = weight * (var + norm.eps).rsqrt()
    return scale, bias - scale * mean


@torch.no_grad()
def _fold(conv: nn.Conv2d, scale_and_shift: tuple[Tensor, Tensor]) -> None:
    scale, shift = scale_and_shift
    if conv.bias is not None:
        shift = shift + scale * conv.bias
    else:
        conv.bias = nn.Parameter(torch.empty_like(conv.weight[:, 0, 0, 0]))
    # In place, so that the layout in memory stays
    conv.weight.copy_(conv.weight * scale[:, None, None, None])
    conv.bias.copy_(shift)


def _fold_projection(layer: LambdaLayer) -> None:
    """Fold the norms of queries and values into their rows of the projection."""
    queries, keys, _ = layer.rows
    ones = torch.ones(sum(layer.rows), dtype=torch.float64, device=layer.qkv.weight.device)
    scale, shift = ones, torch.zeros_like(ones)
    for name, rows in (("query_norm", slice(queries)), ("value_norm", slice(queries + keys, None))):
        if _is_foldable(getattr(layer, name)):
            scale[rows], shift[rows] = _scale_and_shift(getattr(layer, name))
            setattr(layer, name, nn.Identity())
    _fold(layer.qkv, (scale, shift))


def _fold_sequence(sequence: nn.Sequential) -> None:
    for conv, (name, norm) in itertools.pairwise(sequence.named_children()):
        # In a convolution of Detectron2 its own norm and activation come before
        plain = all(getattr(conv[1], part, None) is None for part in ("norm", "activation"))
        if isinstance(conv[1], nn.Conv2d) and plain and _is_foldable(norm):
            _fold(conv[1], _scale_and_shift(norm))
            setattr(sequence, name, nn.Identity())
