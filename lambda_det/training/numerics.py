"""The search for the module that made the first NaN."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_WRAPPERS = re.compile(r"^(module|_orig_mod)(?=\.|$)")  # their prefixes of names


class NonFiniteNumbers(FloatingPointError):
    """A module produced NaN or an infinite number; the text names the module and the tensor."""


class NumericsDebugger:
    """Checks the output of each module of a model, and the gradients that it passes back.

    Outputs are checked from the inside out, so the first module found is the innermost one. A
    gradient is checked where it leaves a module through its inputs or enters a parameter, and where
    it arrives at a module's output; that shows which module produced it.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: gets hooks, which do nothing outside of :meth:`watching`.
        """
        self._active = self._gradients = False
        self._computing: list[tuple[str, nn.Module, tuple]] = []  # from the outside in
        for name, module in model.named_modules():
            module._compiled_call_impl = None  # hooks would break the code at each module
            name = _WRAPPERS.sub("", name).lstrip(".")
            is_leaf = next(module.children(), None) is None
            module.register_forward_pre_hook(partial(self._before, name, is_leaf))
            module.register_forward_hook(partial(self._after, name, is_leaf))
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    what = f"{_named(name, module)} gets a gradient of its {own}"
                    parameter.register_hook(partial(self._look_at_gradient, what, module))

    @contextmanager
    def watching(self, *, gradients: bool = True) -> Iterator[None]:
        """Check every forward pass within the block, and with ``gradients`` every backward pass.

        Raises:
            NonFiniteNumbers: at the first module found.
        """
        self._active, self._gradients = True, gradients
        try:
            yield
        finally:
            self._active = self._gradients = False
            self._computing.clear()

    def _before(self, name: str, is_leaf: bool, module: nn.Module, args: tuple) -> tuple | None:
        """Check the inputs, and register the check of their gradients."""
        # A view of each input has a separate gradient, without the share of other modules that
        # read the same input
        if not self._active:
            return None
        for x in _tensors(args):
            if not _is_finite(x):
                raise NonFiniteNumbers(self._of_input(x, name, module))
        self._computing.append((name, module, args))
        if not (is_leaf and self._gradients and torch.is_grad_enabled()):
            return None
        what = f"{_named(name, module)} passes back a gradient of its input"
        return tuple(self._with_hook(arg, what, module) for arg in args)

    def _of_input(self, x: Tensor, name: str, module: nn.Module) -> str:
        """The message about an input, which comes from the enclosing module or from the data."""
        if not self._computing:
            return f"The data hold an input in which {_count(x)}"
        outer_name, outer, args = self._computing[-1]
        return (
            f"{_named(outer_name, outer)} gives its module {_named(name, module)} an input in "
            f"which {_count(x)} ({_inputs(args)}; {_state(outer)})"
        )

    def _with_hook(self, x: Any, what: str, module: nn.Module) -> Any:
        if not (isinstance(x, Tensor) and x.requires_grad):
            return x
        x = x.view_as(x)
        x.register_hook(partial(self._look_at_gradient, what, module))
        return x

    def _after(self, name: str, is_leaf: bool, module: nn.Module, args: tuple, output: Any) -> None:
        if not self._active:
            return
        self._computing.pop()
        what = f"What follows {_named(name, module)} passes back a gradient of its output"
        for x in _tensors(output):
            if not _is_finite(x):
                raise NonFiniteNumbers(
                    f"{_named(name, module)} gives an output in which {_count(x)} "
                    f"({_inputs(args)}; {_state(module)})"
                )
            if is_leaf and self._gradients and x.requires_grad:
                x.register_hook(partial(self._look_at_gradient, what, module))

    def _look_at_gradient(self, what: str, module: nn.Module, grad: Tensor) -> None:
        if self._active and self._gradients and not _is_finite(grad):
            raise NonFiniteNumbers(f"{what} in which {_count(grad)} ({_state(module)})")


def _named(name: str, module: nn.Module) -> str:
    return f"{name or 'The model'} ({type(module).__name__})"


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors that a module gets or gives, also in Detectron2's structures."""
    for leaf in tree_leaves(value):
        if hasattr(leaf, "get_fields"):  # Instances
            yield from _tensors(leaf.get_fields())
            continue
        x = getattr(leaf, "tensor", leaf)  # Boxes, ImageList, BitMasks
        if isinstance(x, Tensor) and x.is_floating_point():
            yield x


def _is_finite(x: Tensor) -> bool:
    return bool(x.detach().isfinite().all())


def _count(x: Tensor) -> str:
    """How many numbers are NaN or infinite, in words."""
    nan, infinite = int(x.isnan().sum()), int(x.isinf().sum())
    total = nan + infinite
    return f"{total} of {x.numel()} numbers are not finite, {infinite} infinite and {nan} NaN"


def _inputs(args: tuple) -> str:
    return f"its input: {_size(_tensors(args))}"


def _state(module: nn.Module) -> str:
    return f"its parameters and buffers: {_size((*module.parameters(), *module.buffers()))}"


def _size(tensors: Iterable[Tensor]) -> str:
    """How many numbers are not finite, and the largest magnitude of the others."""
    held = [x.detach() for x in tensors if x.is_floating_point() and x.numel()]
    bad = sum(int((~x.isfinite()).sum()) for x in held)
    largest = max((x.double().nan_to_num(0, 0, 0).abs().max().item() for x in held), default=0.0)
    return f"{bad} numbers not finite, magnitudes up to {largest:.4g}"
