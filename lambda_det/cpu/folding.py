"""When a batch norm can be folded into the convolution before it, and the result."""

from __future__ import annotations

import torch
from detectron2.layers import FrozenBatchNorm2d, NaiveSyncBatchNorm
from torch import Tensor, nn

from lambda_det.native.calls import is_hooked

# Exactly these: a derived norm may do more, such as timm's with an activation
FOLDABLE_NORMS: set[type[nn.Module]] = {
    nn.BatchNorm2d,
    nn.SyncBatchNorm,
    NaiveSyncBatchNorm,
    FrozenBatchNorm2d,
}
# In float16 a kernel's small numbers would lose digits when they are multiplied by a small scale
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def is_foldable(norm: nn.Module | None, weight: Tensor) -> bool:
    """Whether a norm multiplies by and adds fixed numbers, whatever its input is.

    Args:
        norm: stands behind a convolution, or None.
        weight: the kernel [C', C, h, w] of the convolution, whose dtype, device and number of
            channels the norm must have.
    """
    if type(norm) not in FOLDABLE_NORMS or norm.running_mean is None or is_hooked(norm):
        return False
    if norm.training and type(norm) is not FrozenBatchNorm2d:
        return False
    own = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    return weight.dtype in _DTYPES and all(
        x is None or (x.shape, x.dtype, x.device) == (weight.shape[:1], weight.dtype, weight.device)
        for x in own
    )


def folded(
    norm: nn.Module, weight: Tensor, bias: Tensor | None, computed_in: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The kernel [C', C, h, w] and the bias [C'] of a convolution with the norm behind it.

    Args:
        norm: is foldable.
        weight: of the convolution.
        bias: of the convolution, or None.
        computed_in: the least dtype of the sums and products; the results have the kernel's dtype.
    """
    # PyTorch's fuse_conv_bn_weights makes new parameters, which stop the gradient
    dtype = torch.promote_types(weight.dtype, computed_in)
    scale = (norm.running_var.to(dtype) + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -norm.running_mean.to(dtype) if bias is None else bias.to(dtype) - norm.running_mean
    shift = shift * scale if norm.bias is None else norm.bias.to(dtype) + shift * scale
    return (weight * scale.view(-1, 1, 1, 1)).to(weight.dtype), shift.to(weight.dtype)
