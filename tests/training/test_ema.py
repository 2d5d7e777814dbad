import copy

import pytest
import torch
from torch import nn

from lambda_det.training.statistics import ExponentialAverage


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


def test_timm_agrees():
    from timm.utils import ModelEmaV3

    model = nn.Linear(4, 4).double()
    ours = ExponentialAverage(model, copy.deepcopy(model), 0.9)
    theirs = ModelEmaV3(model, decay=0.9, use_warmup=True, warmup_gamma=9, warmup_power=1)
    for n in range(120):
        _walk(model)
        ours.update()
        theirs.update(model, step=n + 2)  # its ramp counts from 2
    torch.testing.assert_close(ours.average.weight, theirs.module.weight)


def test_the_source_is_left_alone_and_the_copy_learns_nothing():
    model = Model()
    before = copy.deepcopy(model.state_dict())
    average = ExponentialAverage(model, copy.deepcopy(model), 0.9)
    average.update()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert not average.average.training
    assert not any(p.requires_grad for p in average.average.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened():
    model = Model()
    one = ExponentialAverage(model, copy.deepcopy(model), 0.9999)
    for _ in range(5):
        _walk(model)
        one.update()
    other = ExponentialAverage(model, Model(), 0.9999)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    _walk(model)
    one.update()
    other.update()
    assert other.updates == 6
    for name, tensor in one.average.state_dict().items():
        assert torch.equal(tensor, other.average.state_dict()[name]), name
