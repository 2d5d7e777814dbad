"""Lambda layers of other projects and ours with their weights give the same output."""

import pytest
import torch
from timm.layers.lambda_layer import LambdaLayer as TimmLayer
from torch import nn

from lambda_det.layers import LambdaLayer
from lambda_det.layers.convert import convert_lambda_layers
from tests.export.toy import scramble


class _Theirs(nn.Module):
    """The mathematics of both packages below; u is the first axis of keys and values."""

    def applied(self, q, k, v, heads, u, position):
        """The output for three maps; ``position`` makes [b, k, v, ..] of values [b, u, v, H, W]."""
        queries = self.norm_q(q).unflatten(1, (heads, -1)).flatten(3)
        keys, values = k.unflatten(1, (u, -1)).flatten(3), self.norm_v(v).unflatten(1, (u, -1))
        content = torch.einsum("bukn,buvn->bkv", keys.softmax(-1), values.flatten(3))
        lambdas = content[..., None] + position(values).flatten(3)
        y = torch.einsum("bhkn,bkvn->bhvn", queries, lambdas)
        return y.flatten(1, 2).unflatten(2, v.shape[2:])


class WithThreeProjections(_Theirs):
    """The attributes and the shapes of the package lambda-networks."""

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
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        position = self.pos_conv if self.local_contexts else self.of_whole_map
        return self.applied(q, k, v, self.heads, self.u, position)

    def of_whole_map(self, values):
        height, width = values.shape[-2:]
        places = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        offsets = places[None] - places[:, None] + height - 1
        embedding = self.rel_pos_emb[offsets[..., 0], offsets[..., 1]]
        return torch.einsum("nmku,buvm->bkvn", embedding, values.flatten(3))


class WithOneProjection(_Theirs):
    """Likewise of d-li14/lambda.pytorch."""

    def __init__(self, d, dk=16, du=1, heads=4, r=23, stride=1):
        super().__init__()
        self.dk, self.du, self.Nh, self.stride = dk, du, heads, stride
        self.sizes = heads * dk, dk * du, d // heads * du
        self.conv_qkv = nn.Conv2d(d, sum(self.sizes), 1, bias=False)
        self.norm_q, self.norm_v = nn.BatchNorm2d(heads * dk), nn.BatchNorm2d(d // heads * du)
        self.lambda_conv = nn.Conv3d(du, dk, (1, r, r), padding=(0, r // 2, r // 2))
        if stride > 1:
            self.avgpool = nn.AvgPool2d(3, 2, padding=1)

    def forward(self, x):
        q, k, v = self.conv_qkv(x).split(self.sizes, 1)
        y = self.applied(q, k, v, self.Nh, self.du, self.lambda_conv)
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
