"""What is to know of hooks and of autograd, to replace functions of PyTorch or to copy a model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook would miss the call of this module."""
    of_all = nn.modules.module
    return "forward" in vars(module) or bool(
        has_hooks(module)
        or of_all._global_forward_hooks
        or of_all._global_forward_pre_hooks
        or of_all._global_backward_hooks
        or of_all._global_backward_pre_hooks
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def copied(model: Model) -> Model:
    """A copy of a network, also of one with weight norm or pruning, whose hooks compute kernels.

    Such a kernel is part of autograd's graph, which PyTorch refuses to copy. The hooks of the copy
    compute it anew, of the copy's parameters.
    """
    attributes = (x for module in model.modules() for x in vars(module).values())
    computed = [x for x in attributes if isinstance(x, Tensor) and not x.is_leaf]
    return copy.deepcopy(model, {id(x): x.detach().clone() for x in computed})


def put_in(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put others in all places of some modules of a network; returns it, or what replaces it."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in others:
                parent._modules[name] = others[child]
    return others.get(model, model)


def differentiable_once(backward: Callable) -> Callable:
    """Refuse second derivatives of a function of autograd, whose backward pass has none.

    PyTorch's ``once_differentiable`` refuses them only where the gradient of the output needs a
    gradient itself. That of a sum needs none, and there it drops them without a word.

    Raises:
        RuntimeError: the backward pass is called with ``create_graph``.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "A function of lambda_det was to be differentiated twice (create_graph), and knows "
                "first derivatives only; docs/layer.md names implementations that know both."
            )
        return backward(ctx, *grads)

    return refusing
