"""How many kernels a GPU would launch for what a CPU computes.

Operators are counted below autograd, where they are those of a GPU: views and empty tensors launch
nothing, and each other operator one kernel, except those of ``KERNELS``. Where cuDNN or cuBLAS need
a layout of their own, a GPU launches more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from lambda_det.layers import joined
from tests.modeling import pretended_gpu

# Kernels of an operator that has several. A norm in training collects statistics, applies them, and
# moves the running ones; its backward pass sums and applies.
KERNELS = {
    "aten::_native_batch_norm_legit": 3,
    "aten::_native_batch_norm_legit_no_training": 2,  # the first of them for the inverse deviation
    "aten::native_batch_norm_backward": 2,
    "aten::convolution_backward": 2,  # of input and weight
    "lambda_det::query_first_backward": 4,  # as a kernel has them: dq, dV, dE, and the sum of dE
}


def count(operators: Counter[str]) -> int:
    """The kernels of operators by name."""
    return sum(KERNELS.get(name, 1) * calls for name, calls in operators.items())


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Lambda layers on the CPU compute as on a GPU, with the position output as one operator."""
    with (
        mock.patch.object(joined, "implementation_of", lambda *_: "query_first"),
        mock.patch.dict(pretended_gpu._TAKEN_APART, clear=True),
    ):
        yield


def of_a_step(layer: torch.nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """The launches of a forward and of a backward pass under autocast in bfloat16."""
    with pretended_gpu.Trace() as forward, torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    if not y.requires_grad:
        return count(forward.operators), 0
    with pretended_gpu.Trace() as backward:
        y.backward(torch.ones_like(y))
    return count(forward.operators), count(backward.operators)
