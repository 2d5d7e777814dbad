"""The general lambda layer against the paper's definition, one pair of positions at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lambda_det.errors import ConfigError
from lambda_paper.general import GeneralLambdaLayer
from tests.layers import reference


def make(dim=8, **options):
    layer = GeneralLambdaLayer(dim, **{"query_depth": 3, "heads": 2, "scope": 5, **options})
    layer.double()
    # Running statistics that aren't 0 and 1, so that evaluation uses them.
    for module in layer.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    if options.get("position_bias"):
        nn.init.normal_(layer.position.bias)
    return layer


def assert_same(layer, x, mask=None, seen=None, **others):
    """Compare output and gradients; ``seen`` is the mask as the definition takes it."""
    parameters = [x, *layer.parameters(), *others.values()]
    output = layer(x, mask, **others)
    expected = reference.layer_output(layer, x, seen, **others)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    grad = torch.randn_like(expected)
    got = torch.autograd.grad(output, parameters, grad, allow_unused=True)
    want = torch.autograd.grad(expected, parameters, grad, allow_unused=True)
    for a, b in zip(got, want, strict=True):
        if b is None:
            assert a is None or not a.any()
        else:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


# Options, size of the input, and size of a context that is not the input
GRIDS = {
    "a map": ({}, (3, 4), None),
    "a map, multi-head": ({"multi_head": True, "query_softmax": True}, (3, 4), None),
    "stride": ({"stride": 2}, (5, 6), None),
    "stride and dilation": ({"stride": 2, "dilation": 3, "scope": 3}, (7, 6), None),
    "stride above the scope": ({"stride": 3, "scope": 3}, (7, 8), None),
    "stride, global": ({"stride": 2, "scope": None, "map_size": (5, 7)}, (5, 6), None),
    "stride, multi-head": ({"stride": 2, "multi_head": True, "intra_depth": 2}, (4, 3), None),
    "stride of a sequence": ({"stride": 2, "sequence": True}, (9,), None),
    "larger context": ({}, (3, 4), (8, 5)),
    "smaller context": ({"dilation": 2}, (5, 4), (2, 6)),
    "context of another size, stride": ({"stride": 2}, (5, 4), (8, 3)),
    "context, global": ({"scope": None, "map_size": (6, 6)}, (3, 4), (6, 5)),
    "context, content only": ({"scope": None}, (3, 4), (2, 5)),
    "context of a sequence": ({"sequence": True}, (4,), (7,)),
    "volume": ({"scope": (3, 3, 5)}, (3, 2, 4), None),
    "volume, deep scope, stride": ({"scope": (5, 3, 1), "stride": 2}, (3, 4, 3), None),
    "volume, dilation": ({"scope": (3, 1, 3), "dilation": 2, "intra_depth": 2}, (4, 2, 4), None),
    "volume, global": ({"scope": None, "map_size": (2, 3, 3)}, (2, 3, 2), None),
    "volume, multi-head, bias": (
        {"scope": (3, 3, 3), "multi_head": True, "position_bias": True},
        (2, 3, 2),
        None,
    ),
    "volume, content only": ({"scope": None}, (2, 3, 2), None),
    "volume, context": ({"scope": (3, 3, 3)}, (2, 2, 3), (3, 1, 4)),
}
MASKS = ("none", "padding", "per query")


def masks(name, places, queries):
    """A mask of the layer, and which positions each query sees then; one query sees nothing."""
    if name == "none":
        return None, None
    if name == "padding":
        mask = torch.rand(2, 1, *places) < 0.7
        return mask, mask.flatten(1)[:, None].expand(-1, queries, -1)
    mask = torch.rand(queries, torch.Size(places).numel()) < 0.7
    mask[queries // 2] = False
    return mask, mask.expand(2, -1, -1)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", GRIDS)
def test_equals_definition(name, mask):
    """With padding (one context for all queries), and a context per query (Figure 6), too."""
    options, size, places = GRIDS[name]
    layer = make(**options).train(mask == "none")
    x = torch.randn(2, 8, *size, dtype=torch.float64, requires_grad=True)
    others = {}
    if places:
        others["context"] = torch.randn(2, 8, *places, dtype=torch.float64, requires_grad=True)
    queries = torch.Size(-(-side // layer.stride) for side in size).numel()
    assert_same(layer, x, *masks(mask, places or size, queries), **others)


@pytest.mark.parametrize("implementation", ["compiled", "query_first", "depthwise", "dense"])
@pytest.mark.parametrize("name", ["stride", "smaller context", "volume, deep scope, stride"])
def test_implementations_compute_other_grids(name, implementation):
    options, size, places = GRIDS[name]
    layer = make(**options, implementation=implementation)
    x = torch.randn(2, 8, *size, dtype=torch.float64, requires_grad=True)
    context = torch.randn(2, 8, *(places or size), dtype=torch.float64, requires_grad=True)
    assert_same(layer, x, context=context)


@pytest.mark.parametrize(
    ("mask", "per_example", "options"),
    list(
        itertools.product(
            MASKS, [False, True], [{}, {"intra_depth": 2, "multi_head": True}, {"stride": 2}]
        )
    ),
)
def test_relations_given_with_a_call(options, per_example, mask):
    layer = make(scope=None, **options).eval()
    x, context = (torch.randn(2, 8, n, dtype=torch.float64, requires_grad=True) for n in (5, 4))
    n, m = -(-5 // layer.stride), 4
    shape = (n, m, 3, layer.intra_depth)
    batch = [2] if per_example else []
    embeddings = torch.randn(*batch, *shape, dtype=torch.float64, requires_grad=True)
    assert_same(layer, x, *masks(mask, (m,), n), context=context, embeddings=embeddings)


def test_sequence_is_a_map_of_one_row():
    layer = make(sequence=True)
    assert layer.position.embedding.shape == (3, 1, 1, 5)
    x = torch.randn(2, 8, 9, dtype=torch.float64)
    as_map = reference.layer_output(layer.eval(), x[:, :, None])[:, :, 0]
    torch.testing.assert_close(layer(x), as_map)
    causal = torch.ones(9, 9).tril().bool()
    changed = x.clone()
    changed[:, :, 6:] = torch.randn(2, 8, 3)
    torch.testing.assert_close(layer(x, causal)[:, :, :6], layer(changed, causal)[:, :, :6])
    valid = torch.arange(9)[None, None] < torch.tensor([6, 9])[:, None, None]
    torch.testing.assert_close(layer(changed, valid)[0, :, :6], layer(x[:, :, :6])[0])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_strided_layer_keeps_the_layout_of_its_input(memory_format):
    layer = make(stride=2).float()
    x = torch.randn(2, 8, 5, 6).to(memory_format=memory_format).requires_grad_()
    y = layer(x)
    assert y.is_contiguous(memory_format=memory_format)
    grad = torch.autograd.grad(y, x, torch.randn_like(y))[0]
    assert grad.is_contiguous(memory_format=memory_format)


X = (2, 8, 4, 6)
REFUSALS = [  # options of the layer, shapes of the arguments of its call, and what is named
    ({"scope": (3, 3, 3, 3)}, {}, "2 or 3 sides.*3x3x3x3"),
    ({"stride": 0}, {}, "stride.*0"),
    ({}, {"x": (1, 8, 4, 4, 4)}, r"\[1, 8, 4, 4, 4\].*scope"),
    ({"scope": (3, 3, 3)}, {"x": (1, 8, 4, 4)}, r"\[1, 8, 4, 4\].*scope"),
    ({"scope": None}, {"x": (1, 8)}, r"\[1, 8\]"),
    ({}, {"x": X, "context": (3, 8, 4, 4)}, r"context.*\[3, 8, 4, 4\]"),
    ({}, {"x": X, "context": (2, 8, 4)}, r"context.*\[2, 8, 4\]"),
    ({}, {"x": (1, 8, 4), "embeddings": (4, 4, 3, 1)}, "scope=None"),
    ({"scope": None}, {"x": (1, 8, 4), "embeddings": (4, 5, 3, 1)}, r"\[4, 4, 3, 1\]"),
    ({}, {"x": X, "mask": (2, 1, 6, 4)}, r"mask.*\[2, 1, 6, 4\]"),  # transposed
    ({}, {"x": (2, 8, 6), "mask": (2, 1, 5)}, r"mask.*\[2, 1, 5\]"),
    ({"stride": 2}, {"x": X, "mask": (24, 24)}, r"mask.*\[24, 24\].*\[6, 24\]"),
]


@pytest.mark.parametrize(("options", "shapes", "named"), REFUSALS)
def test_what_cannot_work_is_named(options, shapes, named):
    arguments = {name: torch.ones(shape) for name, shape in shapes.items()}
    if "mask" in arguments:
        arguments["mask"] = arguments["mask"].bool()
    with pytest.raises(ConfigError, match=named):
        GeneralLambdaLayer(8, **{"heads": 2, "query_depth": 3, "scope": 5, **options})(**arguments)
