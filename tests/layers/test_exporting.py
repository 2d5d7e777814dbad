"""What an export computes is what the layer computes, whatever the size of the map."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental import _config

from lambda_det.layers import LambdaLayer
from lambda_det.layers.exporting import exporting, is_exporting
from lambda_det.layers.local.portable import portable_output
from tests.export.conftest import needs_any_size
from tests.layers import reference

SIZES = [(1, 1), (2, 3), (5, 9), (8, 8), (9, 17)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scope", [(1, 1), (3, 5), (7, 1), (19, 23)])
def test_portable_is_the_definition(size, scope):
    queries = torch.randn(2, *size, 2, 3, dtype=torch.float64)
    values = torch.randn(2, *size, 4, 2, dtype=torch.float64)
    embedding = torch.randn(3, 2, *scope, dtype=torch.float64)
    found = portable_output(queries, values, embedding)
    expected = reference.local_position_output(queries, values, embedding)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"intra_depth": 2},
        {"multi_head": True},
        {"content": False},
        {"scope": None},
        {"key_norm": "l2", "query_softmax": True},
        {"dilation": 2},
        {"dilation": 3, "multi_head": True},
        {"implementation": "query_first"},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", SIZES)
def test_the_layer_computes_the_same(options, size):
    layer = LambdaLayer(8, **{"query_depth": 4, "heads": 2, "scope": 7, **options}).double().eval()
    x = torch.randn(2, 8, *size, dtype=torch.float64)
    mask = torch.ones(2, 1, *size, dtype=torch.bool)
    mask[1, :, :, size[1] // 2 + 1 :] = False
    for given in (None, mask):
        expected = layer(x, given)
        with exporting():
            found = layer(x, given)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_graph_traced_on_one_size_holds_for_others():
    layer = LambdaLayer(8, query_depth=4, heads=2, scope=7).double().eval()
    with torch.no_grad():
        traced = torch.jit.trace(
            layer, torch.randn(1, 8, 20, 30, dtype=torch.float64), check_trace=False
        )
        assert "lambda_det::" not in str(traced.inlined_graph)
        for size in SIZES:
            x = torch.randn(2, 8, *size, dtype=torch.float64)
            torch.testing.assert_close(traced(x), layer(x), rtol=1e-10, atol=1e-10)


@needs_any_size
@pytest.mark.parametrize(
    "options", [{}, {"dilation": 2, "multi_head": True, "intra_depth": 2}], ids=str
)
def test_an_exported_graph_holds_for_maps_of_one_row_column_and_position(options):
    options = {"query_depth": 4, "heads": 2, "scope": 5, **options}
    layer = LambdaLayer(8, **options).double().eval()
    dim = torch.export.Dim
    sizes = {0: dim("batch", min=1), 2: dim("height", min=1), 3: dim("width", min=1)}
    x = torch.randn(2, 8, 20, 30, dtype=torch.float64)
    with torch.no_grad(), exporting(), _config.patch(backed_size_oblivious=True):
        program = torch.export.export(layer, (x,), dynamic_shapes=(sizes,), strict=False)
    run = program.module()
    for size in SIZES:
        for batch in (1, 3):
            x = torch.randn(batch, 8, *size, dtype=torch.float64)
            torch.testing.assert_close(run(x), layer(x), rtol=1e-10, atol=1e-10)


def test_the_state_ends_with_the_context():
    assert not is_exporting()
    with pytest.raises(KeyError), exporting():
        assert is_exporting()
        raise KeyError
    assert not is_exporting()
