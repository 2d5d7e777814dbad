"""Whether torch.compile can serve the training of a backbone, asked before the training begins."""

from __future__ import annotations

import functools

import torch
from torch import nn

from lambda_det.native.calls import has_hooks


def why_not(backbone: nn.Module | None, device: str, *, one_size: bool | None) -> str | None:
    """Why a backbone cannot be compiled for a training; None if it can.

    Args:
        backbone: of a detector, ready for its training; None where it has none.
        device: that it is on.
        one_size: whether all images of the training have one size; None if unknown.
    """
    if backbone is None:
        return "the model has no part that is called backbone"
    if one_size is False:
        return "images have several sizes, and each would be compiled (INPUT.LSJ makes them one)"
    for name, module in backbone.named_modules():
        what = f"backbone.{name}" if name else "the backbone"
        if has_hooks(module):
            # of weight norm and pruning; MASK_PADDING is made of hooks, too
            return f"{what} has a hook, which compiled code may leave out"
        if getattr(module, "checkpoint_activations", False):
            return f"{what} computes its blocks twice (CHECKPOINT_ACTIVATIONS)"
    return _fault_of_compiler(torch.device(device).type)


@functools.cache
def _fault_of_compiler(device: str) -> str | None:
    """What fails where a function of one line is compiled; None if nothing does."""
    # It needs a C compiler for CPUs, and that and Triton for GPUs
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(2, device=device))
    except Exception as error:  # of Dynamo, of a compiler's process, of a Python that is too new
        said, _, _ = str(getattr(error, "inner_exception", error)).strip().partition("\n")
        return f"PyTorch compiles nothing here ({said or type(error).__name__})"
    return None
