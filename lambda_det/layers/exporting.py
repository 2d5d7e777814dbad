"""Whether the forward pass is being written down as a graph that other runtimes run at any size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["exporting", "first_of", "is_exporting", "plain"]

_inside = False
# PyTorch 2.4 does not tell an export from torch.compile, which wants the custom operators instead
_torch_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


def is_exporting() -> bool:
    """Whether a graph is recorded that must hold for every size, in runtimes without our operators.

    Nothing may then be chosen by the size of a map, nor call what only this package brings.
    """
    return _inside or torch.jit.is_tracing() or _torch_is_exporting()


def plain(x: Tensor) -> Tensor:
    """In an export a dense copy, else ``x``.

    Operators look at the sizes of a view to tell how it is laid out, and then the graph holds only
    for maps of more than one row, column or position.
    """
    return x.clone(memory_format=torch.contiguous_format) if is_exporting() else x


def first_of(x: Tensor, height: int, width: int) -> Tensor:
    """The first rows and columns of [b, H, W, ..]."""
    if not is_exporting():
        return x[:, :height, :width]
    # Of slices it would have to be proven that they lie inside
    for dim, size in ((1, height), (2, width)):
        x = x.index_select(dim, torch.arange(size, device=x.device))
    return x


@contextmanager
def exporting() -> Iterator[None]:
    """Compute as in an export, for PyTorch versions and callers that do not say that it is one."""
    global _inside
    before, _inside = _inside, True
    try:
        yield
    finally:
        _inside = before
