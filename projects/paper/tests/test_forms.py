"""Special forms of lambdas against loops in float64, and against the modules that they are of."""

from __future__ import annotations

import pytest
import torch

from lambda_det.modeling.common import SqueezeExcitation
from lambda_paper.forms import (
    SpatialWeights,
    causal_output,
    channel_attention,
    spatial_attention,
)
from lambda_paper.general import GeneralLambdaLayer

B, N, H, K, V = 2, 7, 3, 4, 5


def causal_by_loops(queries, keys, values, embeddings):
    """Each query with the lambda of its own past, built pair by pair."""
    output = torch.zeros(B, N, H, V, dtype=torch.float64)
    for b in range(B):
        for n in range(N):
            shares = keys[b, : n + 1].exp() / keys[b, : n + 1].exp().sum(0)
            lambda_n = torch.zeros(K, V, dtype=torch.float64)
            for m in range(n + 1):
                lambda_n += torch.outer(shares[m] + embeddings[n, m], values[b, m])
            for h in range(H):
                output[b, n, h] = queries[b, n, h] @ lambda_n
    return output


def causal_inputs():
    shapes = (B, N, H, K), (B, N, K), (B, N, V), (N, N, K)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_cumulative_sums_mask_the_future():
    inputs = causal_inputs()
    found, expected = causal_output(*inputs), causal_by_loops(*(x.detach() for x in inputs))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(causal_output, inputs, fast_mode=True)
    queries, keys, values, embeddings = (x.detach().clone() for x in inputs)
    for x in (keys, values):
        x[:, 4:] = torch.randn_like(x[:, 4:])  # the future of the first four
    later = causal_output(queries, keys, values, embeddings)
    torch.testing.assert_close(later[:, :4], found[:, :4])
    assert not torch.allclose(later[:, 4:], found[:, 4:])


def test_keys_of_very_different_size():
    """A context whose keys are 200 below a later one has weights all the same, in float32 too."""
    queries, keys, values, embeddings = (x.detach().float() for x in causal_inputs())
    keys[:, 5] += 200
    found = causal_output(queries, keys, values, embeddings)
    expected = causal_by_loops(*(x.double() for x in (queries, keys, values, embeddings)))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scope", [3, 2 * N - 1])
def test_cumulative_sums_are_the_masked_layer(scope):
    """That of the general form with a causal mask, whose embeddings are by offset."""
    layer = GeneralLambdaLayer(8, query_depth=K, heads=2, scope=scope, sequence=True, norm="")
    layer.double()
    x = torch.randn(B, 8, N, dtype=torch.float64)
    queries, keys, values = layer.project(x[:, :, None])  # [b, 1, n, ..]
    embeddings = torch.zeros(N, N, K, dtype=torch.float64)
    for n in range(N):
        for m in range(N):
            offset = m - n + scope // 2
            if 0 <= offset < scope:
                embeddings[n, m] = layer.position.embedding[:, 0, 0, offset]
    found = causal_output(queries[:, 0], keys[:, 0, ..., 0], values[:, 0, ..., 0], embeddings)
    causal = torch.ones(N, N).tril().bool()
    torch.testing.assert_close(found.flatten(2).mT, layer(x, causal))


def lambdas_applied(queries, lambdas):
    """y_n = lambda_n^T q_n, one position at a time; lambdas [b, n, k, k]."""
    rows = [
        torch.stack([lambdas[b, n].T @ queries[b, n] for n in range(queries.shape[1])])
        for b in range(queries.shape[0])
    ]
    return torch.stack(rows)


def test_channel_attention_is_a_diagonal_lambda():
    module = SqueezeExcitation(8, 4).double()
    x = torch.randn(B, 8, 3, 4, dtype=torch.float64)
    queries = x.flatten(2).mT  # [b, n, k]
    weights = module(torch.ones_like(x), x.mean((2, 3), keepdim=True))[..., 0, 0]  # the excitation
    lambdas = torch.diag_embed(weights)[:, None].expand(-1, 12, -1, -1)
    found = channel_attention(queries, weights)
    torch.testing.assert_close(found, lambdas_applied(queries, lambdas))
    torch.testing.assert_close(found.mT.unflatten(2, (3, 4)), module(x))


def test_spatial_attention_is_a_scalar_lambda():
    module = SpatialWeights(3).double()
    x = torch.randn(B, 8, 3, 4, dtype=torch.float64)
    queries, weights = x.flatten(2).mT, module(x).flatten(1)
    assert ((weights > 0) & (weights < 1)).all()
    lambdas = weights[..., None, None] * torch.eye(8, dtype=torch.float64)
    found = spatial_attention(queries, weights)
    torch.testing.assert_close(found, lambdas_applied(queries, lambdas))
    # The weight of one position, by the definition of its convolution
    padded = torch.zeros(B, 2, 5, 6, dtype=torch.float64)
    padded[:, :, 1:-1, 1:-1] = torch.stack([x.mean(1), x.max(1).values], dim=1)
    total = (padded[:, :, 1:4, 2:5] * module.convolution.weight).sum((1, 2, 3))
    torch.testing.assert_close(weights.view(B, 3, 4)[:, 1, 2], 1 / (1 + (-total).exp()))
