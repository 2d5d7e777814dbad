"""LambdaResNet as a Detectron2 backbone: shapes, freezing, initialisation, options."""

import itertools

import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lambda_det
from lambda_det.errors import ConfigError
from lambda_det.layers import LambdaLayer
from lambda_det.modeling.resnet import Bottleneck, SqueezeExcitation
from lambda_det.modeling.specs import STAGES, ResNetSpec
from tests.export.toy import scramble
from tests.layers.reference import with_gradients
from tests.layers.test_lambda_layer import check_initialisation
from tests.modeling.small import DESIGNS, small_network

NARROW = ResNetSpec((1, 1, 1, 1), width=8)  # res2 and res3 give 32 and 64 channels


def _small(**options):
    return lambda_det.create_backbone("lambda_resnet26_slim", **{"scope": 7, **options})


@pytest.mark.parametrize(
    ("name", "dilation", "strides"),
    [
        ("lambda_resnet26_slim", {}, [4, 8, 16, 32]),
        ("lambda_resnet26_slim", {"res5": 2}, [4, 8, 16, 16]),
        ("lambda_resnet26_slim", {"res4": 2, "res5": 4}, [4, 8, 8, 8]),
        ("lambda_resnet26_slim", {"res4": 2, "res5": 2}, [4, 8, 8, 16]),
        ("resnet50_lambda_c5", {}, [4, 8, 16, 32]),
        ("mobilenet_v2_lambda", {}, [4, 8, 16, 32]),
    ],
)
@pytest.mark.parametrize("size", [(64, 96), (65, 33), (1, 1), (40, 127)])
@torch.no_grad()
def test_features_have_the_announced_shapes(name, dilation, strides, size):
    options = {"dilation": dilation} if dilation else {}
    backbone = lambda_det.create_backbone(name, **options).eval()
    features = backbone(torch.randn(1, 3, *size))
    assert tuple(features) == STAGES
    for name, shape in backbone.output_shape().items():
        height, width = (-(-side // shape.stride) for side in size)
        assert features[name].shape == (1, shape.channels, height, width)
    assert [shape.stride for shape in backbone.output_shape().values()] == strides


def test_out_features_are_those_asked_for_and_later_stages_are_left_out():
    backbone = _small(out_features=("stem", "res3"))
    assert tuple(backbone(torch.randn(1, 3, 32, 32))) == ("stem", "res3")
    assert not hasattr(backbone, "res5")  # unused parameters would stop distributed training


def test_classifier_and_features_together():
    model = _small(out_features=("res4", "linear"), num_classes=7).eval()
    outputs = model(torch.randn(2, 3, 33, 32))
    assert outputs["linear"].shape == (2, 7) and outputs["res4"].shape[1] == 256


def test_lambda_layers_and_squeeze_and_excitation_are_where_the_paper_has_them():
    with torch.device("meta"):
        model = lambda_det.create_backbone("lambda_resnet152")
    found = {}
    for stage in STAGES:
        blocks = enumerate(getattr(model, stage), start=1)
        found[stage] = [n for n, block in blocks if isinstance(block.conv2, LambdaLayer)]
    assert found == {"res2": [], "res3": [], "res4": [5, 10, 15, 20, 25, 30], "res5": [1, 2, 3]}
    for stage in STAGES:
        has_se = [isinstance(block.se, SqueezeExcitation) for block in getattr(model, stage)]
        assert all(has_se) if stage in ("res2", "res3") else not any(has_se)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("lambda_resnet26_slim", {"stochastic_depth": 1.0}, "STOCHASTIC_DEPTH is 1.0"),
        ("lambda_resnet26_slim", {"out_features": ()}, "OUT_FEATURES"),
        ("lambda_resnet26_slim", {"out_features": ("res6",)}, "'res6'.*res5"),
        ("lambda_resnet26_slim", {"dropout": 1.5}, "DROPOUT"),
        ("lambda_resnet26_slim", {"dilation": {"res4": 2}}, "res5"),
        ("lambda_resnet26_slim", {"dilation": {"res5": "2"}}, "res5"),
        ("lambda_resnet26_slim", {"dilation": {"res2": 2}}, "res2"),
        ("mobilenet_v2_lambda", {"share_positions": "stage"}, "SHARE_POSITIONS"),
        ("resnet_rs101", {"scope": 7}, "scope"),
        ("lambda_resnet26_slim", {"scop": 7}, "lambda_resnet26_slim.*scop"),
        ("lambda_resnet51", {}, "'lambda_resnet51'.*lambda_resnet50"),
    ],
)
def test_options_that_cannot_work_are_refused(name, options, words):
    with torch.device("meta"), pytest.raises(ConfigError, match=words):
        lambda_det.create_backbone(name, **options)


@pytest.mark.parametrize("freeze_at", [-1, 0, 1, 3, 5])
@pytest.mark.parametrize("name", ["lambda_resnet26_slim", "mobilenet_v2_lambda"])
def test_freeze_reaches_the_norms_inside_lambda_layers(name, freeze_at):
    model = lambda_det.create_backbone(name, freeze_at=freeze_at)
    for index, part in enumerate(("stem", *STAGES), start=1):
        stage, frozen = getattr(model, part), index <= freeze_at
        assert all(p.requires_grad != frozen for p in stage.parameters())
        norms = {type(m) for m in stage.modules() if "BatchNorm2d" in type(m).__name__}
        assert norms == {FrozenBatchNorm2d if frozen else nn.BatchNorm2d}, part


@pytest.mark.parametrize("norm", ["BN", "SyncBN", "FrozenBN", "GN", ""])
def test_norm_by_name(norm):
    model = lambda_det.create_backbone("lambda_resnet26", scope=7, norm=norm).eval()
    assert model(torch.randn(1, 3, 40, 40))["res5"].isfinite().all()
    layer, kind = model.res5[0].conv2, {"GN": nn.GroupNorm, "": nn.Identity}.get(norm, nn.Module)
    assert isinstance(layer.query_norm, kind) and isinstance(layer.value_norm, kind)


def test_initialisation_of_the_layer_survives_that_of_the_network():
    layers = [m for m in _small().modules() if isinstance(m, LambdaLayer)]
    assert len(layers) == 3
    for layer in layers:
        check_initialisation(layer)


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
    block = scramble(Bottleneck(NARROW, "res3", 64, stochastic_depth=0.5))
    x = torch.rand(64, 64, 4, 4)
    dropped = torch.tensor([torch.equal(a, b) for a, b in zip(block(x), x, strict=True)])
    assert 8 < dropped.sum() < 56
    block.eval()
    torch.testing.assert_close(block(x), block(x))


SHARING = {  # what is asked of the paper's layers, and the sides of embeddings that are left
    "no": ({"scope": 7}, [7] * 16),
    # The first block of a stage gets the map of the stage before
    "by size": ({"share_positions": "size", "scope": 7}, [7] * 4),
    "by size, with scopes": (
        {"share_positions": "size", "stage_scopes": [3, 7, 15, 23]},
        [3, 7, 7, 15, 15, 23, 23],
    ),
    "by stage": ({"share_positions": "stage", "scope": 7}, [7] * 4),
    # At 32x32 the stages have 8x8 to 1x1 positions
    "of whole maps": ({"global_context": 32}, 4 * [15] + 4 * [7] + 6 * [3] + 2 * [1]),
    "of whole maps by stage": ({"global_context": 32, "share_positions": "stage"}, [15, 15, 7, 3]),
}


@pytest.mark.parametrize(("options", "sides"), SHARING.values(), ids=SHARING)
def test_embeddings_have_the_sides_that_are_asked_for_and_are_shared(options, sides):
    with torch.device("meta"):
        model = lambda_det.create_backbone("resnet50_lambda_c2345", **options)
    embeddings = [p for name, p in model.named_parameters() if name.endswith("embedding")]
    assert [p.shape[-1] for p in embeddings] == sides
    positions = [[block.conv2.position for block in getattr(model, stage)] for stage in STAGES]
    kind = None if "stage_scopes" in options else options.get("share_positions")
    for before, (first, *others) in zip([[None], *positions], positions, strict=False):
        assert (len({first, *others}) == 1) == (kind == "stage") or before == [None]
        assert (first is before[-1]) == (kind == "size" and before != [None])
    if "global_context" in options:
        assert model(torch.empty(2, 3, 32, 32, device="meta"))["res5"].shape == (2, 2048, 1, 1)
        with pytest.raises(ConfigError, match="map"):
            model(torch.empty(1, 3, 64, 64, device="meta"))


@pytest.mark.parametrize("name", ["lambda_resnet26_slim", "mobilenet_v2"])
def test_dropout_stands_before_the_last_layer(name):
    model = lambda_det.create_classifier(name, 3, dropout=0.75)
    seen = []
    model.backbone.linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.randn(4, 3, 64, 64)
    model(images)
    model.eval()(images)
    assert 0.6 < (seen[0] == 0).double().mean() < 1 and (seen[1] != 0).double().mean() > 0.4


@pytest.mark.parametrize("dilation", [2, 3])
@pytest.mark.parametrize("options", [None, {"scope": 5, "content": False, "heads": 2}])
def test_a_dilated_block_is_the_plain_block_on_every_subgrid(dilation, options):
    """Positions of one remainder see each other alone, as on a map of their own."""

    def block(d):
        layer = options and LambdaLayer(8, dilation=d, **options)
        made = Bottleneck(NARROW, "res2", 32, dilation=d, layer=layer)
        return scramble(made).double().eval()

    def on_subgrids(x):
        y = torch.empty_like(x)
        for i, j in itertools.product(range(dilation), repeat=2):
            y[:, :, i::dilation, j::dilation] = plain(x[:, :, i::dilation, j::dilation])
        return y

    plain, dilated = block(1), block(dilation)
    dilated.load_state_dict(plain.state_dict())
    x = torch.randn(2, 32, 11, 13, dtype=torch.float64, requires_grad=True)
    found, expected = (with_gradients(f, [x]) for f in (dilated, on_subgrids))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


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


SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in ("mobilenet_v2", "mobilenet_v2_lambda")]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", [*DESIGNS, *SLOW])
def test_no_map_is_copied_between_layouts(name, dtype):
    features = ["res2", "res4", "res5"]
    make = lambda_det.create_backbone if "mobilenet" in name else small_network
    made = make(name, out_features=features)
    network, x = made.to(memory_format=LAST), torch.randn(2, 3, 96, 64).to(memory_format=LAST)
    with LayoutCopies() as copies:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            features = network.train()(x)
        gradients = [torch.randn_like(y) for y in features.values()]
        torch.autograd.backward(list(features.values()), gradients)
    assert copies.found == []


def test_squeeze_and_excitation_has_the_gradients_of_its_formula():
    se = SqueezeExcitation(8).double()
    x = torch.randn(2, 8, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(se, x)
    scale = se.expand(se.reduce(x.flatten(2).mean(2)[..., None, None])).sigmoid()
    torch.testing.assert_close(se(x), x * scale)
    large = torch.full((1, 2, 8, 8), 6e4, dtype=torch.float16, requires_grad=True)
    assert torch.equal(se.squeeze(large), large[..., :1, :1])  # whose sum is not finite
