"""Whether somebody watches a module: then it must be called, and not only its weights be used."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module


def is_watched(*modules: nn.Module) -> bool:
    """Whether any of the modules, or all modules, have hooks on their calls."""
    return _everything_is_watched() or any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        for module in modules
    )


def _everything_is_watched() -> bool:
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )
