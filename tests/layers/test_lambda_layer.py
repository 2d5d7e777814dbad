"""Every variant of the layer against the paper's definition; initialisation; properties."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lambda_det
from lambda_det.config import LAMBDA_LAYER_KEYS
from lambda_det.errors import ConfigError
from lambda_det.layers import LambdaLayer, RelativePosition
from lambda_det.layers.lambda_layer import KEY_NORMS, ContentLambda
from tests.export.toy import scramble

from . import reference
from .reference import with_gradients

VARIANTS = {
    "default": {},
    "content only": {"scope": None},
    "position only": {"content": False},
    "global": {"scope": None, "map_size": (6, 8)},
    "wide scope": {"scope": (3, 7)},
    "dilated": {"dilation": 2},
    "dilated beyond the map": {"dilation": 6, "scope": 3},
    "dilated, intra-depth, multi-head": {"dilation": 3, "intra_depth": 2, "multi_head": True},
    "intra-depth": {"intra_depth": 3},
    "one head": {"heads": 1},
    "multi-head": {"multi_head": True},
    "multi-head, intra-depth": {"multi_head": True, "intra_depth": 2},
    **{f"keys {name}": {"key_norm": name} for name in reference.KEY_NORMS},
    "softmax of queries": {"query_softmax": True},
    "no norm": {"norm": ""},
    "position bias": {"position_bias": True, "intra_depth": 2},
    "multi-head, position bias": {"position_bias": True, "multi_head": True},
    "other width": {"dim_out": 12},
}


def _layer(dim=8, **options):
    layer = LambdaLayer(dim, **{"query_depth": 3, "heads": 2, "scope": 5, **options})
    layer = scramble(layer).double()
    if options.get("position_bias"):
        nn.init.normal_(layer.position.bias)
    return layer


MASKS = ("none", "padding", "padding of all", "per query")
SIZE = (3, 4)


def _masks(kind):
    """A mask of the layer, and which positions each query sees then; one query sees nothing."""
    positions = torch.Size(SIZE).numel()
    if kind == "none":
        return None, None
    if kind != "per query":
        mask = torch.rand(1 if kind == "padding of all" else 2, 1, *SIZE) < 0.7
        return mask, mask.flatten(1)[:, None].expand(2, positions, -1)
    mask = torch.rand(positions, positions) < 0.7
    mask[positions // 2] = False
    return mask, mask.expand(2, -1, -1)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_definition(name, mask):
    """With padding (one context for all queries), and a context per query (Figure 6), too."""
    layer, (given, contexts) = _layer(**VARIANTS[name]).train(mask == "none"), _masks(mask)
    x = torch.randn(2, 8, *SIZE, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    got = with_gradients(lambda x, *_: layer(x, given), inputs)
    want = with_gradients(lambda x, *_: reference.layer_output(layer, x, contexts), inputs)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


def test_shared_embeddings():
    first = LambdaLayer(8, query_depth=3, heads=2, scope=5)
    second = LambdaLayer(16, query_depth=3, heads=4, position=first.position, scope=None)
    assert second.position.embedding is first.position.embedding
    both = nn.ModuleList([first, second])
    assert sum(p is first.position.embedding for p in both.parameters()) == 1
    assert {"0.position.embedding", "1.position.embedding"} <= set(both.state_dict())
    with pytest.raises(ConfigError, match=r"\[3, 1, None\].*\[4, 1, None\]"):
        LambdaLayer(8, query_depth=4, heads=2, position=first.position)


def test_every_key_norm_has_a_definition_and_a_line_in_the_docs():
    assert set(KEY_NORMS) == set(reference.KEY_NORMS)
    page = Path(__file__).parents[2] / "docs/layer.md"
    if page.exists():
        assert all(f'"{name}"' in page.read_text("utf-8") for name in KEY_NORMS)


@pytest.mark.parametrize("per_query", [False, True])
@pytest.mark.parametrize("name", KEY_NORMS)
def test_extreme_keys_and_an_empty_context(name, per_query):
    """In float32, with contexts of all positions, of some and of none."""
    positions = torch.Size(SIZE).numel()
    queries, values = torch.randn(3, *SIZE, 2, 3), torch.randn(3, *SIZE, 4, 2)
    keys = torch.randn(3, *SIZE, 3, 2)
    parts = queries, keys, values
    keys[:, 0, 0], keys[:, 1, 1] = 300, -300  # the same positions in each channel
    keys[:, 2, :2] = torch.tensor([300.0, -300.0])
    inside = torch.rand(3, positions) < 0.5
    inside[0], inside[2] = True, False
    mask, seen = inside.view(3, 1, *SIZE), inside[:, None].expand(-1, positions, -1)
    if per_query:  # the contexts of the images are those of three kinds of queries
        mask = inside.repeat(positions // 3, 1)
        seen = mask.expand(3, -1, -1)

    def run(function, dtype):
        return with_gradients(function, [x.to(dtype).requires_grad_() for x in parts])

    def definition(*parts):
        flat = (x.flatten(1, 2) for x in parts)
        return reference.content_output(*flat, seen, name).unflatten(1, SIZE)

    content = ContentLambda(name)
    got = run(lambda *parts: content(*parts, mask), torch.float32)
    for found, expected in zip(got, run(definition, torch.float64), strict=True):
        assert found.isfinite().all()
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


# Other values of all options, with what else they need
OTHER_VALUES = {
    "dim_out": 4,
    "query_depth": 4,
    "heads": 1,
    "intra_depth": 2,
    "scope": 3,
    "dilation": 2,
    "map_size": {"map_size": (3, 3), "scope": None},
    "content": False,
    "norm": "",
    "key_norm": "l2",
    "query_softmax": True,
    "multi_head": True,
    "position": {"position": RelativePosition(3, scope=(3, 3))},
    "position_bias": True,
    "implementation": "dense",
}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_an_option_that_no_tensor_shows_is_declared(name):
    """Else weights are loaded without a word where layers compute something else with them."""
    parameters = inspect.signature(LambdaLayer).parameters
    assert set(OTHER_VALUES) == set(parameters) - {"dim"}
    key = LAMBDA_LAYER_KEYS.get(name.upper())
    if key is not None and key.unseen is not None:
        assert key.unseen == parameters[name].default
        return
    other = OTHER_VALUES[name]
    layers = [_layer(), _layer(**(other if isinstance(other, dict) else {name: other}))]
    shapes = [{n: t.shape for n, t in layer.state_dict().items()} for layer in layers]
    if shapes[0] != shapes[1] or name == "dilation":  # which a network's stages decide
        return
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 8, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(layers[0].eval()(x), layers[1].eval()(x))


def check_initialisation(layer):
    """Appendix F.2, with the standard error of a sample as tolerance."""
    queries, keys, values = layer.qkv.weight.split(layer.rows)
    depth, dim = layer.query_depth, layer.qkv.in_channels
    deviations = {queries: (depth * dim) ** -0.5, keys: dim**-0.5, values: dim**-0.5}
    if layer.position is not None:
        deviations[layer.position.embedding] = 1.0
    for tensor, deviation in deviations.items():
        error = 5 / tensor.numel() ** 0.5
        assert tensor.std().item() == pytest.approx(deviation, rel=error)
        assert abs(tensor.mean().item()) < error * deviation


@pytest.mark.parametrize("options", [{}, {"intra_depth": 4, "scope": 7}, {"scope": None}])
def test_initialisation(options):
    check_initialisation(LambdaLayer(256, query_depth=16, heads=4, **{"scope": 23, **options}))


def test_parameter_names_and_shapes_are_a_file_format():
    options = {"query_depth": 8, "intra_depth": 2, "scope": 7, "position_bias": True}
    layer = LambdaLayer(32, heads=4, **options)
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.named_parameters()}
    assert shapes == {
        "qkv.weight": (32 + 16 + 16, 32, 1, 1),  # queries (h, k), keys (k, u), values (v, u)
        "query_norm.weight": (32,),
        "query_norm.bias": (32,),
        "value_norm.weight": (16,),
        "value_norm.bias": (16,),
        "position.embedding": (8, 2, 7, 7),
        "position.bias": (8,),
    }
    assert not layer.position.bias.any() and "query_depth=8, heads=4" in repr(layer)


@pytest.mark.parametrize("implementation", ["auto", "query_first", "depthwise", "dense"])
def test_autocast_rounds_and_no_more(implementation):
    layer = LambdaLayer(32, scope=7, implementation=implementation).eval()
    x, parameters = torch.randn(2, 32, 9, 7), [*layer.parameters()]
    expected = with_gradients(lambda *_: layer(x), parameters)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x.to(memory_format=torch.channels_last))
    assert low.dtype == torch.bfloat16
    for a, b in zip(with_gradients(lambda *_: low, parameters), expected, strict=True):
        assert (a.float() - b).norm() < 0.05 * b.norm()


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 4, 2, 3)])
def test_transforms_and_gradients_that_are_missing(order):
    """In both layouts; gradcheck gives the layer undefined gradients, too."""
    layer = LambdaLayer(8, query_depth=3, heads=2, scope=5).double().eval()
    shape = [(3, 2, 8, 5, 6)[order.index(place)] for place in range(5)]
    x = torch.randn(shape, dtype=torch.float64).permute(order)
    torch.testing.assert_close(torch.func.vmap(layer)(x), torch.stack([layer(y) for y in x]))
    assert torch.autograd.gradcheck(layer, x[0].requires_grad_(), fast_mode=True)


LAYOUTS = {**VARIANTS, "query_first": {"implementation": "query_first"}}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("variant", LAYOUTS)
def test_output_and_gradient_have_the_layout_of_the_input(variant, memory_format):
    layer = LambdaLayer(8, **{"query_depth": 3, "heads": 2, "scope": 5, **LAYOUTS[variant]})
    x, dense = torch.randn(2, 8, 5, 6).to(memory_format=memory_format).requires_grad_(), []
    for norm in layer.modules():
        if isinstance(norm, nn.BatchNorm2d):  # which takes several times as long for a view
            norm.register_forward_pre_hook(
                lambda _, args: dense.append(args[0].is_contiguous(memory_format=memory_format))
            )
    y = layer(x)
    assert all(dense) and y.is_contiguous(memory_format=memory_format)
    grad = torch.randn_like(y)
    assert torch.autograd.grad(y, x, grad)[0].is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("masked", [False, True])
def test_content_lambda_stays_in_float32_under_autocast(masked):
    """Only the projections' rounding is left: the sum over positions must not add its own."""
    layer = LambdaLayer(16, heads=2, scope=None, norm="").eval()
    x = torch.randn(1, 16, 24, 24)
    mask = torch.ones(576, 576, dtype=torch.bool) if masked else None
    dtypes = set()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is torch.einsum and "m" in args[0].split("->")[0].split(",")[0]:
                dtypes.add(result.dtype)
            return result

    with torch.autocast("cpu", torch.bfloat16), Watch():
        layer(x, mask)
    assert dtypes == {torch.float32}


X = (2, 8, 4, 6)
REFUSALS = [  # options of the layer, shapes of the arguments of its call, and what is named
    ({"scope": 4}, {}, "scope.*4x4.*odd"),
    ({"scope": (3, 3, 3)}, {}, "2 sides.*3x3x3"),
    ({"heads": 3}, {}, "heads.* 8"),
    ({"query_depth": 0}, {}, "query_depth"),
    ({"key_norm": "max"}, {}, "key_norm.*'max'"),
    ({"norm": "BatchNorm"}, {}, "norm.*'BatchNorm'"),
    ({"map_size": (4, 4)}, {}, "map_size.*scope=None"),
    ({"scope": None, "content": False}, {}, "content=True"),
    ({"implementation": "cuda"}, {}, "cuda"),
    ({"dilation": 0}, {}, "dilation.*0"),
    ({"dilation": 2, "scope": None, "map_size": (4, 4)}, {}, "dilation.*2.*global"),
    ({"scope": None, "map_size": (4, 4)}, {"x": (1, 8, 5, 4)}, "4x4.*5x4"),
    ({}, {"x": X, "mask": (1, 4, 6)}, r"mask.*\[1, 4, 6\].*\[2, 1, 4, 6\]"),
    ({}, {"x": X, "mask": (2, 1, 6, 4)}, r"mask.*\[2, 1, 6, 4\]"),  # transposed
    ({}, {"x": X, "mask": (12, 24)}, r"mask.*\[12, 24\].*\[24, 24\]"),
    # As 255 it would multiply the values of a layer without content
    ({"content": False}, {"x": X, "mask of numbers": (24, 24)}, r"mask.*torch\.uint8.*torch\.bool"),
]


@pytest.mark.parametrize(("options", "shapes", "named"), REFUSALS)
def test_what_cannot_work_is_named(options, shapes, named):
    dtypes = {"mask": torch.bool, "mask of numbers": torch.uint8}
    arguments = {
        name.partition(" ")[0]: torch.ones(shape, dtype=dtypes.get(name))
        for name, shape in shapes.items()
    }
    with pytest.raises(ConfigError, match=named):
        LambdaLayer(8, **{"heads": 2, "query_depth": 3, "scope": 5, **options})(**arguments)


@pytest.mark.parametrize("implementation", ["auto", "query_first"])
def test_a_forward_pass_on_a_cpu_enters_four_files(implementation):
    """Of the package: the layer, the choice, what it chose, and the call of a kernel."""
    layer = LambdaLayer(16, query_depth=4, scope=5, implementation=implementation)
    x, package, entered = torch.randn(2, 16, 6, 7), str(Path(lambda_det.__file__).parent), set()
    layer(x)  # which may compile the kernel

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    assert 3 <= len(entered) <= 4, entered
