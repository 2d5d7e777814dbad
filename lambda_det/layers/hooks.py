"""Whether somebody watches a module: then it must be called, and not only its weights be used.

And what somebody can watch that is no module's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
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


_notes: dict[str, Tensor] | None = None


def note(name: str, x: Tensor) -> None:
    """Show a part of a layer's output to who is :func:`noting`; with several groups the last's."""
    if _notes is not None:
        _notes[name] = x.detach()


@contextmanager
def noting() -> Iterator[dict[str, Tensor]]:
    """The parts of the layers that compute in here, by name; clear it between them."""
    global _notes
    before, _notes = _notes, {}
    try:
        yield _notes
    finally:
        _notes = before
