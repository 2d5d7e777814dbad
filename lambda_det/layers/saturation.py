"""Limits for numbers that are about to become infinite, of which the next layer would make NaN.

It would by the difference of two in a sum, or the product of one with a weight of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lambda_det.layers.exporting import is_exporting

__all__ = ["limit", "saturate", "saturated"]

LARGEST = torch.finfo(torch.float16).max
# Far above what any trained network holds; the squares of sums of such numbers are within float32
RUNAWAY = 2.0**40


def saturate(x: Tensor) -> Tensor:
    """Limit ``x`` to the finite numbers of float16, +-65504, if that is its dtype; NaN stays NaN.

    It happens in place, so ``x`` must be new and not kept for a backward pass by what has made it,
    as with convolutions, matrix products, norms and sums. Gradients pass as if nothing had
    happened; they may be infinite themselves, which loss scaling has to see.
    """
    if x.dtype is not torch.float16:
        return x
    if is_exporting():
        return x.clamp(-LARGEST, LARGEST)
    with torch.no_grad():
        return x.clamp_(-LARGEST, LARGEST)


def limit(x: Tensor) -> Tensor:
    """Limit ``x`` to +-65504 in float16 and to +-2^40 in other dtypes; NaN stays NaN.

    In place where no gradients are computed; else without a gradient beyond the limits.

    A lambda layer's output is the product of two functions of its input. Where no batch statistics
    bring it back to size, a pixel of 10 000 is squared from layer to layer, out of float32 soon.
    """
    largest = LARGEST if x.dtype is torch.float16 else RUNAWAY
    if is_exporting() or torch.is_grad_enabled():
        return x.clamp(-largest, largest)
    return x.clamp_(-largest, largest)


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in another dtype; in float16 limited to its finite numbers."""
    if dtype is torch.float16 and x.dtype is not dtype:
        x = x.clamp(-LARGEST, LARGEST)
    return x.to(dtype)
