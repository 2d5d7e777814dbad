"""SyncBatchNorm2d in one process; tests/distributed/test_processes.py has several of them."""

import pytest
import torch
from detectron2.layers import NaiveSyncBatchNorm, get_norm
from torch import nn

from lambda_det.modeling.norm import SyncBatchNorm2d, convert_sync_norms

CHANNELS = 5


def _images(seed: int, batch: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, CHANNELS, 3, 4, generator=generator).to(dtype)


def _with_parameters(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, CHANNELS))
        norm.bias.copy_(torch.linspace(-1, 1, CHANNELS))
    return norm


def test_one_process_is_batch_norm():
    results = []
    for kind in (SyncBatchNorm2d, nn.BatchNorm2d):
        norm, x = _with_parameters(kind(CHANNELS)), _images(0, 4).requires_grad_()
        y = norm(x)
        gradients = torch.autograd.grad(y, [x, *norm.parameters()], _images(9, 4))
        results.append([y, *gradients, norm.state_dict(), norm.eval()(x)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("training", [True, False])
def test_one_process_takes_an_empty_batch(training):
    norm = _with_parameters(SyncBatchNorm2d(CHANNELS)).train(training)
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    x = _images(0, 0, dtype=torch.bfloat16).requires_grad_()
    y = norm(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    y.sum().backward()
    assert x.grad is not None and torch.equal(norm.weight.grad, torch.zeros(CHANNELS))
    for key, value in norm.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_convert_sync_norms():
    naive = get_norm("naiveSyncBN", CHANNELS).eval()
    naive.eps, naive.momentum = 1e-3, 0.01
    naive.running_mean.fill_(3.0)
    naive.bias.requires_grad_(False)
    heads = nn.ModuleList([get_norm("naiveSyncBN_N", CHANNELS)])
    others = {name: get_norm(name, CHANNELS) for name in ("SyncBN", "BN")}
    net = nn.ModuleDict({"one": naive, "heads": heads, "same": naive, **others})
    keys = list(net.state_dict())
    assert convert_sync_norms(net, "cuda:0") is net
    assert type(net["SyncBN"]) is nn.SyncBatchNorm and type(net["BN"]) is nn.BatchNorm2d
    ours = net["one"]
    assert type(ours) is type(net["heads"][0]) is SyncBatchNorm2d and net["same"] is ours
    assert ours.weight is naive.weight and not ours.bias.requires_grad
    assert (ours.eps, ours.momentum, ours.training) == (1e-3, 0.01, False)
    assert torch.equal(ours.running_mean, torch.full((CHANNELS,), 3.0))
    assert list(net.state_dict()) == keys
    convert_sync_norms(net, torch.device("cpu"))
    assert type(net["SyncBN"]) is SyncBatchNorm2d and net["SyncBN"].training
    assert type(convert_sync_norms(NaiveSyncBatchNorm(CHANNELS), "cpu")) is SyncBatchNorm2d
