"""LambdaResNet as a Detectron2 backbone: shapes, freezing, initialisation, options."""

import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lambda_det
from lambda_det.errors import ConfigError
from lambda_det.layers import LambdaLayer
from lambda_det.modeling.resnet import Bottleneck, LambdaResNet, SqueezeExcitation
from lambda_det.modeling.specs import ResNetSpec, get_spec
from tests.export.toy import scramble

STAGES = ("res2", "res3", "res4", "res5")


def _small(**options):
    torch.manual_seed(0)
    return lambda_det.create_backbone("lambda_resnet26_slim", **{"scope": 7, **options})


@pytest.mark.parametrize(
    "name", ["lambda_resnet26_slim", "resnet50_lambda_c5", "mobilenet_v2_lambda"]
)
@pytest.mark.parametrize("size", [(64, 96), (65, 33), (1, 1), (40, 127)])
def test_features_have_the_announced_shapes(name, size):
    backbone = lambda_det.create_backbone(name).eval()
    features = backbone(torch.randn(1, 3, *size))
    assert tuple(features) == STAGES
    for name, shape in backbone.output_shape().items():
        height, width = (-(-side // shape.stride) for side in size)
        assert features[name].shape == (1, shape.channels, height, width)
    assert [shape.stride for shape in backbone.output_shape().values()] == [4, 8, 16, 32]


def test_out_features_are_those_asked_for_and_later_stages_are_left_out():
    backbone = _small(out_features=("stem", "res3"))
    assert tuple(backbone(torch.randn(1, 3, 32, 32))) == ("stem", "res3")
    assert not hasattr(backbone, "res5")  # unused parameters would stop distributed training


def test_classifier_and_features_together():
    model = LambdaResNet(
        get_spec("lambda_resnet26_slim"), out_features=["res4", "linear"], num_classes=7, scope=7
    ).eval()
    outputs = model(torch.randn(2, 3, 32, 32))
    assert outputs["linear"].shape == (2, 7) and outputs["res4"].shape[1] == 256
    classifier = lambda_det.create_classifier("lambda_resnet26_slim", num_classes=5, scope=7).eval()
    assert classifier(torch.randn(2, 3, 33, 32)).shape == (2, 5)


def test_lambda_layers_and_squeeze_and_excitation_are_where_the_paper_has_them():
    with torch.device("meta"):
        model = lambda_det.create_backbone("lambda_resnet152")
    found = {
        stage: [
            number
            for number, block in enumerate(getattr(model, stage), start=1)
            if isinstance(block.conv2, LambdaLayer)
        ]
        for stage in STAGES
    }
    assert found == {"res2": [], "res3": [], "res4": [5, 10, 15, 20, 25, 30], "res5": [1, 2, 3]}
    for stage in STAGES:
        has_se = [isinstance(block.se, SqueezeExcitation) for block in getattr(model, stage)]
        assert all(has_se) if stage in ("res2", "res3") else not any(has_se)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("lambda_resnet26_slim", {"norm": "BatchNorm"}, "'BatchNorm'.*SyncBN"),
        ("lambda_resnet26_slim", {"stochastic_depth": 1.0}, "STOCHASTIC_DEPTH is 1.0"),
        ("lambda_resnet26_slim", {"out_features": ()}, "OUT_FEATURES"),
        ("lambda_resnet26_slim", {"out_features": ("res6",)}, "'res6'.*res5"),
        ("lambda_resnet26_slim", {"dropout": 1.5}, "DROPOUT"),
        ("lambda_resnet26_slim", {"dilation": {"res4": 2}}, "res5"),
        ("lambda_resnet26_slim", {"dilation": {"res5": 0}}, "res5"),
        ("lambda_resnet26_slim", {"dilation": {"res5": 1.5}}, "res5"),
        ("lambda_resnet26_slim", {"dilation": {"res5": "2"}}, "res5"),
        ("lambda_resnet26_slim", {"dilation": {"res2": 2}}, "res2"),
        ("mobilenet_v2", {"dropout": 1.5}, "DROPOUT"),
        ("mobilenet_v2", {"scope": 7}, "scope"),
        ("mobilenet_v2", {"mask_padding": True}, "mobilenet_v2.*mask_padding"),
        ("mobilenet_v2_lambda", {"share_positions": "stage"}, "SHARE_POSITIONS"),
        ("resnet_rs101", {"scope": 7}, "scope"),
        ("lambda_resnet26_slim", {"scop": 7}, "lambda_resnet26_slim.*scop"),
    ],
)
def test_options_that_cannot_work_are_refused(name, options, words):
    with torch.device("meta"), pytest.raises(ConfigError, match=words):
        lambda_det.create_backbone(name, **options)


@pytest.mark.parametrize("freeze_at", [-1, 0, 1, 3, 4, 5])
@pytest.mark.parametrize("name", ["lambda_resnet26_slim", "mobilenet_v2_lambda"])
def test_freeze_reaches_the_norms_inside_lambda_layers(name, freeze_at):
    model = lambda_det.create_backbone(name, freeze_at=freeze_at)
    for index, part in enumerate(("stem", *STAGES), start=1):
        stage = getattr(model, part)
        frozen = index <= freeze_at
        assert all(p.requires_grad != frozen for p in stage.parameters())
        kind, other = (
            (FrozenBatchNorm2d, nn.BatchNorm2d) if frozen else (nn.BatchNorm2d, FrozenBatchNorm2d)
        )
        norms = [
            type(m) for m in stage.modules() if isinstance(m, (FrozenBatchNorm2d, nn.BatchNorm2d))
        ]
        assert norms and not any(issubclass(norm, other) for norm in norms), (part, kind)


@pytest.mark.parametrize(
    "norm", ["BN", "SyncBN", "FrozenBN", "GN", "", lambda c: nn.GroupNorm(4, c)]
)
def test_norm_by_name(norm):
    model = lambda_det.create_backbone("lambda_resnet26", scope=7, norm=norm).eval()
    assert model(torch.randn(1, 3, 40, 40))["res5"].isfinite().all()
    layer = model.res5[0].conv2
    if norm == "GN":
        assert isinstance(layer.query_norm, nn.GroupNorm) and isinstance(
            layer.value_norm, nn.GroupNorm
        )
    if norm == "":
        assert isinstance(layer.query_norm, nn.Identity)


def test_initialisation_of_the_layer_survives_that_of_the_network():
    model = lambda_det.create_backbone("lambda_resnet26_slim")
    layers = [m for m in model.modules() if isinstance(m, LambdaLayer)]
    assert len(layers) == 3
    for layer in layers:
        dim = layer.qkv.in_channels
        queries, *others = layer.qkv.weight.split(layer.rows)
        assert queries.std().item() == pytest.approx((16 * dim) ** -0.5, rel=0.05)
        for rows in others:
            assert rows.std().item() == pytest.approx(dim**-0.5, rel=0.05)
        assert layer.position.embedding.std().item() == pytest.approx(1, rel=0.05)


def test_residual_branches_start_at_zero():
    model = _small().eval()
    block = model.res2[1]
    x = torch.rand(1, 64, 8, 8)
    torch.testing.assert_close(block(x), x)


def test_stochastic_depth_grows_with_the_stage_and_is_off_in_evaluation():
    model = _small(stochastic_depth=0.5)
    assert [getattr(model, stage)[0].drop.p for stage in STAGES] == pytest.approx(
        [0.2, 0.3, 0.4, 0.5]
    )
    block = scramble(Bottleneck(64, 64, bottleneck_channels=16, stochastic_depth=0.5))
    x = torch.rand(64, 64, 4, 4)
    dropped = torch.tensor([torch.equal(a, b) for a, b in zip(block(x), x, strict=True)])
    assert 8 < dropped.sum() < 56
    block.eval()
    torch.testing.assert_close(block(x), block(x))


@pytest.mark.parametrize("stochastic_depth", [0.0, 0.5])
def test_activation_checkpointing_changes_nothing_but_memory(stochastic_depth):
    x = torch.randn(4, 3, 32, 32)
    results = []
    for checkpoint in (False, True):
        model = scramble(
            _small(checkpoint_activations=checkpoint, stochastic_depth=stochastic_depth)
        )
        torch.manual_seed(1)
        for _ in range(2):
            model.zero_grad()
            sum(f.square().mean() for f in model(x).values()).backward()
        results.append(
            {**dict(model.named_buffers()), **{n: p.grad for n, p in model.named_parameters()}}
        )
    for name in results[0]:
        torch.testing.assert_close(
            results[1][name], results[0][name], msg=lambda m, n=name: f"{n}: {m}"
        )


def test_shared_positions_are_one_tensor_per_stage():
    model = lambda_det.create_backbone("lambda_resnet26_c4", share_positions="stage", scope=7)
    first, second = (block.conv2.position for block in model.res5)
    assert first is second and first is not model.res4[0].conv2.position


def test_positions_are_shared_by_layers_of_equal_input_size():
    """The first block of a stage gets the map of the stage before."""
    model = lambda_det.create_backbone("resnet50_lambda_c2345", share_positions="size", scope=7)
    positions = [[block.conv2.position for block in stage] for stage in model.stages]
    for index, ((first, *others), before) in enumerate(
        zip(positions, [[None], *positions], strict=False)
    ):
        assert index == 0 or first is before[-1]
        assert all(position is positions[index][-1] for position in others)
    assert len({id(position) for stage in positions for position in stage}) == 4


def test_stages_have_scopes_of_their_own():
    options = {"stage_scopes": [3, 7, 15, 23], "share_positions": "size"}
    model = lambda_det.create_backbone("resnet50_lambda_c2345", **options)
    scopes = [{b.conv2.position.embedding.shape[-1] for b in stage} for stage in model.stages]
    assert scopes == [{3}, {7}, {15}, {23}]


def test_global_context_spans_the_map_of_each_stage_and_is_shared_where_asked():
    """At 32x32 the stages have 8x8 to 1x1 positions; a stage's first block sees the larger map."""
    options = {"global_context": 32, "out_features": STAGES}
    own = lambda_det.create_backbone("resnet50_lambda_c2345", **options)
    shared = lambda_det.create_backbone("resnet50_lambda_c2345", share_positions="stage", **options)
    sides = [p.shape[-1] for name, p in own.named_parameters() if name.endswith("embedding")]
    assert sides == 3 * [15] + [15] + 3 * [7] + [7] + 5 * [3] + [3] + 2 * [1]
    sides = [p.shape[-1] for name, p in shared.named_parameters() if name.endswith("embedding")]
    assert sides == [15, 15, 7, 3]
    for model in (own, shared):
        assert model(torch.randn(2, 3, 32, 32))["res5"].shape == (2, 2048, 1, 1)
        with pytest.raises(ConfigError, match="map"):
            model(torch.randn(1, 3, 64, 64))


def test_global_context_is_the_local_scope_that_reaches_everywhere():
    torch.manual_seed(0)
    wide = scramble(lambda_det.create_backbone("lambda_resnet26_slim", scope=9)).double().eval()
    whole = lambda_det.create_backbone("lambda_resnet26_slim", global_context=70).double().eval()
    state = wide.state_dict()
    for name, tensor in whole.state_dict().items():  # 5x5 positions, then 3x3
        if name.endswith("embedding"):
            cut = (9 - tensor.shape[-1]) // 2
            state[name] = state[name][..., cut : 9 - cut, cut : 9 - cut]
    whole.load_state_dict(state)
    images = torch.randn(1, 3, 70, 66).double()
    for name, expected in wide(images).items():
        torch.testing.assert_close(whole(images)[name], expected)


@pytest.mark.parametrize("name", ["lambda_resnet26_slim", "mobilenet_v2"])
def test_dropout_stands_before_the_last_layer(name):
    model = lambda_det.create_classifier(name, 3, dropout=0.75)
    seen = []
    model.backbone.linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.randn(4, 3, 64, 64)
    model(images)
    model.eval()(images)
    assert 0.6 < (seen[0] == 0).double().mean() < 1 and (seen[1] != 0).double().mean() > 0.4


@pytest.mark.slow
def test_a_strided_lambda_block_compiles_without_graph_break():
    block = Bottleneck(16, 32, bottleneck_channels=8, stride=2, layer=LambdaLayer(8, scope=3))
    x = torch.randn(2, 16, 7, 6).requires_grad_()
    whole = torch.compile(block, backend="aot_eager", fullgraph=True)
    got, want = whole(x), block(x)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (got, want)))


DILATED = {"res4": 2, "res5": 4}


@pytest.mark.parametrize("dilation", [2, 3])
@pytest.mark.parametrize("options", [None, {"scope": 5, "content": False, "heads": 2}])
def test_a_dilated_block_is_the_plain_block_on_every_subgrid(dilation, options):
    """Positions of one remainder see each other alone, as on a map of their own."""
    blocks = [
        Bottleneck(
            16,
            16,
            bottleneck_channels=8,
            dilation=d,
            layer=options and LambdaLayer(8, dilation=d, **options),
        )
        for d in (1, dilation)
    ]
    plain, dilated = (scramble(block).double().eval() for block in blocks)
    dilated.load_state_dict(plain.state_dict())
    x = torch.randn(2, 16, 11, 13, dtype=torch.float64, requires_grad=True)
    expected = torch.empty_like(x)
    for i in range(dilation):
        for j in range(dilation):
            expected[:, :, i::dilation, j::dilation] = plain(x[:, :, i::dilation, j::dilation])
    found = dilated(x)
    assert torch.allclose(found, expected, atol=1e-11)
    weight = torch.randn_like(x)
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, expected)]
    assert torch.allclose(*gradients, atol=1e-11)


@pytest.mark.parametrize(
    ("dilation", "strides", "sizes"),
    [
        (None, [4, 8, 16, 32], [(25, 33), (13, 17), (7, 9), (4, 5)]),
        ({"res5": 2}, [4, 8, 16, 16], [(25, 33), (13, 17), (7, 9), (7, 9)]),
        (DILATED, [4, 8, 8, 8], [(25, 33), (13, 17), (13, 17), (13, 17)]),
        ({"res4": 2, "res5": 2}, [4, 8, 8, 16], [(25, 33), (13, 17), (13, 17), (7, 9)]),
    ],
)
def test_strides_sizes_and_weights(dilation, strides, sizes):
    plain = lambda_det.create_backbone("lambda_resnet26_slim", scope=7)
    net = lambda_det.create_backbone("lambda_resnet26_slim", scope=7, dilation=dilation)
    assert [shape.stride for shape in net.output_shape().values()] == strides
    with torch.no_grad():
        features = net.eval()(torch.randn(1, 3, 97, 130))
    assert [tuple(f.shape[-2:]) for f in features.values()] == sizes
    assert {n: t.shape for n, t in net.state_dict().items()} == {
        n: t.shape for n, t in plain.state_dict().items()
    }


class LayoutCopies(TorchDispatchMode):
    """Notes every operator that writes a map [B, C, H, W] as anything but channels last."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        read = {x.untyped_storage().data_ptr() for x in tensors}
        for x in tree_leaves(output):
            # Views write nothing, and of sides of 1 every layout is right
            is_map = isinstance(x, torch.Tensor) and x.dim() == 4 and min(x.shape[1:]) > 1
            copied = is_map and x.untyped_storage().data_ptr() not in read
            if copied and not x.is_contiguous(memory_format=LAST):
                self.found.append((str(func), tuple(x.shape), x.stride()))
        return output


LAST = torch.channels_last


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("design", ["rs", "vanilla", "timm"])
def test_no_map_is_copied_between_layouts(design, dtype):
    spec = ResNetSpec(
        (1, 1, 2, 1), design, lambda_blocks={"res4": (2,), "res5": (1,)}, se_stages=("res2", "res4")
    )
    _assert_no_copies(LambdaResNet(spec, out_features=["res2", "res4", "res5"]), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["mobilenet_v2", "mobilenet_v2_lambda"])
def test_no_map_of_a_mobilenet_is_copied_between_layouts(name, dtype):
    _assert_no_copies(lambda_det.create_backbone(name), dtype)


def _assert_no_copies(network, dtype):
    network, x = network.to(memory_format=LAST), torch.randn(2, 3, 96, 64).to(memory_format=LAST)
    with LayoutCopies() as copies:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            features = network.train()(x)
        gradients = [torch.randn_like(y) for y in features.values()]
        torch.autograd.backward(list(features.values()), gradients)
    assert copies.found == []


def test_squeeze_and_excitation_has_the_gradients_of_its_formula():
    torch.manual_seed(0)
    se = SqueezeExcitation(8).double()
    x = torch.randn(2, 8, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(se, x)
    scale = se.expand(se.reduce(x.flatten(2).mean(2)[..., None, None])).sigmoid()
    torch.testing.assert_close(se(x), x * scale)
    large = torch.full((1, 2, 8, 8), 6e4, dtype=torch.float16, requires_grad=True)
    assert torch.equal(se.squeeze(large), large[..., :1, :1])  # whose sum is not finite
