"""Lambda layers of other projects and ours with their weights give the same output."""

import pytest
import torch
from timm.layers.lambda_layer import LambdaLayer as TimmLayer
from torch import nn

from lambda_det.layers import LambdaLayer
from lambda_det.layers.convert import convert_lambda_layers
from tests.export.toy import scramble


def _applied(q, k, v, position):
    """Queries [b, h, k, n], keys [b, u, k, n], values [b, u, v, n], positions [b, n, k, v]."""
    content = torch.einsum("bukn,buvn->bkv", k.softmax(-1), v)[:, None]
    return torch.einsum("bhkn,bnkv->bhvn", q, content + position)


class WithThreeProjections(nn.Module):
    """The attributes, the shapes and the mathematics of the package lambda-networks."""

    def __init__(self, dim, *, dim_k, n=None, r=None, heads=4, dim_u=1):
        super().__init__()
        dim_v = dim // heads
        self.u, self.heads, self.local_contexts = dim_u, heads, r is not None
        self.to_q = nn.Conv2d(dim, dim_k * heads, 1, bias=False)
        self.to_k = nn.Conv2d(dim, dim_k * dim_u, 1, bias=False)
        self.to_v = nn.Conv2d(dim, dim_v * dim_u, 1, bias=False)
        self.norm_q, self.norm_v = nn.BatchNorm2d(dim_k * heads), nn.BatchNorm2d(dim_v * dim_u)
        if r is not None:
            self.pos_conv = nn.Conv3d(dim_u, dim_k, (1, r, r), padding=(0, r // 2, r // 2))
        else:
            self.rel_pos_emb = nn.Parameter(torch.randn(2 * n - 1, 2 * n - 1, dim_k, dim_u))

    def forward(self, x):
        b, _, height, width = x.shape
        q = self.norm_q(self.to_q(x)).reshape(b, self.heads, -1, height * width)
        k = self.to_k(x).reshape(b, self.u, -1, height * width)
        v = self.norm_v(self.to_v(x)).reshape(b, self.u, -1, height * width)
        if self.local_contexts:
            maps = v.unflatten(-1, (height, width))
            position = self.pos_conv(maps).flatten(3).permute(0, 3, 1, 2)
        else:
            places = torch.cartesian_prod(torch.arange(height), torch.arange(width))
            offsets = places[None] - places[:, None] + height - 1
            embedding = self.rel_pos_emb[offsets[..., 0], offsets[..., 1]]
            position = torch.einsum("nmku,buvm->bnkv", embedding, v)
        return _applied(q, k, v, position).reshape_as(x)


class WithOneProjection(nn.Module):
    """Likewise of d-li14/lambda.pytorch: u is the first axis of keys and values there, too."""

    def __init__(self, d, dk=16, du=1, heads=4, r=23, stride=1):
        super().__init__()
        self.dk, self.du, self.Nh, self.dv, self.stride = dk, du, heads, d // heads, stride
        self.conv_qkv = nn.Conv2d(d, heads * dk + dk * du + self.dv * du, 1, bias=False)
        self.norm_q, self.norm_v = nn.BatchNorm2d(heads * dk), nn.BatchNorm2d(self.dv * du)
        self.lambda_conv = nn.Conv3d(du, dk, (1, r, r), padding=(0, r // 2, r // 2))
        if stride > 1:
            self.avgpool = nn.AvgPool2d(3, 2, padding=1)

    def forward(self, x):
        sizes = [self.Nh * self.dk, self.dk * self.du, self.dv * self.du]
        q, k, v = self.conv_qkv(x).split(sizes, 1)
        q = self.norm_q(q).unflatten(1, (self.Nh, self.dk)).flatten(3)
        k = k.unflatten(1, (self.du, self.dk)).flatten(3)
        v = self.norm_v(v).unflatten(1, (self.du, self.dv))
        position = self.lambda_conv(v).flatten(3).permute(0, 3, 1, 2)
        y = _applied(q, k, v.flatten(3), position).reshape_as(x)
        return self.avgpool(y) if self.stride > 1 else y


LAYERS = {
    "timm": lambda: TimmLayer(16, r=5, dim_head=8),
    "timm, biased projection": lambda: TimmLayer(16, r=3, dim_head=8, qkv_bias=True),
    "timm, strided": lambda: TimmLayer(16, r=3, stride=2),
    "timm, global": lambda: TimmLayer(16, r=None, feat_size=(8, 8), dim_head=8),
    "lambda-networks": lambda: WithThreeProjections(16, dim_k=8, r=5, dim_u=3),
    "lambda-networks, global": lambda: WithThreeProjections(16, dim_k=8, n=8, dim_u=2),
    "d-li14": lambda: WithOneProjection(16, dk=8, du=2, r=7),
    "d-li14, strided": lambda: WithOneProjection(16, dk=8, r=3, stride=2),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_the_output_is_the_same(make, training):
    model = nn.Sequential(nn.Conv2d(3, 16, 1), scramble(make()).eval()).train(training)
    images = torch.randn(2, 3, 8, 8)
    # Statistics move in training, so each works on its own state
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model(images)
        model.load_state_dict(state)
        converted = convert_lambda_layers(model)
        found = converted(images)
    assert converted is model and any(isinstance(m, LambdaLayer) for m in model.modules())
    assert not any(isinstance(m, nn.Conv3d) for m in model.modules())
    assert model[1].training is training
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_layer_that_is_used_twice_stays_shared_and_a_layer_alone_is_returned():
    layer = scramble(TimmLayer(16, r=3)).eval()
    image = torch.randn(1, 16, 6, 7)
    with torch.no_grad():
        expected = layer(image)
        alone = convert_lambda_layers(layer)
        assert isinstance(alone, LambdaLayer)
        torch.testing.assert_close(alone(image), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer(image), expected)  # not changed
    model = convert_lambda_layers(nn.ModuleDict({"a": layer, "b": layer}))
    assert model["a"] is model["b"] and isinstance(model["a"], LambdaLayer)


def test_models_without_such_layers_stay_as_they_are():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), LambdaLayer(4, scope=3))
    before = list(model.modules())
    assert list(convert_lambda_layers(model).modules()) == before
