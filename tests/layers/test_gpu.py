"""``pytest -m gpu``: what can compute the position output on a GPU, held against float64 there.

The maps are those of the paper's networks and awkward ones, in each dtype and layout. Without a GPU
the same checks run on one small map, and have to see kernels that are wrong on purpose; the kernels
of the GPU run in an emulator (test_fused.py).
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lambda_det.layers.local import IMPLEMENTATIONS, fused, unsupported

from .reference import RESULTS, errors, exactly, with_gradients

PLAIN = "depthwise"  # plain PyTorch, in float64 the reference
# The most that the norm of an error may be of the result's. In 16 bits, where scores are rounded,
# and results, each by a fifth of eps on average: half of eps. In float32, where long sums in any
# order come to some eps: a hundredth of what products of shorter numbers (TF32) would cost.
LIMITS = {
    torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2,
    torch.float16: torch.finfo(torch.float16).eps / 2,
    torch.float32: 32 * torch.finfo(torch.float32).eps,
}
REPEATS = 3  # of which every bit must be the same
LARGE = 2**31 + 2**20  # numbers of a tensor, more than 32 bits can count
NAMES = ("query_first", "fused")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("channels last", "a map per channel")


class Case(NamedTuple):
    """Images, height and width of their map, heads, query and value depth, and the scope."""

    images: int
    height: int
    width: int
    heads: int = 4
    k: int = 16
    v: int = 64
    scope: int = 23

    def inputs(self, dtype: torch.dtype, layout: str, device: str) -> list[Tensor]:
        """Queries, values and embedding as the layer lays them out, with gradients."""
        options = {"device": device, "dtype": dtype}
        parts = []
        for channels in ((self.heads, self.k), (self.v, 1)):
            maps = torch.randn(self.images, *channels, self.height, self.width, **options)
            part = maps.permute(0, 3, 4, 1, 2)
            parts.append(part.contiguous() if layout == "channels last" else part)
        scope = [min(self.scope, 2 * side - 1) for side in (self.height, self.width)]
        parts.append(torch.randn(self.k, 1, *scope, **options))
        return [x.requires_grad_() for x in parts]

    def grad(self, like: Tensor) -> Tensor:
        """A gradient of the output; small, so that no sum leaves the range of float16."""
        shape = (self.images, self.height, self.width, self.heads, self.v)
        return torch.randn(shape, device=like.device, dtype=like.dtype) * 2**-6


CASES = {
    # Layers of detectors at 1024 pixels, and of classifiers
    "c4 at 1024": Case(2, 64, 64),
    "c5 at 1024": Case(4, 32, 32, v=128),
    "c4 at 224": Case(128, 14, 14),
    "c5 at 224": Case(64, 7, 7, v=128),
    # Odd sides, other depths, heads and scopes. On a tiny map there are many images, so that no
    # norm is small by chance.
    "odd sides": Case(1, 33, 61),
    "one head, deep queries": Case(2, 17, 40, heads=1, k=32, v=256, scope=7),
    "a scope beyond the map": Case(2, 13, 21, heads=2, k=8, v=24, scope=41),
    "one row": Case(32, 1, 3),
    "one position": Case(64, 1, 1),
    "three heads, smaller depths": Case(2, 19, 35, heads=3, k=8, v=80, scope=9),
    "three slices of values": Case(1, 23, 18, v=192),
}
SMALL = Case(2, 4, 5, heads=2, k=8, v=4, scope=3)


def skip_unless_taken(name: str, inputs: list[Tensor]) -> None:
    """Skip what the kernels do not take by design; that they cannot run here is a failure."""
    if why := unsupported(name, *inputs):
        *_, k = inputs[0].shape
        is_taken = inputs[0].dtype in fused.DTYPES and k <= fused.QUERY_DEPTH
        is_taken = is_taken and max(inputs[2].shape[2:]) <= fused.SCOPE and inputs[0].is_cuda
        assert not is_taken, why
        pytest.skip(why)


def check(name: str, case: Case, dtype: torch.dtype, layout: str, device: str) -> None:
    """Compare output and gradients with float64, and with themselves when they are repeated."""
    inputs = case.inputs(dtype, layout, device)
    skip_unless_taken(name, inputs)
    grad = case.grad(inputs[0])
    runs = []
    for _ in range(REPEATS):
        for tensor in (*inputs, grad):  # NaN in the memory that results get, so that a gap is seen
            torch.full_like(tensor, torch.nan)
        runs.append(with_gradients(IMPLEMENTATIONS[name], inputs, grad))
    exact = with_gradients(IMPLEMENTATIONS[PLAIN], exactly(inputs), grad.double())
    own = errors(runs[0], exact)
    assert all(x.dtype == dtype for x in runs[0])
    assert all(own[part] <= LIMITS[dtype] for part in RESULTS), f"{own} above {LIMITS[dtype]}"
    for again in runs[1:]:
        for part, a, b in zip(RESULTS, runs[0], again, strict=True):
            assert torch.equal(a, b), f"the {part} differs when it is repeated"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_equals_float64_on_a_gpu(case, name, dtype, layout, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    check(name, CASES[case], dtype, layout, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_checks_without_a_gpu(name, layout):
    check(name, SMALL, torch.float32, layout, "cpu")


def one_offset_left_out(queries, values, embedding):
    embedding = embedding.clone()
    embedding[..., -1, -1] = 0
    return IMPLEMENTATIONS[PLAIN](queries, values, embedding)


def wrong_gradient(queries, values, embedding):
    values = values + 1e-3 * (values - values.detach())
    return IMPLEMENTATIONS[PLAIN](queries, values, embedding)


_calls = itertools.count()


def never_the_same(*inputs):
    return IMPLEMENTATIONS[PLAIN](*inputs) * (1 + 1.2e-7 * (next(_calls) % 2))


@pytest.mark.parametrize(
    "fault",
    [one_offset_left_out, wrong_gradient, never_the_same],
    ids=lambda fault: fault.__name__,
)
def test_the_checks_see_a_fault(fault, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "query_first", fault)
    with pytest.raises(AssertionError, match="repeated" if fault is never_the_same else "above"):
        check("query_first", SMALL, torch.float32, LAYOUTS[0], "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_more_numbers_than_32_bits_count(name, dtype):
    """The last image of a batch, where the memory allows."""
    case = Case(LARGE // (64 * 64 * 4 * 16) + 2, 64, 64, v=16, scope=3)
    # Queries, output and their gradients; values, padded and as gradients in float32; some chunks.
    # The kernels fill values of 16 up to 64, and so the output and its gradient
    wanted = (12 if name == "fused" else 7) * LARGE * dtype.itemsize
    if torch.cuda.mem_get_info()[0] < wanted:
        pytest.skip(f"it takes {wanted / 2**30:.0f} GiB of memory")
    inputs = case.inputs(dtype, LAYOUTS[0], "cuda")
    skip_unless_taken(name, inputs)
    grad = case.grad(inputs[0])
    grad[:-1] = 0  # so that the embedding's gradient is that of the last image
    output, of_queries, of_values, of_embedding = with_gradients(
        IMPLEMENTATIONS[name], inputs, grad
    )
    last = [*(x.detach()[-1:] for x in inputs[:2]), inputs[2]]
    exact = with_gradients(IMPLEMENTATIONS[PLAIN], exactly(last), grad[-1:].double())
    found = errors([output[-1:], of_queries[-1:], of_values[-1:], of_embedding], exact)
    assert max(found.values()) <= 4 * torch.finfo(dtype).eps, found
