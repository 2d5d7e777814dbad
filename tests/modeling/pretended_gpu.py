"""What a computation would do on a GPU, found on tensors without data, on any machine.

PyTorch's fake tensors have shapes, dtypes and devices, and no memory. :func:`pretend_gpu` is a
place where they can be on "cuda", autocast included, and a :class:`Trace` notes the operators that
are called on them, and the copies that the host waits for. Autograd's engine needs a real GPU for
tensors on "cuda", so :func:`backward` walks the graph itself, in the engine's order.

``lambda_det::query_first`` is taken apart into what it calls.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lambda_det.errors import UserError
from lambda_det.layers.local import query_first, verdict

__all__ = ["Trace", "backward", "is_available", "pretend_gpu"]

# Operators that neither compute nor copy, beside views
_FREE = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
)


@functools.cache
def is_available() -> bool:
    """Whether this PyTorch's autograd shows its graph, and fake tensors can be on "cuda" here.

    PyTorch 2.4 lacks the first; without a GPU, 2.8 asks the driver where it need not.
    """
    try:
        with FakeTensorMode():
            torch.zeros(1).to("cuda")
    except RuntimeError:
        return False
    return hasattr(Node, "_input_metadata")


@contextmanager
def pretend_gpu() -> Iterator[None]:
    """A place where tensors without data can be on "cuda", whether there is a GPU or not.

    An operator that reads a value (``item``) or whose result has a size that depends on values
    raises an error here: on a GPU the host would have to wait for it.

    Raises:
        UserError: this PyTorch cannot, see :func:`is_available`.
    """
    if not is_available():
        raise UserError(
            f"What a GPU would do cannot be counted with PyTorch {torch.__version__} on this "
            "machine; PyTorch 2.15 can"
        )
    amp = torch.cuda.amp.common
    with (
        FakeTensorMode(),
        # Without a GPU autocast would switch itself off
        mock.patch.object(amp, "amp_definitely_not_available", return_value=False),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        # The same counts on every machine
        mock.patch.object(verdict, "allows", return_value=False),
    ):
        yield


class Trace:
    """Notes what is called while it is entered.

    Attributes:
        operators: calls by operator, without views. Each is at least one kernel on a GPU.
        waits: of them, those that copy between the host and the device.
    """

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self._mode = _Mode(self)

    @property
    def launches(self) -> int:
        """The least number of kernels that a GPU runs."""
        return self.operators.total()

    def __enter__(self) -> Trace:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)

    def backward(self, outputs: list[Tensor]) -> set[Tensor]:
        """The backward pass of ``outputs``; returns the leaves of the graph, such as parameters."""
        leaves: set[Tensor] = set()
        backward(outputs, lambda leaf, gradient: leaves.add(leaf))
        return leaves

    def called(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Note an operator."""
        if func.namespace == "prim" or func._opname in _FREE or _is_view(func):
            return
        name = f"{func.namespace}::{func._opname}"
        self.operators[name] += 1
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        if len({x.device.type for x in tensors}) > 1:
            # A number on the host, as 0-dim tensor, is passed to a kernel without a copy
            large = {x.device.type for x in tensors if x.dim() > 0}
            if len(large) > 1 or func._opname in ("_to_copy", "copy_"):
                self.waits[name] += 1


class _Mode(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

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
        self._trace.called(func, args, kwargs, result)
        return result


_TAKEN_APART: dict[Any, Callable] = {
    operator._opoverload: operator._init_fn
    for operator in (query_first.query_first_output, query_first.query_first_gradients)
}


def _is_view(func: Any) -> bool:
    """Whether an operator's results are, by its schema, views of its arguments."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def backward(outputs: list[Tensor], on_gradient: Callable[[Tensor, Tensor], None]) -> None:
    """Walk the graph behind ``outputs`` as autograd's engine does, without needing a device.

    Args:
        outputs: their gradients are ones. The list is emptied.
        on_gradient: called with each leaf of the graph, such as a parameter, and its gradient.

    Raises:
        RuntimeError: a gradient is on another device than the tensor it belongs to, or does not fit
            it.
    """
    roots = {output.grad_fn for output in outputs} - {None}
    waiting = _edges_into(roots)
    ready = {node for node in roots if waiting[node] == 0}
    gradients: dict[Node, dict[int, Tensor]] = {}
    while outputs:
        output = outputs.pop()
        if output.grad_fn is not None:
            _add(gradients, output.grad_fn, output.output_nr, torch.ones_like(output))
        del output
    # So that a checkpointed block is computed again once, and not for each tensor it had kept
    group = getattr(checkpoint, "GraphExecGroup", nullcontext)
    with torch.no_grad(), group():
        while ready:
            node = max(ready, key=lambda node: node._sequence_nr())
            ready.remove(node)
            incoming = gradients.pop(node, {})
            if node.name() == "torch::autograd::AccumulateGrad":
                on_gradient(node.variable, incoming.pop(0))
                continue
            outgoing = _call(node, incoming)
            incoming.clear()
            for (target, index), gradient in zip(node.next_functions, outgoing, strict=False):
                if target is None:
                    continue
                if gradient is not None:
                    _add(gradients, target, index, gradient)
                waiting[target] -= 1
                if waiting[target] == 0:
                    ready.add(target)
            del outgoing, gradient


def _edges_into(roots: set[Node]) -> Counter[Node]:
    """For each node of a graph, how many edges lead to it from the nodes behind ``roots``."""
    edges: Counter[Node] = Counter()
    found, left = set(roots), list(roots)
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None:
                edges[node] += 1
                if node not in found:
                    found.add(node)
                    left.append(node)
    return edges


def _add(
    gradients: dict[Node, dict[int, Tensor]], node: Node, index: int, gradient: Tensor
) -> None:
    """Add to what has come so far for an input of a node, with the checks of the engine."""
    expected = node._input_metadata[index]
    if gradient.device != expected.device:
        raise RuntimeError(
            f"{node.name()} gets a gradient on {gradient.device} for a tensor on {expected.device}"
        )
    sums = gradients.setdefault(node, {})
    gradient = gradient.sum_to_size(expected.shape).to(expected.dtype)
    sums[index] = gradient if index not in sums else sums[index] + gradient


def _call(node: Node, incoming: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    metadata = node._input_metadata
    arguments = [incoming.get(index) for index in range(len(metadata))]
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        # A Function in Python gets zeros where there is no gradient
        arguments = [
            torch.zeros(data.shape, dtype=data.dtype, device=data.device) if x is None else x
            for x, data in zip(arguments, metadata, strict=True)
        ]
        result = _as_tuple(node.apply(*arguments))
        # It returns something for every argument, and has an edge for every tensor among them
        needed = iter(
            [x for x, is_needed in zip(result, node.needs_input_grad, strict=False) if is_needed]
        )
        return tuple(None if target is None else next(needed) for target, _ in node.next_functions)
    return _as_tuple(node(*arguments))


def _as_tuple(result: Any) -> tuple[Tensor | None, ...]:
    return result if isinstance(result, tuple) else (result,)
