"""What a computation would do on a GPU, found on tensors without data, on any machine.

PyTorch's fake tensors have shapes, dtypes and devices, and no memory. :func:`pretend_gpu` is a
place where they can be on "cuda", autocast included, and a :class:`Trace` notes the operators that
are called on them, and the copies that the host waits for. Autograd's engine needs a real GPU for
tensors on "cuda"; operators of a backward pass are called directly.

``lambda_det::query_first`` is taken apart into what it calls.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lambda_det.layers.local import OPERATORS


@functools.cache
def is_available() -> bool:
    """Whether fake tensors can be on "cuda" here: without a GPU, PyTorch 2.8 asks the driver."""
    try:
        with FakeTensorMode():
            torch.zeros(1).to("cuda")
    except RuntimeError:
        return False
    return True


@contextmanager
def pretend_gpu() -> Iterator[None]:
    """A place where tensors without data can be on "cuda", whether there is a GPU or not.

    An operator that reads a value (``item``) or whose result has a size that depends on values
    raises an error here: on a GPU the host would have to wait for it.
    """
    amp = torch.cuda.amp.common
    with (
        FakeTensorMode(),
        # Without a GPU autocast would switch itself off
        mock.patch.object(amp, "amp_definitely_not_available", return_value=False),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
    ):
        yield


class Trace(TorchDispatchMode):
    """Notes what is called while it is entered.

    Attributes:
        operators: calls by operator.
        waits: of them, those that copy between the host and the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _TAKEN_APART:
            with self:
                return _TAKEN_APART[func](*args, **kwargs)
        if func.namespace == "aten":
            with self:  # inside of what is taken apart, operators come that are made of others
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        name = f"{func.namespace}::{func._opname}"
        self.operators[name] += 1
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        if len({x.device.type for x in tensors}) > 1:
            # A number on the host, as 0-dim tensor, is passed to a kernel without a copy
            large = {x.device.type for x in tensors if x.dim() > 0}
            if len(large) > 1 or func._opname in ("_to_copy", "copy_"):
                self.waits[name] += 1
        return result


_TAKEN_APART: dict[Any, Callable] = {
    operator._opoverload: operator._init_fn for operator in OPERATORS["query_first"]
}
