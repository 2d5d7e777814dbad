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
    norm = _with_parameters(SyncBatchNorm2d(CHANNELS))
    plain = _with_parameters(nn.BatchNorm2d(CHANNELS))
    assert norm.state_dict().keys() == plain.state_dict().keys()
    for seed in range(3):
        x, grad = _images(seed, 4), _images(seed + 9, 4)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        norm(a).backward(grad)
        plain(b).backward(grad)
        torch.testing.assert_close(a.grad, b.grad)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[key], value)
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad)
    norm.eval(), plain.eval()
    torch.testing.assert_close(norm(x), plain(x))


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


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.native = get_norm("SyncBN", CHANNELS)
        self.naive = get_norm("naiveSyncBN", CHANNELS)
        self.heads = nn.ModuleList([get_norm("naiveSyncBN_N", CHANNELS)])
        self.same = self.naive
        self.plain = get_norm("BN", CHANNELS)
        self.naive.eps, self.naive.momentum = 1e-3, 0.01
        self.naive.running_mean.fill_(3.0)
        self.naive.bias.requires_grad_(False)
        self.naive.eval()


def test_convert_sync_norms():
    net = _Net()
    weight, keys = net.naive.weight, list(net.state_dict())
    assert convert_sync_norms(net, "cuda:0") is net
    assert type(net.native) is nn.SyncBatchNorm and type(net.plain) is nn.BatchNorm2d
    assert type(net.heads[0]) is SyncBatchNorm2d and type(net.naive) is SyncBatchNorm2d
    assert net.same is net.naive
    assert net.naive.weight is weight and not net.naive.bias.requires_grad
    assert (net.naive.eps, net.naive.momentum, net.naive.training) == (1e-3, 0.01, False)
    assert torch.equal(net.naive.running_mean, torch.full((CHANNELS,), 3.0))
    assert list(net.state_dict()) == keys
    convert_sync_norms(net, torch.device("cpu"))
    assert type(net.native) is SyncBatchNorm2d and net.native.training
    assert type(convert_sync_norms(NaiveSyncBatchNorm(CHANNELS), "cpu")) is SyncBatchNorm2d
