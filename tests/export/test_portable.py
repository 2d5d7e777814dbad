"""A network in plain operators computes what the network computes, whatever the size of the map."""

import pytest
import torch
from torch import nn

from lambda_det.export import portable_copy
from lambda_det.layers import LambdaLayer
from lambda_det.layers.lambda_layer import KEY_NORMS

SIZES = [(1, 1), (2, 3), (5, 9), (8, 8), (9, 17)]


def layer(**options):
    made = LambdaLayer(8, **{"query_depth": 4, "heads": 2, "scope": 7, **options}).double().eval()
    for name, parameter in made.named_parameters():
        if name == "position.bias":
            nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize(
    "options",
    [
        {"position_bias": True},
        {"intra_depth": 2, "multi_head": True, "position_bias": True},
        {"content": False},
        {"scope": (3, 9)},
        {"scope": None},
        {"query_softmax": True},
        *({"key_norm": name} for name in KEY_NORMS),
        {"dilation": 3, "multi_head": True},
        {"dilation": 2, "implementation": "query_first"},
    ],
    ids=str,
)
def test_the_layer_computes_the_same(options):
    original = layer(**options)
    copy = portable_copy(original)
    for size in SIZES:
        x = torch.randn(3, 8, *size, dtype=torch.float64)
        mask = torch.ones(3, 1, *size, dtype=torch.bool)
        mask[1, :, :, size[1] // 2 + 1 :] = False
        mask[2] = False
        for given in (None, mask):
            found, expected = copy(x, given), original(x, given)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_the_copy_has_the_names_of_the_original_and_leaves_it_alone():
    original = nn.Sequential(layer(), nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False))
    types = [type(module) for module in original.modules()]
    state = portable_copy(original).state_dict()
    assert [type(module) for module in original.modules()] == types
    assert state.keys() == original.state_dict().keys()
    for name, tensor in original.state_dict().items():
        assert torch.equal(state[name], tensor) and state[name] is not tensor


@pytest.mark.parametrize("size", [(1, 1), (4, 7), (5, 6)])
def test_average_pooling_whose_sizes_round_up(size):
    pool = nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(portable_copy(pool)(x), pool(x))
    graph = torch.jit.trace(portable_copy(pool), x, check_trace=False).inlined_graph
    # Not also a map of one channel, which OpenVINO refuses in bfloat16
    assert str(graph).count("aten::avg_pool2d") == 1
