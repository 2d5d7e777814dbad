"""How many kernels a GPU would launch for what a CPU computes.

Operators are counted below autograd, where they are those of a GPU: views and empty tensors launch
nothing, and each other operator one kernel, except those of ``KERNELS``. Kernels of our own are
those that the driver was asked to launch. Where cuDNN or cuBLAS need a layout of their own, a GPU
launches more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from lambda_det.native import calls
from tests.modeling.pretended_gpu import Trace
from tests.native.emulated import Pretended

# Kernels of an operator that has several. A norm in training collects statistics, moves the running
# ones, and applies them; its backward pass sums and applies.
KERNELS = {
    "aten::_native_batch_norm_legit": 3,
    "aten::_native_batch_norm_legit_no_training": 2,  # the first of them for the inverse deviation
    "aten::native_batch_norm_backward": 2,
    "aten::convolution_backward": 2,  # of input and weight
}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Lambda layers compute on the CPU as they do on a GPU."""
    with mock.patch.object(calls, "is_eager_on_gpu", lambda x: True):
        yield


def of_a_step(
    layer: torch.nn.Module, x: torch.Tensor, machine: Pretended
) -> tuple[Counter[str], Counter[str]]:
    """The launches of a forward and of a backward pass under autocast in bfloat16, by name.

    Args:
        layer: has computed before, so that its kernels are loaded.
        x: its input.
        machine: notes launches and computes nothing.
    """
    with torch.autocast("cpu", torch.bfloat16), _Launches(machine) as forward:
        y = layer(x)
    if not y.requires_grad:
        return forward.found, Counter()
    grad = torch.ones_like(y)
    with _Launches(machine) as backward:
        y.backward(grad)
    return forward.found, backward.found


class _Launches:
    """Those of what is called while it is entered."""

    def __init__(self, machine: Pretended) -> None:
        self._machine, self._trace = machine, Trace()
        self.found: Counter[str] = Counter()

    def __enter__(self) -> _Launches:
        self._machine.launches.clear()
        self._trace.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._trace.__exit__(*error)
        for name, called in self._trace.operators.items():
            self.found[name] = KERNELS.get(name, 1) * called
        self.found.update(launch.name for launch in self._machine.launches)
