"""Both lambdas as one function, which GPUs use: numbers against float64, and few launches."""

import pytest
import torch
from torch import nn

from lambda_det.errors import ConfigError
from lambda_det.layers import LambdaLayer, joined
from lambda_det.layers.lambda_layer import ContentLambda
from lambda_det.layers.local import OPERATORS, fused
from tests.modeling.pretended_gpu import is_available, pretend_gpu
from tests.native import emulated

from . import reference
from .launches import as_on_a_gpu, of_a_step

PARTS = ("output", "queries", "keys", "values", "embedding")


def _inputs(batch=2, height=5, width=6, heads=2, k=3, v=4, scope=3):
    """As a projection that is channels last has them: parts of one tensor."""
    rows = [heads * k, k, v]
    queries, keys, values = torch.randn(batch, height, width, sum(rows)).split(rows, -1)
    embedding = torch.randn(k, 1, scope, scope)
    return [queries.unflatten(-1, (heads, k)), keys[..., None], values[..., None], embedding]


def _results(function, inputs, dtype):
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    y = function(*inputs)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y)
    return dict(zip(PARTS, (y, *torch.autograd.grad(y, inputs, grad)), strict=True))


def _definition(queries, keys, values, embedding):
    positions = torch.Size(queries.shape[1:3]).numel()
    everything = torch.ones(len(queries), positions, positions, dtype=torch.bool)
    flat = (x.flatten(1, 2) for x in (queries, keys, values))
    content = reference.content_output(*flat, everything).unflatten(1, queries.shape[1:3])
    return content + reference.local_position_output(queries, values, embedding)


def _as_two_modules(queries, keys, values, embedding):
    """The content output as autograd differentiates it, with the exact position output."""
    y = ContentLambda()(queries, keys, values)
    return y + OPERATORS["query_first"][0](queries, values, embedding)


def _joined(*inputs):
    return joined.joined_output(*inputs, "query_first")


def _errors(got, want):
    return {
        part: ((got[part].double() - want[part]).norm() / want[part].norm()).item()
        for part in PARTS
    }


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("size", [(5, 6), (1, 4), (1, 1)])
def test_equals_definition(size, heads):
    inputs = _inputs(height=size[0], width=size[1], heads=heads)
    got = _results(_joined, inputs, torch.float64)
    want = _results(_definition, inputs, torch.float64)
    for part in PARTS:
        torch.testing.assert_close(got[part], want[part], rtol=1e-9, atol=1e-11, msg=part)
    assert all(got[part].is_contiguous() for part in PARTS if part != "keys")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("apart", [0.01, 5])
@pytest.mark.parametrize("offset", [0, 30])
def test_sixteen_bits_are_enough(dtype, apart, offset):
    """For weights that are almost equal, or those of few positions; also for values far from 0."""
    queries, keys, values, embedding = _inputs(1, 40, 50, k=16, v=16)
    inputs = [queries, keys * apart, values + offset, embedding * 0]
    exact = [x.to(dtype).double() for x in inputs]
    want = _results(_as_two_modules, exact, torch.float64)
    errors = _errors(_results(_joined, inputs, dtype), want)
    del errors["embedding"]  # the implementation's own
    assert max(errors.values()) < 2 * torch.finfo(dtype).eps, errors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["query_first", "fused"])
def test_equals_float64_on_a_gpu(name, dtype):
    """With a content lambda as large as those of the positions."""
    queries, keys, values, embedding = _inputs(2, 33, 61, heads=4, k=16, v=64, scope=23)
    inputs = [queries, keys * 5, values, embedding / 16]
    exact = [x.to("cuda", dtype).double() for x in inputs]
    want = _results(_as_two_modules, exact, torch.float64)
    got = _results(lambda *x: joined.joined_output(*x, name), exact, dtype)
    errors = _errors(got, want)
    assert max(errors.values()) < 2 * torch.finfo(dtype).eps, errors


@pytest.mark.slow
@emulated.needs_emulator
def test_equals_float64_by_the_kernels(monkeypatch, tmp_path):
    """In the emulator, with an embedding in float32, as a parameter is."""
    queries, keys, values, embedding = _inputs(1, 9, 10, heads=4, k=16, v=64, scope=17)
    inputs = [x.bfloat16() for x in (queries, keys * 5, values)]
    want = _results(_as_two_modules, [x.double() for x in (*inputs, embedding / 16)], torch.float64)
    inputs = [x.requires_grad_() for x in (*inputs, embedding / 16)]
    with emulated.pretend(monkeypatch, tmp_path):
        monkeypatch.setattr(fused, "_wrong", lambda *about: None)
        y = joined.joined_output(*inputs, "fused")
        grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y)
        found = dict(zip(PARTS, (y, *torch.autograd.grad(y, inputs, grad)), strict=True))
    assert found["embedding"].dtype == torch.float32
    errors = _errors(found, want)
    assert max(errors.values()) < 2 * torch.finfo(torch.bfloat16).eps, errors


def test_extreme_keys():
    inputs = _inputs()
    inputs[1][:, 0, :2] = 300  # at two positions, so that gradients aren't all 0
    inputs[1][:, 1, 1] = -300
    want = _results(_as_two_modules, inputs, torch.float64)
    got = _results(_joined, inputs, torch.float32)
    assert all(x.isfinite().all() for x in got.values())
    assert max(_errors(got, want).values()) < 1e-5


def test_layer_gives_the_same_by_both_ways():
    options = {"query_depth": 4, "scope": 5, "implementation": "query_first"}
    layers = [LambdaLayer(16, **options).double() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 16, 6, 7).double().to(memory_format=torch.channels_last)
    inputs = [x.clone().requires_grad_() for _ in layers]
    outputs = [layers[0](inputs[0])]
    with as_on_a_gpu():
        outputs.append(layers[1](inputs[1]))
    torch.testing.assert_close(*outputs)
    for y in outputs:
        y.square().sum().backward()
    torch.testing.assert_close(*(one.grad for one in inputs))
    assert inputs[1].grad.is_contiguous(memory_format=torch.channels_last)
    for (name, a), (_, b) in zip(*(layer.named_parameters() for layer in layers), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    for a, b in zip(layers[0].buffers(), layers[1].buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_hooks_of_norms_are_called_on_a_gpu():
    layer, calls = LambdaLayer(16, query_depth=4, scope=5), []
    layer.value_norm.register_forward_hook(lambda *called: calls.append(called))
    with as_on_a_gpu():
        layer(torch.randn(2, 16, 6, 7))
    assert len(calls) == 1
    assert layer.query_norm.num_batches_tracked == layer.value_norm.num_batches_tracked == 1


OTHERS = {
    "keys": {"key_norm": "l2"},
    "multi-head": {"multi_head": True},
    "dilation": {"dilation": 2},
    "bias": {"position_bias": True},
    "no content": {"content": False},
    "no position": {"scope": None},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_layers_of_other_forms_stay_apart(options, monkeypatch):
    monkeypatch.setattr(joined, "joined_output", lambda *_: pytest.fail("it was joined"))
    with as_on_a_gpu():
        named = {"scope": 5, "implementation": "query_first"}
        LambdaLayer(16, query_depth=4, **{**named, **options})(torch.randn(1, 16, 6, 7))
        plain = LambdaLayer(16, query_depth=4, **named)
        plain(torch.randn(1, 16, 6, 7), torch.ones(1, 1, 6, 7, dtype=torch.bool))
        plain.content.register_forward_hook(lambda *_: None)
        plain(torch.randn(1, 16, 6, 7))


@pytest.mark.skipif(not is_available(), reason="not with this PyTorch")
def test_on_a_gpu_the_function_is_taken_where_it_can_compute(monkeypatch):
    calls = []
    join = joined.joined_output
    monkeypatch.setattr(
        joined, "joined_output", lambda *args: calls.append(args[-1]) or join(*args)
    )
    with pretend_gpu(), torch.device("cuda"), torch.autocast("cuda", torch.float16):
        x = torch.empty(2, 16, 6, 7).to(memory_format=torch.channels_last)
        for name in ("auto", "query_first", "conv"):
            LambdaLayer(16, query_depth=8, scope=5, implementation=name)(x)
        assert len(calls) == 2
        with pytest.raises(ConfigError, match="compiled"):
            LambdaLayer(16, query_depth=8, scope=5, implementation="compiled")(x)
    assert len(calls) == 2


LAUNCHES = {  # of a forward and of a backward pass, at most
    "training": ({}, True, (13, 17)),
    "norms that one process need not synchronise": ({"norm": nn.SyncBatchNorm}, True, (13, 17)),
    "evaluation": ({}, False, (12, 0)),  # two of them copies that a GPU does without
    "without norms": ({"norm": ""}, True, (8, 13)),
}


@pytest.mark.parametrize(("options", "training", "most"), LAUNCHES.values(), ids=LAUNCHES)
def test_layer_takes_few_launches(options, training, most, monkeypatch, tmp_path):
    layer = LambdaLayer(256, **options).train(training).requires_grad_(training)
    x = torch.randn(2, 256, 12, 13).to(memory_format=torch.channels_last)
    x = x.bfloat16().requires_grad_(training)  # as a network's maps are
    with emulated.pretend(monkeypatch, tmp_path, is_emulated=False) as machine, as_on_a_gpu():
        monkeypatch.setattr(fused, "_wrong", lambda *about: None)
        of_a_step(layer, x, machine)  # which loads the kernels
        layer.zero_grad()
        x.grad = None
        launches = of_a_step(layer, x, machine)
    assert any(name.startswith("lambda_output") for name in launches[0])
    assert all(n.total() <= limit for n, limit in zip(launches, most, strict=True)), launches


def test_a_second_derivative_is_refused_and_not_dropped():
    """Also of a sum, whose gradient needs none: PyTorch's own refusal lets that pass."""
    inputs = [x.double().requires_grad_() for x in _inputs()]
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(_joined(*inputs).sum(), inputs[0], create_graph=True)
