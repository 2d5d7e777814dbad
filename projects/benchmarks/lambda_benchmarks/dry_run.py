"""What a computation would do on a GPU, found on tensors without data, on any machine.

PyTorch's fake tensors have shapes, dtypes and devices, and no memory. :func:`pretend_gpu` is a
place where they can be on "cuda", autocast included, and a :class:`Trace` notes what is called on
them: operators, operations, memory, and copies that the host waits for. Autograd's engine needs a
real GPU for tensors on "cuda", so :func:`backward` walks the graph itself, in the engine's order.

What PyTorch's operators do inside is not seen: workspaces of cuDNN, and operators that are several
kernels. ``lambda_det::query_first`` is taken apart into what it calls.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lambda_det.errors import UserError
from lambda_det.layers.local import query_first, verdict

__all__ = ["Part", "Trace", "backward", "is_available", "pretend_gpu"]

ELSEWHERE = ""  # the part of what no watched module does
_ROUNDED_TO = {"cuda": 512}  # bytes, by PyTorch's allocators
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


@dataclass
class Part:
    """What a part of a network takes.

    Attributes:
        forward, backward: floating-point operations, two for a multiply-add. What activation
            checkpointing computes again counts for the backward pass.
        kept: bytes that the forward pass keeps for the backward pass, without parameters.
    """

    forward: int = 0
    backward: int = 0
    kept: int = 0


@dataclass
class _Saved:
    """What autograd keeps of the forward pass."""

    tensor: Tensor | None
    part: str


class Trace:
    """Notes what is called while it is entered.

    Args:
        device: type of the device whose memory is counted.
        places: the name of the part that a module is.
        given: tensors that were there before, such as parameters; their memory is not counted.

    Attributes:
        operators: calls by operator, without views. Each is at least one kernel on a GPU.
        waits: of them, those that copy between the host and the device.
        parts: by name; ``ELSEWHERE`` for what is outside of all ``places``.
        peak: the most bytes that the tensors which were made here took at once.
    """

    def __init__(
        self,
        device: str = "cuda",
        places: Mapping[nn.Module, str] | None = None,
        given: Iterable[Tensor] = (),
    ) -> None:
        self.operators: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.parts = {name: Part() for name in (*(places or {}).values(), ELSEWHERE)}
        self.peak = 0
        self._device = device
        self._places = places or {}
        self._now = 0
        # By storage; those that were given never go
        self._alive: dict[int, Any] = {_key(tensor): None for tensor in given}
        self._kept: set[int] = set(self._alive)
        self._names = [ELSEWHERE]
        self._unpacked: list[_Saved] = []
        self._in_backward = False
        self._mode = _Mode(self)

    @property
    def launches(self) -> int:
        """The least number of kernels that a GPU runs."""
        return self.operators.total()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is called inside belongs to that part."""
        self.parts.setdefault(name, Part())
        self._names.append(name)
        try:
            yield
        finally:
            self._names.pop()

    def __enter__(self) -> Trace:
        self._stack = ExitStack()
        for module, name in self._places.items():
            enter = module.register_forward_pre_hook(lambda m, x, n=name: self._names.append(n))
            leave = module.register_forward_hook(lambda m, x, y: self._names.pop() and None)
            self._stack.callback(enter.remove)
            self._stack.callback(leave.remove)
        self._stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        self._stack.enter_context(self._mode)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def backward(self, outputs: list[Tensor]) -> set[Tensor]:
        """The backward pass of ``outputs``, whose gradients are tensors of their size.

        Gradients of parameters are forgotten at once, as if they were added to what is there.

        Args:
            outputs: the list is emptied, so that they don't outlive their use.

        Returns:
            The leaves of the graph, such as parameters.
        """
        leaves: set[Tensor] = set()
        self._in_backward = True
        try:
            backward(outputs, lambda leaf, gradient: leaves.add(leaf), self._release)
        finally:
            self._in_backward = False
        return leaves

    def called(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Note an operator."""
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for tensor in tensors:
            self._allocate(tensor)
        if func.namespace == "prim" or func._opname in _FREE or _is_view(func):
            return
        name = f"{func.namespace}::{func._opname}"
        self.operators[name] += 1
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if len({x.device.type for x in (*given, *tensors)}) > 1:
            # A number on the host, as 0-dim tensor, is passed to a kernel without a copy
            large = {x.device.type for x in (*given, *tensors) if x.dim() > 0}
            if len(large) > 1 or func._opname in ("_to_copy", "copy_"):
                self.waits[name] += 1
        if func._overloadpacket in flop_registry:
            count = flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
            part = self.parts[self._names[-1]]
            if self._in_backward:
                part.backward += count
            else:
                part.forward += count

    def _allocate(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device:
            return
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._alive:
            return
        unit = _ROUNDED_TO.get(self._device, 1)
        size = -(-storage.nbytes() // unit) * unit

        def free(_: object) -> None:
            del self._alive[key]
            self._kept.discard(key)
            self._now -= size

        self._alive[key] = weakref.ref(storage, free)
        self._now += size
        self.peak = max(self.peak, self._now)

    def _pack(self, tensor: Tensor) -> _Saved:
        part = self._names[-1]
        key = _key(tensor)
        if key not in self._kept and tensor.device.type == self._device:
            self._kept.add(key)
            self.parts[part].kept += tensor.untyped_storage().nbytes()
        return _Saved(tensor, part)

    def _unpack(self, saved: _Saved) -> Tensor:
        self._unpacked.append(saved)
        self._names[0] = saved.part  # what the node does belongs to the part that kept this
        return saved.tensor

    def _release(self) -> None:
        """After a node of the graph, which the engine lets go of what it kept."""
        for saved in self._unpacked:
            saved.tensor = None
        self._unpacked.clear()
        self._names[0] = ELSEWHERE


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


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_view(func: Any) -> bool:
    """Whether an operator's results are, by its schema, views of its arguments."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def backward(
    outputs: list[Tensor],
    on_gradient: Callable[[Tensor, Tensor], None],
    after_node: Callable[[], None] = lambda: None,
) -> None:
    """Walk the graph behind ``outputs`` as autograd's engine does, without needing a device.

    Args:
        outputs: their gradients are ones. The list is emptied.
        on_gradient: called with each leaf of the graph, such as a parameter, and its gradient.
        after_node: called after each node.

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
            after_node()
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
