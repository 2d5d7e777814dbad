"""Whether torch.compile can serve the training of a backbone, asked before the training begins."""

from __future__ import annotations

from torch import nn

from lambda_det.native.calls import has_hooks


def why_not(backbone: nn.Module | None, *, one_size: bool | None) -> str | None:
    """Why a backbone cannot be compiled for a training; None if it can.

    Args:
        backbone: of a detector, ready for its training; None where it has none.
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
    return None
