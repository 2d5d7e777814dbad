"""Batch norm's estimated statistics, and the moving average of weights."""

import copy

import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d
from torch import nn
from torchvision.ops import StochasticDepth

from lambda_det.modeling.norm import SyncBatchNorm2d
from lambda_det.training import statistics
from lambda_det.training.precision import Precision
from lambda_det.training.statistics import (
    ExponentialAverage,
    estimate_statistics,
    images_of_norms,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.BatchNorm2d(4)
        self.dropout = nn.Sequential(nn.Dropout(0.5), StochasticDepth(0.5, "row"))
        self.after = nn.BatchNorm2d(4)

    def forward(self, batch):
        return self.after(self.dropout(self.before(batch["images"])))


def test_nothing_but_statistics_is_changed_and_dropout_is_off():
    model, offsets = Net(), torch.arange(4.0).view(4, 1, 1)
    batches = [{"images": torch.randn(6, 4, 5, 5) * 3 + offsets} for _ in range(8)]
    estimate_statistics([model], iter(batches), 8, Precision("cpu", None))
    assert not any(part.training for part in model.modules())
    assert model.before.momentum == 0.1 and not model.before._forward_pre_hooks
    # With dropout, which is off in evaluation too, the variance would be larger
    torch.testing.assert_close(model.after.running_var, torch.ones(4), atol=0.05, rtol=0)


def test_images_by_which_norms_normalise(monkeypatch):
    own, synchronised = nn.BatchNorm2d(4), SyncBatchNorm2d(4)
    assert images_of_norms(own, 8) == {"one process": 8}
    monkeypatch.setattr(statistics.comm, "get_world_size", lambda: 2)
    assert images_of_norms(own, 8) == {"one process": 4}
    assert images_of_norms(synchronised, 8) == {"all processes": 8}
    assert images_of_norms(nn.SyncBatchNorm(4), 8) == {"all processes": 8}
    both = {"one process": 4, "all processes": 8}
    assert images_of_norms(nn.Sequential(own, synchronised), 8) == both
    assert images_of_norms(nn.Sequential(nn.GroupNorm(2, 4), FrozenBatchNorm2d(4)), 8) == {}


@pytest.mark.parametrize(
    ("mean", "deviation", "dtype", "rtol"),
    [(1000, 0.01, torch.float32, 1e-2), (3, 1, torch.bfloat16, 1e-5)],
)
def test_statistics_are_summed_exactly(mean, deviation, dtype, rtol):
    """A small variance far from zero is not lost, and bfloat16 is summed in float32."""
    norm, batches = nn.BatchNorm2d(4), (mean + torch.randn(6, 64, 4, 8, 8) * deviation).to(dtype)
    precision = Precision("cpu", None if dtype == torch.float32 else dtype)
    estimate_statistics([norm], batches, 6, precision)
    exact = batches.double()
    variance = exact.var((0, 1, 3, 4), correction=0)
    found = norm.running_mean.double(), norm.running_var.double()
    torch.testing.assert_close(found[0], exact.mean((0, 1, 3, 4)), rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1], variance, rtol=rtol, atol=0)


class Model(nn.Module):
    """With a parameter that two layers share, a batch norm and its counter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)


def _walk(model):
    """Change all weights and statistics."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor))
            else:
                tensor.add_(1)


@pytest.mark.parametrize("limit", [0.9999, 0.5])
def test_average_is_the_ramp_of_the_definition(limit):
    model = Model().double()
    average = ExponentialAverage(model, copy.deepcopy(model), limit)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for n in range(30):
        _walk(model)
        average.update()
        decay = min(limit, (1 + n) / (10 + n))
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * tensor
            else:
                expected[name] = tensor
    state = average.average.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, msg=name)
    assert average.updates == 30
    assert not any(p.requires_grad for p in average.average.parameters())
