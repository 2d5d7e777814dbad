"""All implementations of the local position output against the definition, both directions."""

import functools
import sys
from functools import partial

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.overrides import TorchFunctionMode

from lambda_det.errors import ConfigError
from lambda_det.layers.local import (
    IMPLEMENTATIONS,
    choose,
    compiled,
    local_position_output,
)
from lambda_det.layers.local.query_first import TILE_HEIGHT, TILE_WIDTH
from tests.native.test_native import NO_KERNEL

from . import reference
from .reference import assert_close, errors, exactly, with_gradients

# (batch, map, heads, k, v, u, scope) and a dilation
SIZES = {
    "one image, odd map": ((1, (5, 7), 2, 3, 4, 1, (3, 3)), 2),
    "map smaller than the scope": ((2, (4, 3), 2, 3, 2, 1, (9, 7)), 3),
    "intra-depth": ((2, (6, 5), 2, 2, 3, 2, (5, 3)), 2),
    "one row": ((2, (1, 9), 1, 4, 2, 1, (1, 5)), 3),
    "one position": ((1, (1, 1), 2, 3, 2, 2, (5, 5)), 8),
    "several tiles": ((1, (TILE_HEIGHT + 2, TILE_WIDTH + 3), 1, 2, 2, 1, (5, 7)), 3),
}

# Without "fused", which needs a GPU (test_fused.py), and the kernel where there is none
NAMES = [
    name for name in IMPLEMENTATIONS if name != "fused" and not (name == "compiled" and NO_KERNEL)
]
OWN_BACKWARD = [name for name in NAMES if name in ("query_first", "compiled")]


def _inputs(size, dtype=torch.float64):
    batch, (height, width), heads, k, v, u, scope = size
    queries = torch.randn(batch, height, width, heads, k, dtype=dtype, requires_grad=True)
    values = torch.randn(batch, height, width, v, u, dtype=dtype, requires_grad=True)
    embedding = torch.randn(k, u, *scope, dtype=dtype, requires_grad=True)
    return queries, values, embedding


def results(inputs, name, grad=None, dilation=1):
    sum_ = partial(local_position_output, implementation=name, dilation=dilation)
    return with_gradients(sum_, inputs, grad)


@pytest.mark.parametrize("dilated", [False, True])
@pytest.mark.parametrize(("size", "dilation"), SIZES.values(), ids=SIZES)
def test_equals_definition_forward_and_backward(size, dilation, dilated):
    """The loops of the definition."""
    inputs, dilation = _inputs(size), dilation if dilated else 1
    want = with_gradients(partial(reference.local_position_output, dilation=dilation), inputs)
    for name in ("auto", *NAMES):
        got = results(inputs, name, dilation=dilation)
        assert_close(got, want, name, rtol=1e-12, atol=1e-12)


def test_query_first_in_small_chunks(monkeypatch):
    """One tile at least, however little memory is free."""
    module = sys.modules["lambda_det.layers.local.query_first"]
    monkeypatch.setattr(module, "TILE_HEIGHT", 2)
    monkeypatch.setattr(module, "TILE_WIDTH", 3)
    for limit in (1, 4000, 10**6):
        monkeypatch.setattr(module, "CHUNK_NUMEL", limit)
        inputs = _inputs((3, (7, 8), 2, 2, 2, 1, (5, 3)))
        *_, scores = module._prepare(*inputs)
        assert scores.matrix.numel() <= max(limit, scores.matrix[0].numel())
        assert_close(results(inputs, "query_first"), results(inputs, "dense"))


class _NeverTwice(TorchFunctionMode):
    """Fails where a tensor of which two numbers lie at one place of the memory is added to."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.add_:
            places = torch.zeros((), dtype=torch.int64)
            for length, stride in zip(args[0].shape, args[0].stride(), strict=True):
                places = places[..., None] + stride * torch.arange(length)
            assert places.unique().numel() == places.numel(), args[0].stride()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("scope", [(3, 3), (3, 7), (7, 3), (9, 11)], ids=str)
def test_query_first_adds_no_overlapping_windows_at_once(scope, monkeypatch):
    """Several threads would lose summands, and one thread would not show it."""
    module = sys.modules["lambda_det.layers.local.query_first"]
    monkeypatch.setattr(module, "TILE_HEIGHT", 3)
    monkeypatch.setattr(module, "TILE_WIDTH", 4)
    with torch.no_grad(), _NeverTwice():
        inputs = _inputs((2, (14, 15), 1, 2, 2, 1, scope))
        gradients, of_output = map(torch.zeros_like, inputs), torch.ones_like(inputs[0])
        module.fill_gradients(*gradients, of_output, *inputs)


@pytest.mark.parametrize("name", OWN_BACKWARD)
def test_errors_in_float32_are_at_most_twice_those_of_plain_pytorch(name):
    """Of "dense", on a map with many terms in each sum: a careless order of them shows here."""
    inputs = _inputs((1, (24, 24), 2, 16, 32, 1, (47, 47)), torch.float32)
    grad = torch.randn(1, 24, 24, 2, 32)
    want = results(exactly(inputs), "dense", grad)
    own, plain = (errors(results(inputs, used, grad), want) for used in (name, "dense"))
    assert all(own[kind] <= 2 * plain[kind] for kind in own), (own, plain)


@pytest.mark.parametrize("name", ["auto", *NAMES])
def test_derivatives_of_torch_func(name):
    """PyTorch's jvp takes the derivative of an operator for 0 and says nothing: those refuse."""
    inputs = [x.detach() for x in _inputs((2, (5, 6), 2, 3, 4, 1, (3, 3)))]
    sum_ = partial(local_position_output, implementation=name)
    if name in OWN_BACKWARD:
        with pytest.raises(ConfigError, match=r"torch\.func"):
            jvp(sum_, (*inputs,), (*inputs,))
        return
    # The sum is linear in each of its inputs
    value, tangent = jvp(sum_, (*inputs,), (*inputs,))
    torch.testing.assert_close(tangent, 3 * value)
    _, *want = with_gradients(sum_, [x.requires_grad_() for x in inputs], torch.ones_like(value))
    got = vmap(grad(lambda *x: sum_(*x).sum(), (0, 1, 2)))(*(x.detach()[None] for x in inputs))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a[0], b)


@pytest.mark.parametrize("name", OWN_BACKWARD)
def test_sums_in_float32(name):
    """Many tiles add to each gradient; in bfloat16 the sums themselves would lose digits."""
    inputs = _inputs((1, (40, 40), 2, 4, 8, 1, (23, 23)))
    inputs = [x.detach().bfloat16().requires_grad_() for x in inputs]
    grad = torch.randn(1, 40, 40, 2, 8).bfloat16()
    got, want = results(inputs, name, grad), results(exactly(inputs), "query_first", grad)
    # 0.0024 to 0.0029; 0.0037 and more with sums in bfloat16
    assert all(error < 0.0033 for error in list(errors(got, want).values())[1:])


@pytest.mark.parametrize("name", OWN_BACKWARD)
def test_only_the_inputs_are_kept(name):
    """Nothing of the size of the lambdas or of the scores is saved for the backward pass."""
    inputs = _inputs((1, (4, 8), 4, 8, 8, 1, (5, 5)), torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.numel()) or x, lambda x: x
    ):
        local_position_output(*inputs, name)
    assert sorted(saved) == sorted(x.numel() for x in inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_BACKWARD)
def test_compiles_without_graph_break(name):
    inputs = _inputs((1, (3, 11), 2, 8, 4, 1, (5, 5)), torch.float32)
    double = lambda q, v, e: local_position_output(q, v, e, name) * 2  # noqa: E731
    whole = torch.compile(double, backend="aot_eager", fullgraph=True)
    plain = with_gradients(lambda *x: local_position_output(*x, "dense") * 2, inputs)
    assert_close(with_gradients(whole, inputs), plain, rtol=1e-4, atol=1e-4)


# Height and width of a map and of the scope, and what is chosen without a kernel: the dense form up
# to 200 positions, and only if the scope reaches across both ways
CHOICES = {
    (4, 4, 7, 7): "dense",
    (10, 20, 10, 20): "dense",
    (3, 67, 5, 133): "query_first",
    (10, 20, 9, 39): "query_first",
    (10, 20, 19, 19): "query_first",
}


@pytest.mark.parametrize("sizes", CHOICES, ids=str)
def test_auto_follows_from_sizes_and_takes_the_kernel_where_there_is_one(sizes, monkeypatch):
    inputs = _inputs((1, sizes[:2], 1, 2, 2, 1, sizes[2:]))
    monkeypatch.setattr(compiled, "missing", lambda: None)
    assert choose(*inputs) == "compiled"
    monkeypatch.setattr(compiled, "missing", lambda: "there is none")
    assert choose(*inputs) == CHOICES[sizes]
    # which is what computes it
    monkeypatch.setitem(IMPLEMENTATIONS, CHOICES[sizes], lambda *inputs: "chosen")
    assert local_position_output(*inputs) == "chosen"


@pytest.mark.parametrize("name", NAMES)
def test_autocast_leaves_the_dtype_of_the_queries(name):
    """The projections have decided it; products in 16 bits again would lose digits."""
    inputs = _inputs((1, (6, 7), 2, 4, 3, 1, (3, 5)), torch.float32)
    expected = local_position_output(*inputs, name)
    with torch.autocast("cpu", torch.bfloat16):
        output = local_position_output(*inputs, name)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("name", NAMES)
def test_nan_is_not_hidden(name):
    inputs = [x.detach() for x in _inputs(SIZES["intra-depth"][0])]
    inputs[1][0, 4, 3] = torch.nan
    assert local_position_output(*inputs, name).isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch(name):
    inputs = _inputs((0, (4, 5), 2, 3, 3, 1, (3, 3)))
    output = local_position_output(*inputs, name)
    assert output.shape == (0, 4, 5, 2, 3)
    assert all((g == 0).all() for g in torch.autograd.grad(output.sum(), inputs))


def test_a_chunk_is_a_share_of_the_free_memory(monkeypatch):
    """Of a GPU that is not here: what others and this process left, when it is first asked."""
    module = sys.modules["lambda_det.layers.local.query_first"]
    memory = {"mem_get_info": (5 * 2**30, 24 * 2**30), "memory_reserved": 5 * 2**30}
    memory |= {"memory_allocated": 2**30, "is_available": True}
    for name, value in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda *gpu, value=value: value)
    monkeypatch.setattr(module, "_chunk_bytes", functools.cache(module._chunk_bytes.__wrapped__))
    gpu = torch.device("cuda", 0)
    assert module.chunk_numel(gpu, torch.bfloat16) == 2**28 // 2  # of 9 GiB a 32nd, a power of 2
    assert module.chunk_numel(gpu, torch.float32) == 2**28 // 4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (0, 0))
    assert module.chunk_numel(gpu, torch.bfloat16) == 2**28 // 2  # the same sums in all steps
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: 2**30)
    assert module.chunk_numel(torch.device("cuda", 1), torch.bfloat16) == 0
